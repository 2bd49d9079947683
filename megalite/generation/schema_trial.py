"""Compiles a JSON schema in a process that may be killed: some schemas take minutes and gigabytes to compile.

Run as a program, this file compiles the schema on its standard input, over a vocabulary of single bytes, and prints why
that failed. It imports nothing of megalite, so that it starts fast.
"""

import json
import resource
import signal
import subprocess
import sys
from typing import Any

# CPU seconds of a compilation: the other ranks repeat it between two steps of the engine.
COMPILE_SECONDS = 0.25
_MEMORY = 1 << 30
# A machine under load gives a process its CPU seconds late.
_LONGEST_WAIT = 30.0
# No schema chooses these: `lenient` would ignore keywords. White space is one space, or a new line and its indentation:
# a model that repeats itself writes white space without end.
OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r" |\n[ \t]{0,32}",
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
}
# One mask takes at most about 10 ms, a grammar at most about 50 MB; an optional key is about four items.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 100_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


def compile_problem(schema: str) -> str | None:
    """Return why a JSON schema cannot be compiled, or not soon enough; None: it can."""
    program = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(
            program, input=schema, capture_output=True, text=True, check=False, timeout=_LONGEST_WAIT
        )
    except subprocess.TimeoutExpired:
        return _too_large()
    if done.returncode != 0:
        return _too_large()
    return done.stdout.strip() or None


def _too_large() -> str:
    return f"takes more than {COMPILE_SECONDS:g} s or {_MEMORY >> 20} MiB to compile"


class _Bytes:
    """The vocabulary of 256 bytes and an end."""

    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    tokens = (*(bytes([each]) for each in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    schema, tokens = sys.stdin.read(), LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.loads(schema), overrides=OPTIONS)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        # The first mask builds what the grammar alone leaves for later.
        matcher.compute_bitmask()
    except ValueError as error:
        sys.stdout.write(str(error))
    else:
        sys.stdout.write(matcher.get_error())


if __name__ == "__main__":
    _main()
