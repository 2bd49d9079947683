"""The names of a transformers model's tensors in files, which may differ from the parameters' names."""

from torch import nn


def names_in_files(model: nn.Module) -> dict[str, str]:
    """Return parameter of a transformers model -> its name in the files that `save_pretrained` writes."""
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(model.named_parameters())
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, parameters).items()}
    return {name: stored[id(tensor)] for name, tensor in parameters.items()}
