"""Words of config.json that several families share: each says some fields of ModelShape, and is read and written.

A family whose words are its own has a class of the same form in its file.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megalite.families.fields import shape_fields
from megalite.topology.shape import ModelShape

Config = Mapping[str, Any]


class Words(Protocol):
    """Some keys of config.json. A missing key was given the family's default before it is read."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of ModelShape that these keys say, and so leave free."""

    @property
    def config_keys(self) -> tuple[str, ...]:
        """These keys."""

    def read(self, config: Config) -> dict[str, Any]:
        """Return those of the fields that config.json sets; a value may be of a wrong type, or not built."""

    def write(self, shape: ModelShape) -> dict[str, Any]:
        """Return the keys that say the fields."""

    def refused(self, config: Config) -> Iterator[tuple[str, str]]:
        """Yield (what the file has, a remedy) for each value that is not built."""

    def ignored(self, config: Config) -> Iterator[str]:
        """Yield the keys of inner tables that nothing reads, with their path."""

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        """Yield (field, its value, the value that can be said) of fields that the keys cannot say."""


class Plain:
    """Words that take every value: the base of others."""

    def refused(self, config: Config) -> Iterator[tuple[str, str]]:
        yield from ()

    def ignored(self, config: Config) -> Iterator[str]:
        yield from ()

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        yield from ()


@dataclass(frozen=True)
class Shared(Plain):
    """One key for the value that several fields have in common: Llama's attention_bias, Starcoder2's use_bias."""

    key: str
    fields: tuple[str, ...]

    @property
    def config_keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, config: Config) -> dict[str, Any]:
        value = config.get(self.key)
        return {} if value is None else dict.fromkeys(self.fields, value)

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {self.key: getattr(shape, self.fields[0])}

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        values = shape_fields(shape)
        first = values[self.fields[0]]
        for name in self.fields[1:]:
            if (value := values.get(name, first)) != first:
                yield name, value, first


ATTENTION_BIAS = Shared("attention_bias", ("attention_bias", "attention_output_bias"))
MLP_BIAS = Shared("mlp_bias", ("mlp_bias",))


@dataclass(frozen=True)
class QueryScale(Plain):
    """Gemma's query_pre_attn_scalar, written as head_dim where the shape has none."""

    fields: tuple[str, ...] = ("query_pre_attn_scalar",)
    config_keys: tuple[str, ...] = ("query_pre_attn_scalar",)

    def read(self, config: Config) -> dict[str, Any]:
        value = config.get("query_pre_attn_scalar")
        return {} if value is None else {"query_pre_attn_scalar": value}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {"query_pre_attn_scalar": shape.query_pre_attn_scalar or shape.head_dim}


def quoted(value: Any) -> str:
    """Return a value of config.json as a message quotes it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
