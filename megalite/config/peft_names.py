"""The names that PEFT's files have for the tensors of an adapter."""

import re
from collections import Counter
from collections.abc import Iterator

from megalite.families.registry import FAMILIES, family_tensors
from megalite.topology.adapter import Lora
from megalite.topology.experts import EXPERT_AXIS, MixtureShape
from megalite.topology.parameters import model_parameters, trained_tensors
from megalite.topology.shape import ModelShape

_BEFORE = "base_model.model."
MAGNITUDE = "lora_magnitude_vector"
_OF_LORA = ("lora_A", "lora_B", MAGNITUDE)


def fused_with_others(shape: ModelShape) -> str | None:
    """Return a tensor of the family's files that holds an adapted linear with others, or transposed; None: none does.

    PEFT adapts such a tensor as one, which is another model than an adapter of each linear.
    """
    adapter = shape.adapter
    assert isinstance(adapter, Lora)
    for tensor in family_tensors(shape.base):
        adapted = any(adapter.adapts(part.removesuffix(".weight")) for part in tensor.parts)
        # A trained bias, too, has a name of its own there or none.
        adapted |= all(part.endswith(".bias") for part in tensor.parts) and adapter.trains(tensor.parts)
        if adapted and (tensor.transposed or len(tensor.parts) > 1):
            return tensor.name
    return None


def adapted_linears(shape: ModelShape) -> Iterator[tuple[str, bool]]:
    """Yield each linear of a layer that the adapter changes, and whether it is an expert's."""
    adapter = shape.adapter
    assert isinstance(adapter, Lora)
    for parameter in model_parameters(shape.base):
        for part in parameter.spec.parts if parameter.takes_lora else ():
            module = part.name.removesuffix(".weight")
            if adapter.adapts(module):
                yield module, parameter.spec.axis == EXPERT_AXIS


def beyond_transformers_5(shape: ModelShape) -> str | None:
    """Return an adapted linear that PEFT 0.21 loses beside transformers 5, or refuses; None: it loads all of them.

    There a layer's experts are two parameters, which PEFT adapts whole. It takes each linear of one of their names for
    an expert's, and the gate alone for a mistake.
    """
    linears = list(adapted_linears(shape))
    names = {module.rpartition(".")[-1] for module, of_expert in linears if of_expert}
    if len(names & {"gate_proj", "up_proj"}) == 1:
        return next(module for module, of_expert in linears if of_expert)
    mixture = isinstance(shape, MixtureShape) and shape.experts is not None
    others = (module for module, of_expert in linears if ".mlp." in module and not of_expert)
    return next(others, None) if mixture else None


def peft_names(shape: ModelShape) -> dict[str, str]:
    """Return canonical name -> name in adapter_model.safetensors, of every tensor that the adapter trains."""
    adapter = shape.adapter
    assert isinstance(adapter, Lora)
    theirs = dict(_names_of_modules(shape.base))
    return {name: _peft_name(name, theirs, adapter) for name in trained_tensors(shape)}


def peft_targets(shape: ModelShape) -> list[str]:
    """Return the adapted modules as PEFT's target_modules names them.

    With those of experts, which are thousands, a last word stands for all modules that have it.
    """
    theirs = {
        ours: name.removesuffix(".weight")
        for ours, name in _names_of_modules(shape.base)
        if ours.endswith(".weight")
    }
    linears = list(adapted_linears(shape))
    modules = [theirs[f"{module}.weight"] for module, _ in linears]
    if not any(of_expert for _, of_expert in linears):
        return modules
    word = {name: name.rpartition(".")[-1] for name in theirs.values()}
    every, adapted = Counter(word.values()), Counter(word[name] for name in modules)
    whole = {last for last, number in adapted.items() if number == every[last]}
    return list(dict.fromkeys(word[name] if word[name] in whole else name for name in modules))


def canonical_word(family: str, module: str) -> str:
    """Return the canonical name of a module that PEFT's settings name, by all of its name or by the end of it."""
    modules, words = FAMILIES[family].names.modules, {}
    for ours, theirs in modules.items():
        words[theirs.rsplit(".", 1)[-1]] = ours.rsplit(".", 1)[-1]
        pattern = re.escape(theirs).replace(r"\*", r"([^.]+)")
        if (named := re.fullmatch(rf"(.*\.)?{pattern}", module)) and "*" in theirs:
            return f"{named[1] or ''}{ours.replace('*', named[2])}"
    before, point, last = module.rpartition(".")
    return f"{before}{point}{words.get(last, last)}"


def _names_of_modules(base: ModelShape) -> Iterator[tuple[str, str]]:
    in_models = FAMILIES[base.family].names.in_models
    for tensor in family_tensors(base):
        for part in tensor.parts:
            yield part, in_models.get(tensor.name, tensor.name)


def _peft_name(name: str, theirs: dict[str, str], adapter: Lora) -> str:
    module, kind = name.rsplit(".", 1)
    above, _, last = module.rpartition(".")
    if last in _OF_LORA:
        named = theirs[f"{above}.weight"].removesuffix(".weight")
        return f"{_BEFORE}{named}.{last}" + ("" if last == MAGNITUDE else f".{kind}")
    named = theirs[name]
    if kind == "bias" and adapter.adapts(module):
        return f"{_BEFORE}{named.removesuffix('.bias')}.base_layer.bias"
    return _BEFORE + named
