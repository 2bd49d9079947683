"""The table of model families: every module of this folder that defines FAMILY.

Modules of this folder do not import this one.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import megalite.families
from megalite.families.family import Family
from megalite.families.tensors import FamilyTensor
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape


def _families() -> Iterator[Family]:
    for module in iter_modules(megalite.families.__path__, "megalite.families."):
        if module.name != __name__:
            family = getattr(import_module(module.name), "FAMILY", None)
            if family is not None:
                yield family


# model_type -> its family, the oldest first.
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in sorted(_families(), key=lambda each: (each.published, each.model_type))
}


def family_tensors(shape: ModelShape) -> tuple[FamilyTensor, ...]:
    """Return every tensor of the folder of the shape's family, in forward order."""
    return FAMILIES[shape.family].tensors(shape)


def model_tensors(shape: ModelShape) -> tuple[FamilyTensor, ...]:
    """Return every tensor in the form that a model of transformers 5 holds: a mixture's experts stacked by layer."""
    names = FAMILIES[shape.family].names
    return tuple(names.stacked(shape) if isinstance(shape, MixtureShape) else names.tensors(shape))


def names_in_files(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Return canonical name -> the names that the family's files have for its tensor, with and without a prefix."""
    prefix = FAMILIES[shape.family].names.optional_prefix
    return {
        part: tuple(dict.fromkeys((tensor.name, tensor.name.removeprefix(prefix))))
        for tensor in family_tensors(shape)
        for part in tensor.parts
    }


def hf_config(shape: ModelShape, dtype: str, token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return config.json in the words of the shape's family; raises CheckpointError where they cannot say it."""
    return FAMILIES[shape.family].write_config(shape, dtype, token_ids)


def inexpressible(shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, value, the value that the family has) of all that the family's files cannot say."""
    return FAMILIES[shape.family].inexpressible(shape)
