"""Family: what one model family fixes, and how its Hugging Face folder says a ModelShape. The defaults are Llama's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.errors import CheckpointError
from megalite.families.fields import DEFAULTS, shape_fields
from megalite.families.tensors import FamilyTensor, TensorNames
from megalite.families.words import Config, Words, quoted
from megalite.topology.shape import ModelShape

# ModelShape field -> key of config.json. A family that renames some writes {**SIZES, "rms_norm_eps": "norm_epsilon"}.
SIZES: Mapping[str, str] = {
    name: name
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "initializer_range",
    )
}
SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
ATTENTION_DROPOUT: Mapping[str, tuple[str, ...]] = {"attention_dropout": ("attention_dropout",)}
_HEAD_DIM = "head_dim"


@dataclass(frozen=True)
class Family:
    """A family's place in transformers, and how its config.json and its tensors say what a ModelShape says.

    model_type, architecture: as config.json has them.
    published: year and month. A shape that several families can say is written as the oldest of them, which the most
    programs read.
    keys: ModelShape field -> key of config.json that holds its value as it is. A family without a key for
    num_key_value_heads has one for each query head, one without head_dim has hidden_size / num_attention_heads.
    words: keys that say fields in another way: biases, rotary embedding, sliding windows.
    fixed: ModelShape fields that differ from the defaults and cannot be chosen in this family. A field that is in
    neither of the three has ModelShape's default.
    unset: fields that can be chosen, with the family's own default for a run that does not set them.
    required: keys that switch on what is not built, with the values that leave it out; the first is written.
    dropouts: keys of dropout probabilities -> the settings of [model] that they are in a run.
    absent: what transformers takes for a key that config.json lacks.
    always_tied: transformers ties the head to the embedding whatever config.json says.
    has_padding_row: transformers' embedding gives the row of pad_token_id no gradient.
    names: how the tensors are called and stored.
    presets: published models, by name, as settings of [model]; `sizes` makes them.
    """

    model_type: str
    architecture: str
    published: str
    keys: Mapping[str, str] = field(default_factory=lambda: SIZES)
    words: tuple[Words, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unset: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    dropouts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ATTENTION_DROPOUT)
    absent: Mapping[str, Any] = field(default_factory=dict)
    always_tied: bool = False
    has_padding_row: bool = True
    names: TensorNames = field(default_factory=TensorNames)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def free(self) -> tuple[str, ...]:
        """The fields of ModelShape that config.json can say."""
        return (*self.keys, *(name for words in self.words for name in words.fields))

    @property
    def config_keys(self) -> frozenset[str]:
        """The keys of config.json that a ModelShape follows from, or that the family refuses."""
        of_words = (key for words in self.words for key in words.config_keys)
        return frozenset({*self.keys.values(), *of_words, *self.required, _HEAD_DIM})

    @property
    def defaults(self) -> dict[str, Any]:
        """The ModelShape fields whose default in this family differs from ModelShape's."""
        return {**self.unset, **self.fixed}

    def read_config(self, config: Config) -> dict[str, Any]:
        """Return the ModelShape fields that config.json sets; a value may be of a wrong type or size."""
        config = self._completed(config)
        shape = {name: config[key] for name, key in self.keys.items() if config.get(key) is not None}
        for words in self.words:
            shape |= words.read(config)
        return shape

    def read_dropout(self, config: Config) -> dict[str, Any]:
        """Return the settings of [model] with the dropout that transformers trains with by this config.json."""
        config = self._completed(config)
        return {
            setting: config[key]
            for key, settings in self.dropouts.items()
            if config.get(key)
            for setting in settings
        }

    def write_dropout(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that say the dropout in a run's settings of [model]; those that it sets."""
        return {key: settings[first] for key, (first, *_) in self.dropouts.items() if first in settings}

    def refused(self, config: Config) -> Iterator[tuple[str, str]]:
        """Yield (what config.json has, a remedy) for each of its values that is not built."""
        config = self._completed(config)
        if _HEAD_DIM not in self.free and (own := _foreign_head_dim(config, self.keys)):
            yield (
                f"has {_HEAD_DIM} = {own[0]}",
                f"only {own[1]}, the hidden size divided by the heads, is supported",
            )
        for name, allowed in self.required.items():
            if name in config and config[name] not in allowed:
                built = " or ".join(map(quoted, allowed))
                yield f"has {name} = {quoted(config[name])}", f"only {built} is supported"
        for words in self.words:
            yield from words.refused(config)

    def ignored(self, config: Config) -> Iterator[str]:
        """Yield the keys of config.json's inner tables that nothing reads, with their path."""
        for words in self.words:
            yield from words.ignored(config)

    def write_config(self, shape: ModelShape, dtype: str, token_ids: Mapping[str, int]) -> dict[str, Any]:
        """Return config.json for transformers 5 and, by the older names beside, for 4.

        dtype: of the weights, as safetensors and transformers name it: "float32", "bfloat16".

        Raises CheckpointError when the family's files cannot express the model.
        """
        foreign = [
            f"model.{name} = {value} ({shape.family} has {theirs})"
            for name, value, theirs in self.inexpressible(shape)
        ]
        if foreign:
            raise CheckpointError(
                f"a {shape.family} folder cannot express {', '.join(foreign)}: train with another model.family,"
                " or without export (checkpoint.export = false)"
            )
        written: dict[str, Any] = {}
        for words in self.words:
            written |= words.write(shape)
        values = shape_fields(shape)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{key: values[name] for name, key in self.keys.items()},
            **{key: allowed[0] for key, allowed in self.required.items()},
            **dict.fromkeys(self.dropouts, 0.0),
            **written,
            # Without these keys transformers takes the family's own ids, be they in the vocabulary or not; the
            # embedding of a padding id would get no gradient.
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **token_ids,
            "dtype": dtype,
            "torch_dtype": dtype,
            "use_cache": True,
        }

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        """Yield (field, value, the value that the family has) of all that its files cannot say."""
        free = set(self.free)
        expected = {
            **DEFAULTS,
            "family": self.model_type,
            "num_key_value_heads": shape.num_attention_heads,
            "head_dim": shape.hidden_size // shape.num_attention_heads,
            **self.fixed,
        }
        for name, value in shape_fields(shape).items():
            if name in expected and name not in free and value != expected[name]:
                yield name, value, expected[name]
        for words in self.words:
            yield from words.inexpressible(shape)
        if self.always_tied and not shape.tie_word_embeddings:
            yield "tie_word_embeddings", False, True

    def tensors(self, shape: ModelShape) -> tuple[FamilyTensor, ...]:
        """Return every tensor of the family's folder, in forward order."""
        return tuple(self.names.tensors(shape))

    def _completed(self, config: Config) -> Config:
        return {**self.absent, **config}


def _foreign_head_dim(config: Config, keys: Mapping[str, str]) -> tuple[int, int] | None:
    """Return head_dim and hidden_size / num_attention_heads where transformers would take the first, another one."""
    width, hidden, heads = (
        config.get(key) for key in (_HEAD_DIM, keys["hidden_size"], keys["num_attention_heads"])
    )
    if not (isinstance(width, int) and isinstance(hidden, int) and isinstance(heads, int) and heads):
        return None
    return None if width == hidden // heads else (width, hidden // heads)


def sizes(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int | None,
    max_position_embeddings: int,
    **others: Any,
) -> dict[str, Any]:
    """Return the settings of [model], or the keys of config.json, of these sizes, and others. None: left out."""
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        **({} if num_key_value_heads is None else {"num_key_value_heads": num_key_value_heads}),
        "max_position_embeddings": max_position_embeddings,
        **others,
    }
