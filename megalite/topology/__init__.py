"""Layouts, without torch: ranks and axes, layers of stages, how each parameter is cut, optimizers and
schedules as data."""
