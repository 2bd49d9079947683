"""Launch scripts and configurations of other programs, read as a run.toml: no torch, and nothing of theirs is executed.

A program (Megatron-LM, GPT-NeoX, ...) is one module in the list of `systems.py`. It puts the keys of the files into a
`Reading` and applies its rules, which give every key a `KeyAnswer` in an `Account` (`account.py`). The rules of keys
that are only named, renamed or refused stand in the TOML file beside the module (`rule_table.py`); those that compute
are functions (`rules.py`). `report.py` prints the account and writes the run file.
"""
