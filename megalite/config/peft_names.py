"""The names that PEFT's files have for the tensors of an adapter."""

from collections.abc import Iterator

from megalite.families.registry import FAMILIES, family_tensors
from megalite.topology.adapter import Lora
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
        if adapted and (tensor.transposed or len(tensor.parts) > 1):
            return tensor.name
    return None


def hidden_linears(shape: ModelShape) -> dict[str, bool]:
    """Return linear of a layer, named within it -> whether it can be adapted: experts and their router cannot."""
    modules = (
        part.name.removesuffix(".weight").split(".", 3)[-1]
        for parameter in model_parameters(shape.base)
        if parameter.is_hidden_matrix
        for part in parameter.spec.parts
    )
    return {module: module != "mlp.gate" and not module.startswith("mlp.experts.") for module in modules}


def adapted_expert(shape: ModelShape) -> str | None:
    """Return a linear that the adapter names, but that cannot be adapted; None: there is none."""
    adapter = shape.adapter
    assert isinstance(adapter, Lora)
    linears = hidden_linears(shape).items()
    return next((module for module, adaptable in linears if not adaptable and adapter.adapts(module)), None)


def peft_names(shape: ModelShape) -> dict[str, str]:
    """Return canonical name -> name in adapter_model.safetensors, of every tensor that the adapter trains."""
    adapter = shape.adapter
    assert isinstance(adapter, Lora)
    theirs = dict(_names_of_modules(shape.base))
    return {name: _peft_name(name, theirs, adapter) for name in trained_tensors(shape)}


def canonical_word(family: str, module: str) -> str:
    """Return the canonical name of a module that PEFT's settings name, by all of its name or by the end of it."""
    words = {
        theirs.rsplit(".", 1)[-1]: ours.rsplit(".", 1)[-1]
        for ours, theirs in FAMILIES[family].names.modules.items()
    }
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
