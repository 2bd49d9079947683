"""transformers' models by the names that their tensors have in files, which are not always those of the parameters."""

from torch import nn


def names_in_files(model: nn.Module) -> dict[str, str]:
    """Parameter of a model of transformers -> its name in the files that `save_pretrained` writes."""
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(model.named_parameters())
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, parameters).items()}
    return {name: stored[id(tensor)] for name, tensor in parameters.items()}
