"""Which parameter each number of an optimizer's state_dict is: it numbers them in the order of its groups.

Source: `create_optimizer` and `get_decay_parameter_names` in transformers/trainer.py. The first group has the
parameters with weight decay, the second those without; in each they stand in the order of `model.named_parameters()`.
Which parameters of norms decay has changed between versions; the sizes of the groups tell.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.convert.foreign.adamw import MOMENTS, STEP
from megalite.errors import CheckpointError, listed
from megalite.families.tensors import FamilyTensor

_WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")

_WEIGHTS_ALONE = "To begin with the weights alone, name the folder in model.weights"


def match_parameters(
    content: Mapping[str, Any], folder: Path, tensors: Sequence[FamilyTensor], in_models: Mapping[str, str]
) -> dict[str, Any]:
    """Return tensor (its name in the files) -> the optimizer's key of it, whose state is sound.

    content: the state_dict. in_models: name in files -> name in the model. Raises CheckpointError unless exactly one
    order of parameters fits the groups and the shape of every moment.
    """
    in_files = {model: file for file, model in in_models.items()}
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    states, groups = content["state"], [group["params"] for group in content["param_groups"]]
    if all(isinstance(key, str) for group in groups for key in group):
        by_name = {key: _unwrapped(key) for group in groups for key in group}
        named = {in_files.get(name, name): key for key, name in by_name.items()}
        _check({name: states.get(key) for name, key in named.items()}, shapes, folder)
        return named
    parameters = parameters_in_order(folder)
    ordered = {in_files.get(name, name): is_norm for name, is_norm in parameters.items()}
    if ordered.keys() != shapes.keys():
        both = sorted(ordered.keys() ^ shapes.keys())
        raise CheckpointError(
            f"{folder}: the installed transformers builds this model with other parameters ({listed(both)}), so the"
            " optimizer's state has no known order; use the version that wrote the checkpoint"
        )
    fitting = [
        names
        for names in possible_groups(ordered)
        if [len(group) for group in names] == [len(group) for group in groups]
        and _fits(
            [name for group in names for name in group],
            [key for group in groups for key in group],
            states,
            shapes,
        )
    ]
    if len(fitting) != 1:
        sizes = " and ".join(str(len(group)) for group in groups)
        raise CheckpointError(
            f"{folder}: the optimizer has groups of {sizes} parameters, which fits"
            f" {'no' if not fitting else 'more than one'} order in which the Trainer has them; only full fine-tuning"
            f" with the Trainer's own AdamW groups is continued. {_WEIGHTS_ALONE}"
        )
    names = [name for group in fitting[0] for name in group]
    keys = [key for group in groups for key in group]
    numbered = dict(zip(names, keys, strict=True))
    _check({name: states.get(key) for name, key in numbered.items()}, shapes, folder)
    return numbered


def parameters_in_order(folder: Path) -> dict[str, bool]:
    """Return the model's parameters in order, and whether each is one of a norm."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for a config.json that it does not know
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{folder}: transformers cannot build its model ({reason}), so the optimizer's state has no known order"
        ) from error
    norms = {name for name, module in model.named_modules() if type(module).__name__.endswith("Norm")}
    return {name: name.rpartition(".")[0] in norms for name, _ in model.named_parameters()}


def possible_groups(parameters: Mapping[str, bool]) -> list[list[list[str]]]:
    """Return the groups that versions of the Trainer make, the newest first, and the one group of a plain AdamW.

    parameters: name -> whether it is one of a norm, in the order of the model.
    """
    orders = []
    for norms_decay in (False, True):
        decays = {
            name: "bias" not in name and (norms_decay or not is_norm) for name, is_norm in parameters.items()
        }
        orders.append([[name for name in parameters if decays[name] is which] for which in (True, False)])
    orders.append([list(parameters)])
    return [order for index, order in enumerate(orders) if order not in orders[:index]]


def _fits(
    names: Sequence[str],
    keys: Sequence[Any],
    states: Mapping[Any, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether no moment has another shape than its parameter; what is no moment is judged later."""
    for name, key in zip(names, keys, strict=True):
        state = states.get(key)
        moment = state.get(MOMENTS[0]) if isinstance(state, Mapping) else None
        if isinstance(moment, Tensor) and tuple(moment.shape) != shapes[name]:
            return False
    return True


def _check(matched: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise CheckpointError for a parameter without AdamW's state, or with more."""
    if matched.keys() != shapes.keys():
        raise CheckpointError(
            f"{folder}: the optimizer has state of {listed(sorted(matched.keys() ^ shapes.keys()))}, which are not in"
            " both the optimizer and the model of config.json"
        )
    for name, state in matched.items():
        keys = set(state) if isinstance(state, Mapping) else set()
        if keys != {STEP, *MOMENTS}:
            stored = ", ".join(sorted(map(str, keys))) or "nothing"
            raise CheckpointError(
                f"{folder}: the optimizer keeps {stored} of {name}, but AdamW {', '.join((STEP, *MOMENTS))}; only"
                f" AdamW's state is continued. {_WEIGHTS_ALONE}"
            )
        for key in MOMENTS:
            values = state[key]
            if not isinstance(values, Tensor) or not values.is_floating_point():
                raise CheckpointError(f"{folder}: {key} of {name} in the optimizer's file is no float tensor")
            if tuple(values.shape) != shapes[name]:
                raise CheckpointError(
                    f"{folder}: {key} of {name} has shape {tuple(values.shape)}, but its config.json gives"
                    f" {shapes[name]}"
                )


def _unwrapped(name: str) -> str:
    """Return a parameter's name without the modules that FSDP, compile and checkpointing put around others."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
