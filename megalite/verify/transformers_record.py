"""transformers' own model of a folder in the place of the one process: its weights, loss and gradients, recorded.

Its logits are compared here with those of our model, in one process.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.weights import fill
from megalite.convert.foreign.whole_tensors import region_of_part
from megalite.convert.weight_source import WeightSource
from megalite.convert.weights import open_weights
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, model_tensors
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import canonical_tensors, trained_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.train.loaders import loader_maker, training_loader
from megalite.verify.findings import INITIAL, OWN, SUMMED
from megalite.verify.measure import relative_error
from megalite.verify.record import RecordedPiece, RecordJob, StepRecord

IGNORED = -100


def record_transformers(job: RecordJob) -> float:
    """Write the records of the initial weights and of the first step; return the relative error of our logits.

    job: one process that takes the global batch as one micro batch. Raises CheckpointError where transformers cannot
    build the model of the folder, or has other parameters than ours.
    """
    torch.set_num_threads(job.threads)
    assert job.inputs.weights is not None
    folder = Path(job.inputs.weights)
    mesh, shape = ParallelMesh.single(), job.config.shape(0)
    load = loader_maker(job.config, mesh, None)
    batch = training_loader(job.config, job.inputs.data, load, mesh, None).step_batch(0)
    model = _model(folder)
    names = _names(shape, model)
    StepRecord([*_pieces(shape, names, model.state_dict(), (INITIAL,))]).write(job.step_file(0, 0))
    theirs = model(input_ids=batch.input_ids, use_cache=False).logits
    losses = nn.functional.cross_entropy(
        theirs.flatten(0, 1).double(), batch.labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    loss = (losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    trained = trained_tensors(shape)
    pieces = [piece for piece in _pieces(shape, names, gradients, (OWN, SUMMED)) if piece.name in trained]
    squares = sum(float(piece.values.double().square().sum()) for piece in pieces if piece.quantity == SUMMED)
    StepRecord(pieces, loss.item(), math.sqrt(squares)).write(job.step_file(0, 1))
    expected = theirs.detach()
    del model, theirs, losses, loss, gradients, pieces
    return relative_error(_our_logits(shape, folder, mesh, batch.input_ids, batch.position_ids), expected)


def _model(folder: Path) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"--from compares with transformers, which is missing ({error}); install it"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    # Independent of the attention that our side uses.
    eager: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
    except (ValueError, KeyError, OSError, ImportError, TypeError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"transformers {transformers.__version__} does not build the model of {folder} ({reason}); use a version"
            " that does"
        ) from error
    built: nn.Module = model.eval()
    return built


def _names(shape: ModelShape, model: nn.Module) -> dict[str, str]:
    """Return the name in `model_tensors` -> that in transformers' model. Raises CheckpointError where they differ."""
    in_models, theirs = FAMILIES[shape.family].names.in_models, model.state_dict().keys()
    names = {tensor.name: in_models.get(tensor.name, tensor.name) for tensor in model_tensors(shape)}
    if missing := [name for name in names.values() if name not in theirs]:
        raise CheckpointError(f"transformers' model has no {missing[0]}; use a version of transformers 5")
    return names


def _pieces(
    shape: ModelShape, names: Mapping[str, str], tensors: Mapping[str, Tensor], quantities: tuple[str, ...]
) -> Iterator[RecordedPiece]:
    """Yield canonical tensors, whole, from those of transformers' model; without those that it does not have."""
    sizes = canonical_tensors(shape)
    for tensor in model_tensors(shape):
        values = tensors.get(names[tensor.name])
        for name in tensor.parts if values is not None else ():
            assert values is not None
            part = region_of_part(tensor, values, name, full_slice(sizes[name]), sizes)
            flat = part.detach().reshape(-1).clone()
            region = (name, (0,) * len(sizes[name]), sizes[name], True)
            for quantity in quantities:
                yield RecordedPiece(quantity, name, (region,), 0, flat, (0,))


@torch.no_grad()
def _our_logits(
    shape: ModelShape, folder: Path, mesh: ParallelMesh, input_ids: Tensor, position_ids: Tensor
) -> Tensor:
    replica = build_replica(shape, mesh, pipeline_split(shape.num_hidden_layers), seed=None)
    fill(replica, open_weights(WeightSource(folder, "huggingface", shape)), folder)
    whole = replica.stage.whole
    return whole.logits(whole.decode(input_ids, position_ids))
