"""DeepSpeed's keys inside another program's file, answered by the table of `config/deepspeed/keys.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.deepspeed.keys import (
    EFFECTS,
    KEYS,
    VERSION,
    Idle,
    Implied,
    KeyEffect,
    PassedOn,
    Refused,
    Removed,
)
from megalite.config.deepspeed.values import problem_of
from megalite.convert.adopt.rules import (
    OFF,
    KeyRule,
    NoEffect,
    Reading,
    Refuse,
    Take,
    Together,
    switch,
    whole,
)

BLOCKS = frozenset(name for name in KEYS if name and not isinstance(EFFECTS.get(name), Refused))
"""DeepSpeed's tables whose keys are answered one by one."""
_STAGE = "zero_optimization.stage"


@dataclass(frozen=True)
class _PassOn:
    """The value goes to DeepSpeed, which runs under ZeRO alone. kind: a word of config/deepspeed/values.py."""

    kind: str

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        if not zero_stage(reading):
            reading.no_effect(key, "DeepSpeed is not used without ZeRO")
        elif value == "auto":
            reading.no_effect(key, "DeepSpeed's default holds")
        elif problem := problem_of(self.kind, value):
            raise ValueError(problem[0])
        else:
            reading.take(key, {f"deepspeed.{key}": value})


@dataclass(frozen=True)
class _Gone:
    """DeepSpeed no longer has the key; a table that is switched off has no effect."""

    remedy: str

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        off = isinstance(value, Mapping) and value.get("enabled", bool(value)) in OFF
        if off or value in OFF:
            reading.no_effect(key, "it is off")
        else:
            reading.refuse(key, f"DeepSpeed {VERSION} no longer has it", self.remedy)


def zero_stage(reading: Reading) -> int:
    """Return the ZeRO stage of the keys; 0 where none is given or it is unusable, which its own rule says."""
    stage = reading.get(_STAGE, 0)
    return stage if stage in (1, 2, 3) else 0


def _read_stage(reading: Reading, key: str, value: Any) -> None:
    stage = whole(value)
    if stage == 0:
        reading.take(key, {}, "no ZeRO")
    elif stage in (1, 2, 3):
        reading.take(key, {f"deepspeed.{key}": stage})
    else:
        reading.refuse(key, f"{stage} is no ZeRO stage", "use 0, 1, 2 or 3")


def _read_older_offload(reading: Reading, key: str, value: Any) -> None:
    name = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}[key.rpartition(".")[2]]
    if not switch(value) or not zero_stage(reading):
        reading.no_effect(key, "nothing is offloaded")
    else:
        settings = {f"deepspeed.zero_optimization.{name}.device": "cpu"}
        reading.change(key, settings, f"an older form of {name}")


def _read_precision(reading: Reading, key: str, value: Any) -> None:
    """fp16.enabled and bf16.enabled; DeeperSpeed chose bf16 by fp16.type."""
    block = key.split(".")[0]
    precision = "bf16" if block != "fp16" or reading.get("fp16.type") == "bfloat16" else "fp16"
    if switch(value):
        reading.take(key, {"training.precision": precision})
    else:
        reading.no_effect(key, "it is off")


def _read_loss_scale(reading: Reading, key: str, value: Any) -> None:
    settings = {
        "fp16.loss_scale": "loss_scale",
        "fp16.initial_scale_power": "initial_loss_scale_power",
        "fp16.loss_scale_window": "loss_scale_window",
        "fp16.hysteresis": "loss_scale_hysteresis",
        "fp16.min_loss_scale": "minimum_loss_scale",
    }
    if not is_fp16(reading):
        reading.no_effect(key, "only fp16 has a loss scale")
    elif key == "fp16.loss_scale":
        scale = whole(value)
        reading.take(key, {"training.loss_scale": float(scale) if scale else "dynamic"})
    else:
        reading.take(key, {f"training.{settings[key]}": whole(value)})


def is_fp16(reading: Reading) -> bool:
    """Return whether the fp16 block is on and means fp16."""
    on = reading.is_on("fp16.enabled") or reading.get("precision") == "fp16"
    return on and reading.get("fp16.type") != "bfloat16"


def _rule(effect: KeyEffect) -> KeyRule | None:
    if isinstance(effect, PassedOn):
        return _PassOn(effect.kind)
    if isinstance(effect, Idle):
        return NoEffect(effect.reason)
    if isinstance(effect, Implied):
        return NoEffect("megalite always does so")
    if isinstance(effect, Refused):
        harmless = (*effect.harmless, *OFF) if False in effect.harmless else effect.harmless
        return Refuse("is not supported by megalite", effect.remedy, harmless)
    return _Gone(effect.remedy) if isinstance(effect, Removed) else None


def _rules() -> dict[str, KeyRule]:
    rules: dict[str, KeyRule] = {}
    for path, effect in EFFECTS.items():
        rule = _rule(effect)
        for name in (path, *(f"{path}.{inner}" for inner in effect.keys.split())):
            rules[name] = rule or NoEffect("it belongs to a part of DeepSpeed that is off")
    for name in ("fp16.enabled", "bf16.enabled", "bfloat16.enabled"):
        rules[name] = Together(_read_precision)
    for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
        rules[f"fp16.{name}"] = Together(_read_loss_scale)
    for name in ("cpu_offload", "cpu_offload_param"):
        rules[f"zero_optimization.{name}"] = Together(_read_older_offload)
    rules[_STAGE] = Together(_read_stage)
    rules["gradient_clipping"] = Take("optimizer.gradient_clipping", _clipping)
    return rules


def _clipping(value: Any) -> float:
    return 1.0 if value == "auto" else float(value)


DEEPSPEED: Mapping[str, KeyRule] = _rules()
"""Dotted key of DeepSpeed's JSON -> its rule; the system itself reads optimizer, scheduler and batch."""
