"""Launch scripts and configurations of other programs, read as a run.toml: no torch, and nothing of theirs is executed.

A system (Megatron-LM, GPT-NeoX, ...) is one file with a `System` (`sources.py`), in the table of `systems.py`. Its
`read` puts the keys of the files into a `Reading` and applies its table of rules (`rules.py`), which gives every key a
`KeyAnswer` in an `Account` (`account.py`). `report.py` prints the account and writes the run file.
"""
