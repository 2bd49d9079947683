"""Rotary embedding in config.json: rope_parameters of transformers 5, rope_theta and rope_scaling of 4."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megalite.families.words import Config, Plain, quoted
from megalite.topology.shape import ModelShape, RopeScaling

_ORIGINAL = "original_max_position_embeddings"
# rope_type -> the fields of RopeScaling that it uses, by their names in config.json.
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": (
        *("factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}
# Fields without which transformers refuses a rope_type; "yarn" and "longrope" follow from two lengths without a factor.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_PARTIAL = "partial_rotary_factor"
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Rope(Plain):
    """The base of the rotary frequencies, and how they are stretched.

    scalings: the values of rope_type that the family's files may have beside "default".
    local: layers with a sliding window have a base of their own, rope_local_base_freq (Gemma 3).
    partial: partial_rotary_factor says which share of each head is rotated.
    theta_key, partial_key: the names in transformers 4.
    """

    scalings: tuple[str, ...] = tuple(SCALINGS)
    local: bool = False
    partial: bool = False
    theta_key: str = "rope_theta"
    partial_key: str = "partial_rotary_factor"

    @property
    def fields(self) -> tuple[str, ...]:
        is_free = {
            "rope_theta": True,
            "rope_scaling": bool(self.scalings),
            "rope_local_base_freq": self.local,
            "partial_rotary_factor": self.partial,
        }
        return tuple(name for name, free in is_free.items() if free)

    @property
    def config_keys(self) -> tuple[str, ...]:
        local = ("rope_local_base_freq",) if self.local else ()
        return (
            "rope_parameters",
            "rope_scaling",
            _ORIGINAL,
            _PARTIAL,
            self.theta_key,
            self.partial_key,
            *local,
        )

    def read(self, config: Config) -> dict[str, Any]:
        rope = self._rope(config)
        kind = self.rope_type(rope)
        fields = {"rope_theta": rope.get("rope_theta", config.get(self.theta_key))}
        if kind in self.scalings:
            fields["rope_scaling"] = _scaling(kind, rope, config)
        if self.local:
            fields["rope_local_base_freq"] = _local(config).get(
                "rope_theta", config.get("rope_local_base_freq")
            )
        if self.partial:
            fields["partial_rotary_factor"] = rope.get("partial_rotary_factor", config.get(self.partial_key))
        return {name: value for name, value in fields.items() if value is not None}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        base = {"rope_theta": shape.rope_theta}
        part = {"partial_rotary_factor": shape.partial_rotary_factor} if self.partial else {}
        config: dict[str, Any] = {self.theta_key: shape.rope_theta}
        if self.partial:
            config[self.partial_key] = shape.partial_rotary_factor
        scaling: dict[str, Any] = {"rope_type": "default"}
        if shape.rope_scaling is not None:
            scaling = scaling_words(shape.rope_scaling)
            config["rope_scaling"] = scaling
            if shape.rope_scaling.rope_type == "longrope":
                # Where transformers 4 looks for it, and 5 first.
                config[_ORIGINAL] = scaling[_ORIGINAL]
        config["rope_parameters"] = {**scaling, **base, **part}
        if self.local:
            local = shape.rope_local_base_freq or shape.rope_theta
            config["rope_local_base_freq"] = local
            config["rope_parameters"] = {
                "full_attention": config["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            }
        return config

    def refused(self, config: Config) -> Iterator[tuple[str, str]]:
        if (local := self.rope_type(_local(config))) != "default":
            text = f"scales the rotary frequencies of layers with a window ({quoted(local)})"
            yield text, 'only "default" is supported'
        rope = self._rope(config)
        kind, built = self.rope_type(rope), ("default", *self.scalings)
        if kind not in built:
            words = f"{', '.join(map(quoted, built))} {'are' if len(built) > 1 else 'is'} supported"
            yield f"scales its rotary frequencies ({quoted(kind)})", words
        for name in _REQUIRED.get(kind, ()) if kind in built else ():
            if rope.get(name) is None:
                yield f"scales its rotary frequencies ({quoted(kind)}) without {name}", f"add {name}"
        if kind in built and not self.partial and (rope.get(_PARTIAL) or config.get(_PARTIAL) or 1.0) != 1.0:
            yield "rotates a part of each head", "only whole heads are supported"

    def ignored(self, config: Config) -> Iterator[str]:
        """Yield the keys of rope_parameters and rope_scaling that neither transformers nor this class reads."""
        tables = {name: config.get(name) for name in ("rope_parameters", "rope_scaling")}
        whole = tables["rope_parameters"]
        if isinstance(whole, Mapping) and whole.keys() & set(_LAYER_KINDS):
            del tables["rope_parameters"]
            parts = {name: whole.get(name) for name in _LAYER_KINDS}
            tables |= {f"rope_parameters.{name}": table for name, table in parts.items()}
            yield from (f"rope_parameters.{key}" for key in whole if key not in _LAYER_KINDS)
        for path, table in tables.items():
            keys = table if isinstance(table, Mapping) else {}
            used = ("rope_type", "type", "rope_theta", _PARTIAL, *SCALINGS.get(self.rope_type(keys), ()))
            yield from (f"{path}.{key}" for key in keys if key not in used and keys[key] is not None)

    def rope_type(self, rope: Mapping[str, Any]) -> Any:
        """Return how rope_parameters or rope_scaling scale, by the name that RopeScaling has for it."""
        return rope.get("rope_type", rope.get("type", "default"))

    def _rope(self, config: Config) -> Mapping[str, Any]:
        """Return rope_scaling where it says something, else rope_parameters: transformers' order.

        With a base for windows, rope_parameters has tables for each kind of layer, and rope_scaling changes the full.
        """
        rope, scaling = config.get("rope_parameters"), config.get("rope_scaling")
        rope = rope if isinstance(rope, Mapping) else {}
        scaling = scaling if isinstance(scaling, Mapping) else {}
        full = rope.get("full_attention", {} if self.local else rope)
        full = full if isinstance(full, Mapping) else {}
        return {**full, **scaling} if self.local else scaling or full

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        scaling = shape.rope_scaling
        if self.scalings and scaling is not None and scaling.rope_type not in self.scalings:
            yield "rope_scaling", scaling.rope_type, "default"


def scaling_words(scaling: RopeScaling) -> dict[str, Any]:
    """Return rope_type and the fields that it uses, as config.json and RUN.toml name them; without those left open."""
    used = ("rope_type", *SCALINGS[scaling.rope_type])
    values = {each.name: getattr(scaling, each.name) for each in fields(scaling) if each.name in used}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None
    }


def _scaling(kind: Any, rope: Mapping[str, Any], config: Config) -> RopeScaling:
    """As transformers 5 reads it: an original length outside of rope_parameters counts before the one within."""
    longest = config.get("max_position_embeddings")
    original = config.get(_ORIGINAL) or rope.get(_ORIGINAL) or longest
    if isinstance(original, float) and original.is_integer():
        original = int(original)
    values_of = {**rope, _ORIGINAL: original}
    for name in ("mscale", "mscale_all_dim"):
        values_of[name] = rope.get(name) or None  # 0 counts as not set
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        values_of["factor"] = _ratio(longest, original)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in SCALINGS[kind]
        if (value := values_of.get(name)) is not None
    }
    return RopeScaling(kind, **{"factor": 1.0, **values})


def _ratio(longest: Any, original: Any) -> float:
    """1 where config.json has no such numbers, which is said of them elsewhere."""
    if isinstance(longest, int) and isinstance(original, int) and original:
        return max(longest / original, 1.0)
    return 1.0


def _local(config: Config) -> Mapping[str, Any]:
    """rope_parameters of layers with a window, where they have their own."""
    rope = config.get("rope_parameters")
    local = rope.get("sliding_attention") if isinstance(rope, Mapping) else None
    return local if isinstance(local, Mapping) else {}
