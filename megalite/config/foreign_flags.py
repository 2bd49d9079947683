"""Flags of DeepSpeed's launch convention, which are taken; cli/arguments.py answers those of Megatron-LM."""

from collections.abc import Sequence

DEEPSPEED = "--deepspeed"
"""The switch that asks for DeepSpeed. Its file is named by --deepspeed_config, or by the word behind the switch."""
_CONFIG = ("--deepspeed_config", "--deepspeed-config")


def with_deepspeeds_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with --deepspeed_config FILE as --deepspeed.config=FILE.

    A file behind the switch --deepspeed counts alike; without one the switch stays for `apply_overrides`.
    """
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        takes_next = not equals and bool(rest) and not rest[0].startswith("--")
        if name in _CONFIG:
            value = rest.pop(0) if takes_next else value
            kept.append(f"--deepspeed.config={value}" if value else "--deepspeed.config")
        elif name == DEEPSPEED and (equals or (takes_next and rest[0].endswith(".json"))):
            kept.append(f"--deepspeed.config={value if equals else rest.pop(0)}")
        else:
            kept.append(name + equals + value)
    return kept
