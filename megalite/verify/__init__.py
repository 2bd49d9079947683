"""Proof for users: their own layout against one process, checkpoints and models against each other.

`run.py` trains a run file's layout and one process side by side, on ranks that `record.py` has write down what they
compute; `compare.py` finds the first tensor that departs, and `certificate.py` says what was compared and what was not.
"""
