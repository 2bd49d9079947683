"""Studies of many trainings: sweeps over settings, and scaling laws over a ladder of model sizes.

A study is a folder of ordinary run folders. Each run is a `megalite train` of its own, so that it is checked, resumed
and read like any other; the study only chooses the settings, starts the runs and compares their losses. No torch.
"""
