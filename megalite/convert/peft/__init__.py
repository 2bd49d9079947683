"""Adapters in PEFT's file format, both ways, and merged into the model that they adapt."""
