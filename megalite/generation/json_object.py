"""Constrained decoding of JSON objects, by the package llguidance. No torch."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megalite.data.tokenizer import Tokenizer
from megalite.errors import ConfigError, Problem
from megalite.generation.request import Request
from megalite.generation.slots import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

PACKAGE = "llguidance"
# One space, or a new line and its indentation: a model that repeats itself writes white space without end.
_GRAMMAR = {"type": "object", "x-guidance": {"whitespace_pattern": r" |\n[ \t]{0,32}"}}


def without_package() -> bool:
    """Return whether llguidance is not installed."""
    return find_spec(PACKAGE) is None


class JsonGrammar:
    """The grammar of one JSON object, over the tokens of a tokenizer.

    Raises ConfigError if llguidance is not installed, or has no form for the tokenizer. Making one takes about a second
    for a vocabulary of 100,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        if without_package():
            raise _refused(f"needs the package {PACKAGE}", f"install it with: pip install {PACKAGE}")
        from llguidance import LLMatcher, LLTokenizer

        try:
            self._tokens: Any = LLTokenizer(
                tokenizer.backend.to_str(),
                n_vocab=tokenizer.vocab_size,
                eos_token=tokenizer.end_of_document_id,
            )
        except ValueError as error:
            raise _refused(f"has no form for {tokenizer.file} ({error})", "leave it out") from error
        self._grammar = LLMatcher.grammar_from_json_schema(_GRAMMAR)
        if not any(self._matcher().compute_logit_bias()):
            raise _refused(f"finds no token of {tokenizer.file} that begins an object", "leave it out")

    def constraint(self, request: Request) -> Constraint:
        """Return the constraint of one request, at its first new token."""
        return _Object(self._matcher(), request.stop_ids)

    def _matcher(self) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._tokens, self._grammar, log_level=0)


class _Object(Constraint):
    """One JSON object, so far. stop_ids: tokens that never occur: the end of the object ends the text."""

    def __init__(self, matcher: "LLMatcher", stop_ids: frozenset[int]):
        self._matcher, self._stop_ids = matcher, stop_ids

    def allowed(self) -> bytearray:
        found = bytearray(self._matcher.compute_logit_bias())
        for token in self._stop_ids:
            if token < len(found):
                found[token] = 0
        return found

    def push(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())


def _refused(why: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("json_object", why, remedy)], "the request")
