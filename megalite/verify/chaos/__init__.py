"""Faults on purpose: `megalite chaos` disturbs a job from the outside and measures what the faults cost. No torch.

`faults.py` draws which faults come when, `job.py` is one start of `megalite train` as a user would type it,
`inject.py` does one fault to its processes, `watch.py` follows what the job prints and writes, `disturbed.py` lets the
job run to its end through all of them, `account.py` makes the figures, `equality.py` compares with a calm run,
`picture.py` draws the time. Nothing in the job knows of them but `weights.py`, a callback of the run that flips a bit.
"""
