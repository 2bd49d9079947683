"""Sliding windows in config.json: in all layers, or in those that layer_types or an older key names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.families.words import Config, Plain
from megalite.topology.shape import ModelShape

_WINDOW, _FIRST, _EVERY = "sliding_window", "full_attention_layers", "full_attention_every"
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class EveryLayer(Plain):
    """One window for all layers, or none (Mistral)."""

    fields: tuple[str, ...] = (_WINDOW,)
    config_keys: tuple[str, ...] = (_WINDOW,)

    def read(self, config: Config) -> dict[str, Any]:
        window = config.get(_WINDOW)
        return {} if window is None else {_WINDOW: window}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {_WINDOW: shape.sliding_window}


@dataclass(frozen=True)
class LayerTypes(Plain):
    """A window in the layers that layer_types calls sliding_attention; without it, as the older keys say.

    every: every n-th layer may be without the window again.
    """

    every: bool = True
    config_keys: tuple[str, ...] = (_WINDOW, "layer_types")

    @property
    def fields(self) -> tuple[str, ...]:
        return (_WINDOW, _FIRST, _EVERY) if self.every else (_WINDOW, _FIRST)

    def read(self, config: Config) -> dict[str, Any]:
        window, layers = config.get(_WINDOW), config.get("num_hidden_layers", 0)
        first, every = self._pattern(config) or (layers, 0)
        if window is None or first >= layers:
            return {}
        fields = {_WINDOW: window, _FIRST: first, _EVERY: every}
        return {name: value for name, value in fields.items() if value}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        kinds = [
            _FULL if shape.window_of(layer) is None else _SLIDING for layer in range(shape.num_hidden_layers)
        ]
        return {_WINDOW: shape.sliding_window, **self.older_keys(shape), "layer_types": kinds}

    def refused(self, config: Config) -> Iterator[tuple[str, str]]:
        if self._pattern(config) is None:
            remedy = "sliding_attention may only follow after full_attention"
            if self.every:
                remedy += ", with every n-th layer full_attention again"
            yield "mixes layer_types", remedy

    def older_keys(self, shape: ModelShape) -> dict[str, Any]:
        """Return the keys beside layer_types."""
        return {}

    def without_layer_types(self, config: Config) -> tuple[int, int] | None:
        """Return full_attention_layers and full_attention_every of a file without layer_types; None: not built."""
        return 0, 0

    def _pattern(self, config: Config) -> tuple[int, int] | None:
        """full_attention_layers and full_attention_every; None where they cannot say which layers have the window."""
        kinds = config.get("layer_types")
        if not isinstance(kinds, list):
            return self.without_layer_types(config)
        layers = config.get("num_hidden_layers", 0)
        first = kinds.index(_SLIDING) if _SLIDING in kinds else layers
        every = kinds.index(_FULL, first) + 1 if self.every and _FULL in kinds[first:] else 0
        for layer, kind in enumerate(kinds):
            full = layer < first or (every and (layer + 1) % every == 0)
            if kind != (_FULL if full else _SLIDING):
                return None
        return (first, every) if len(kinds) == layers else None


@dataclass(frozen=True)
class AfterFirst(LayerTypes):
    """The first max_window_layers have no window, where use_sliding_window is set at all (Qwen 2)."""

    every: bool = False
    config_keys: tuple[str, ...] = (_WINDOW, "layer_types", "use_sliding_window", "max_window_layers")

    def older_keys(self, shape: ModelShape) -> dict[str, Any]:
        sliding = shape.sliding_window is not None
        first = shape.full_attention_layers if sliding else shape.num_hidden_layers
        return {"use_sliding_window": sliding, "max_window_layers": first}

    def without_layer_types(self, config: Config) -> tuple[int, int]:
        if config.get("use_sliding_window", False):
            return config.get("max_window_layers", 28), 0
        return config.get("num_hidden_layers", 0), 0


@dataclass(frozen=True)
class ExceptEvery(LayerTypes):
    """Every sliding_window_pattern-th layer has no window (Gemma 2 and 3)."""

    config_keys: tuple[str, ...] = (
        _WINDOW,
        "layer_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    )

    def older_keys(self, shape: ModelShape) -> dict[str, Any]:
        every = shape.full_attention_every
        return {"sliding_window_pattern": every} if every else {}

    def without_layer_types(self, config: Config) -> tuple[int, int]:
        return 0, config.get("sliding_window_pattern", 0)
