"""Constrained decoding of JSON by a JSON schema, by the package llguidance. No torch."""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import ConfigError, Problem
from megalite.generation.request import Request
from megalite.generation.schema_trial import LIMITS, OPTIONS, compile_problem

if TYPE_CHECKING:
    from llguidance import LLMatcher

PACKAGE = "llguidance"
JSON_OBJECT = '{"type":"object"}'
"""The schema of any JSON object."""
MOST_BYTES, DEEPEST, MOST_KEYS = 64 << 10, 64, 1000
_KEPT = 32  # compiled schemas
_LONGEST_CAUSE = 300


def without_package() -> bool:
    """Return whether llguidance is not installed."""
    return find_spec(PACKAGE) is None


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return the text of a JSON schema, as `Request.json_schema` has it. Raises ConfigError for one that is too large.

    The keys keep their order: a text has its properties in the order of the schema.
    """
    if "x-guidance" in schema:
        raise _refused("has x-guidance, options of llguidance that are not for requests", "leave it out")
    _check_sizes(schema, DEEPEST)
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MOST_BYTES:
        raise _refused(f"has {len(text)} bytes, more than {MOST_BYTES}", "make it smaller")
    return text


class JsonGrammars:
    """The grammars of JSON schemas over the tokens of a tokenizer. Any thread may call its methods.

    The first schema takes 0.2 s for a vocabulary of 32,000 tokens and 0.6 s for 128,000, each other one milliseconds.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: Any = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        # `constraint` runs between two steps of the engine, and must not wait for the check of another schema.
        self._checking, self._changing = threading.Lock(), threading.Lock()

    def check(self, schema: str) -> None:
        """Compile a schema, which `schema_text` made, in a process of its own first.

        Raises ConfigError if llguidance is not installed, has no form for the tokenizer or the schema, or compiles the
        schema for too long.
        """
        if without_package():
            raise _refused(f"needs the package {PACKAGE}", f"install it with: pip install {PACKAGE}")
        # One schema at a time: a client that sends slow ones shall not take all cores.
        with self._checking:
            if self._kept(schema) is not None:
                return
            if schema != JSON_OBJECT and (cause := compile_problem(schema)):
                raise _unusable(cause)
            self._compile(schema)

    def constraint(self, request: Request) -> "JsonText | None":
        """Return the constraint of a checked request at its first new token; None: it has no schema."""
        if request.json_schema is None:
            return None
        matcher = self._kept(request.json_schema) or self._compile(request.json_schema)
        return JsonText(
            matcher.deep_copy(), request.stop_ids or frozenset({self._tokenizer.end_of_document_id})
        )

    def _kept(self, schema: str) -> "LLMatcher | None":
        with self._changing:
            if schema in self._compiled:
                self._compiled.move_to_end(schema)
            return self._compiled.get(schema)

    def _compile(self, schema: str) -> "LLMatcher":
        """Return a schema's matcher at its first token, and keep it; only its copies advance."""
        from llguidance import LLMatcher, LLParserLimits

        self._tokens = self._tokens or self._vocabulary()
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        first = _mask(matcher.deep_copy())
        if matcher.is_error():
            raise _unusable(matcher.get_error())
        if not first:
            raise _refused(f"has no text that tokens of {self._tokenizer.file} begin", "change the schema")
        with self._changing:
            self._compiled[schema] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        tokenizer = self._tokenizer
        try:
            return LLTokenizer(
                tokenizer.backend.to_str(),
                n_vocab=tokenizer.vocab_size,
                eos_token=tokenizer.end_of_document_id,
            )
        except ValueError as error:
            raise _refused(f"has no form for {tokenizer.file} ({error})", "leave it out") from error


class JsonText:
    """A text of a schema so far; every rank keeps it. stop_ids: tokens that end it once it is whole, never before."""

    def __init__(self, matcher: "LLMatcher", stop_ids: frozenset[int]):
        self._matcher, self._stop_ids = matcher, stop_ids
        self._ended = False

    def allowed(self) -> bytearray:
        """Return a byte for each token id, 0 if it may not be next; ids behind them may not either."""
        mask = _mask(self._matcher)
        # Without a next token a stop token ends the text, which is cut: its own text is not shown.
        may_end = self._matcher.is_accepting() or not mask
        mask.extend(bytes(max(0, max(self._stop_ids) + 1 - len(mask))))
        for token in self._stop_ids:
            mask[token] = may_end
        return mask

    def push(self, token: int) -> bool:
        """Append a token; return whether it was allowed."""
        if token in self._stop_ids:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        return bool(self._matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        """Whether the text is whole."""
        return self._ended or bool(self._matcher.is_stopped() and self._matcher.is_accepting())


def _mask(matcher: "LLMatcher") -> bytearray:
    """Return a byte for each token, 0 if it may not be next; empty: none may, or a limit of LIMITS was reached."""
    mask = bytearray(matcher.compute_logit_bias())
    return bytearray() if matcher.is_error() or mask.count(0) == len(mask) else mask


def _check_sizes(value: Any, levels: int) -> None:
    """Raise ConfigError for objects that are nested more than `levels` deep, or have too many keys."""
    if not isinstance(value, dict | list):
        return
    if levels == 0:
        raise _refused(f"is nested more than {DEEPEST} levels deep", "flatten it, or use $ref")
    if isinstance(value, dict) and len(value) > MOST_KEYS:
        raise _refused(f"has {len(value)} keys in one object, more than {MOST_KEYS}", "make it smaller")
    for inner in value.values() if isinstance(value, dict) else value:
        _check_sizes(inner, levels - 1)


def _unusable(cause: str) -> ConfigError:
    shown = " ".join(cause.split())[:_LONGEST_CAUSE]
    return _refused(f"{PACKAGE}: {shown}", "change the schema")


def _refused(why: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("json_schema", why, remedy)], "the request")
