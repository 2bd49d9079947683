"""Faults to plant in production code: mistakes that others have made, each with the smallest run that shows it.

tests/parity/test_faults.py plants each fault and expects the comparison with one process to fail. Faults of bf16 and
fp16 training and of single operators are next to the tests that guard against them
(tests/distributed/test_precision.py, tests/parity/test_loss.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megalite.parallel.collectives as collectives
import megalite.parallel.gradient_buckets as gradient_buckets
import megalite.parallel.gradients as gradients
import megalite.parallel.layers as layers
import megalite.parallel.lora as lora
import megalite.parallel.pipeline as pipeline
from megalite.model import dropout, head, layer, recompute, stages, transformer
from megalite.ops import attention, choice
from megalite.ops.choice import Operators
from megalite.parallel.matrices import MatrixShard
from megalite.parallel.step_batch import StepBatch
from megalite.topology import parameters, place
from megalite.topology.sharding import Part, TensorSlice
from megalite.train.optimizer import adafactor, deepspeed, muon
from megalite.train.optimizer import torch as torch_path
from megalite.train.step import train_step

Replace = Callable[[Any], Any]


@dataclass(frozen=True)
class Fault:
    """A fault: `target.attribute` is replaced by `replace(original)`.

    shown_by: axis of the table -> value; all other axes have their plain value. PREFIX_FAULTS: "job" -> the job of
    tests/parity/test_prefix.py.
    """

    target: Any
    attribute: str
    replace: Replace
    shown_by: Mapping[str, str]


def _instead(other: Any) -> Replace:
    return lambda _: other


def _nothing(*_: Any, **__: Any) -> None:
    pass


# ------------------------------------------------------------------------------------------------------- collectives


def _leave_alone(values: Tensor, axis: Any) -> Callable[[], Tensor]:
    return lambda: values


def _reduce_without_reduce(ctx: Any, partial_sums: Tensor, axis: Any) -> Tensor:
    ctx.mark_dirty(partial_sums)
    return partial_sums


def _split_instead_of_reduce_scatter(values: Tensor, axis: Any) -> Callable[[], Tensor]:
    return lambda: values.chunk(axis.size, dim=1)[axis.rank].contiguous()


# --------------------------------------------------------------------------------------------------------------- loss


def _normalise_by_own_tokens(this_batch: Callable[..., Any]) -> Callable[..., Any]:
    def this_batch_and_own_tokens(self: Any) -> Any:
        batch, _ = this_batch(self)
        own = batch.loss_mask.double().masked_fill(batch.labels < 0, 0).sum()
        return batch, own * self.mesh.batch.size

    return this_batch_and_own_tokens


def _smooth_over_own_vocabulary(cross_entropy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def smoothed(logits: Tensor, *others: Any) -> Tensor:
        labels, mask, shard, terms = others
        return cross_entropy(logits, labels, mask, shard, replace(terms, vocabulary=len(shard.rows)))

    return smoothed


def _z_loss_of_own_vocabulary(cross_entropy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def with_z_loss(logits: Tensor, *others: Any) -> Tensor:
        labels, mask, shard, terms = others
        normaliser = logits.clone().logsumexp(dim=-1)
        plain = cross_entropy(logits, labels, mask, shard, replace(terms, z_loss=0.0))
        return plain + terms.z_loss * normaliser.square() * mask * (labels >= 0)

    return with_z_loss


def _count_every_tensor_rank(sums: Any, losses: Any) -> Tensor:
    return pipeline._total(losses, sums._mesh)


# ------------------------------------------------------------------------------------- layers, chunks, micro batches


def _skip_one_layer(decode: Callable[..., Any]) -> Callable[..., Any]:
    def decode_fewer(self: Any, *inputs: Any, **arguments: Any) -> Any:
        layers = self.layers
        if len(layers) > 1:
            self.layers = layers[:-1]
        try:
            return decode(self, *inputs, **arguments)
        finally:
            self.layers = layers

    return decode_fewer


def _skip_one_chunk(decode: Callable[..., Any]) -> Callable[..., Any]:
    def decode_fewer(self: Any, inputs: Tensor, *others: Any, **arguments: Any) -> Any:
        return inputs.clone() if self.index == 1 else decode(self, inputs, *others, **arguments)

    return decode_fewer


def _swap_two_chunks(build: Callable[..., None]) -> Callable[..., None]:
    def build_swapped(self: Any, *arguments: Any) -> None:
        build(self, *arguments)
        one, other = self.chunks
        one.layers, other.layers = other.layers, one.layers

    return build_swapped


def _keep_the_last_micro_batch(micro_batches: Callable[..., Any]) -> Callable[..., Any]:
    def last_alone(self: Any, count: int) -> Any:
        *earlier, last = micro_batches(self, count)
        return [*(replace(piece, loss_mask=torch.zeros_like(piece.loss_mask)) for piece in earlier), last]

    return last_alone


def _documents_of_the_first(micro_batches: Callable[..., Any]) -> Callable[..., Any]:
    def alike(self: Any, count: int) -> Any:
        pieces = micro_batches(self, count)
        return [replace(piece, document_ids=pieces[0].document_ids) for piece in pieces]

    return alike


def _draw_the_first_shard(normal_slice: Callable[..., Any]) -> Callable[..., Any]:
    def alike(seed: int, name: str, region: TensorSlice, std: float, **others: Any) -> Any:
        first = TensorSlice(tuple(0 for _ in region.offsets), region.shape)
        return normal_slice(seed, name, first, std, **others)

    return alike


# ------------------------------------------------------------------------------------------------------ prefix tuning


def _start_at_position_zero(decode: Callable[..., Any]) -> Callable[..., Any]:
    def from_zero(self: Any, inputs: Tensor, position_ids: Tensor, *others: Any, **rest: Any) -> Any:
        return decode(self, inputs, position_ids - self.prefix_tokens, *others, **rest)

    return from_zero


def _hide_the_prefix_from_later_documents(documents_seen: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def hidden(document_ids: Tensor, prefix: int = 0) -> Tensor:
        seen = documents_seen(document_ids, prefix)
        seen[..., :prefix] &= (document_ids == document_ids[:, :1])[:, None, :, None]
        return seen

    return hidden


def _count_the_prefix_in_the_window(behind_prefix: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda query, key, window, documents, prefix: attention._seen(
        query.shape[1], key.shape[1], window, query.device
    )


def _in_mode(**changes: Any) -> Callable[..., Callable[..., Tensor]]:
    def changed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs, mode, **rest: forward(*inputs, mode=replace(mode, **changes), **rest)

    return changed


def _count_the_prefix_in_the_loss(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def counted(self: Any, inputs: Tensor, *, batch: StepBatch, **rest: Any) -> Tensor:
        length = batch.loss_mask.shape[1]
        of_tokens = batch.loss_mask * (length / (length + self.prefix_tokens))
        return forward(self, inputs, batch=replace(batch, loss_mask=of_tokens), **rest)

    return counted


# ------------------------------------------------------------------------------------------------------------ dropout


def _number_samples_on_this_rank(places: Callable[..., Any]) -> Callable[..., Any]:
    return lambda samples, *others: places(torch.arange(len(samples)), *others)


def _drop_from_position_zero(keep_mask: Callable[..., Any]) -> Callable[..., Any]:
    def local(seed: int, name: str, samples: Tensor, positions: range, features: range, **rest: Any) -> Any:
        return keep_mask(seed, name, samples, range(len(positions)), features, **rest)

    return local


def _drop_from_feature_zero(keep_mask: Callable[..., Any]) -> Callable[..., Any]:
    def local(seed: int, name: str, samples: Tensor, positions: range, features: range, **rest: Any) -> Any:
        return keep_mask(seed, name, samples, positions, range(len(features)), **rest)

    return local


def _drop_from_head_zero(attention_mask: Callable[..., Any]) -> Callable[..., Any]:
    def local(self: Any, places: Any) -> Any:
        with mock.patch.object(self, "_heads", range(len(self._heads))):
            return attention_mask(self, places)

    return local


def _drop_alike_in_all_samples(attention_mask: Callable[..., Any]) -> Callable[..., Any]:
    def alike(self: Any, places: Any) -> Any:
        mask = attention_mask(self, places)
        return None if mask is None else mask._replace(sample_indices=torch.zeros_like(mask.sample_indices))

    return alike


def _drop_alike_in_all_layers(keep_mask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda seed, name, *places, **rest: keep_mask(seed, name.split(".")[-1], *places, **rest)


def _keep_without_scaling(mask: Callable[..., Any]) -> Callable[..., Any]:
    def unscaled(self: Any, *arguments: Any) -> Any:
        drawn = mask(self, *arguments)
        return None if drawn is None else drawn._replace(scale=1.0)

    return unscaled


def _draw_anew_in_recompute(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def with_other_masks(function: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
        keep_mask, attention = dropout.keep_mask, Operators.attend

        def fresh(seed: int, *arguments: Any, **rest: Any) -> Any:
            return keep_mask(seed + 1, *arguments, **rest)

        def attend(*inputs: Any) -> Any:
            *tensors, form = inputs
            if form.mask is not None:
                form = form._replace(mask=form.mask._replace(key=(form.mask.key[0] + 1, form.mask.key[1])))
            return attention(*tensors, form)

        def run_again(*tensors: Any) -> Any:
            with (
                mock.patch.object(dropout, "keep_mask", fresh),
                mock.patch.object(Operators, "attend", attend),
            ):
                return function(*tensors)

        calls = chain([function], repeat(run_again))
        return checkpoint(lambda *tensors: next(calls)(*tensors), *inputs, **settings)

    return with_other_masks


# ----------------------------------------------------------------------------------------------------------- adapters


def _scale_by_local_rank(original: Any) -> Any:
    def add_lora(decoder_layer: Any, shape: Any, adapter: Any, index: int, mesh: Any, options: Any) -> None:
        local = replace(adapter, alpha=adapter.alpha * mesh.tp.size)
        original(decoder_layer, shape, local, index, mesh, options)

    return add_lora


def _without_sums(original: Any) -> Any:
    def lora_parameters(adapter: Any, adapted: Any) -> Iterator[Any]:
        for each in original(adapter, adapted):
            yield replace(each, spec=replace(each.spec, summed=False))

    return lora_parameters


# ----------------------------------------------------------------------------------------------- gradients and update


def _partial_gradients_only_of_heads(is_partial: Callable[..., bool]) -> Callable[..., bool]:
    return lambda parameter, part, mesh: parameter.spec.summed and is_partial(parameter, part, mesh)


def _partial_gradients_only_by_position(is_partial: Callable[..., bool]) -> Callable[..., bool]:
    return lambda parameter, part, mesh: not parameter.spec.summed and is_partial(parameter, part, mesh)


def _partial_gradients_only_where_whole(is_partial: Callable[..., bool]) -> Callable[..., bool]:
    return lambda parameter, part, mesh: (
        not mesh.is_shared(parameter, part) and is_partial(parameter, part, mesh)
    )


def _sum_no_tied_copies(complete: Callable[..., None]) -> Callable[..., None]:
    def without_ends(parameters: Any, *arguments: Any) -> None:
        complete([each for each in parameters if len(each.spec.stages) < 2], *arguments)

    return without_ends


def _sum_the_shared_embedding(complete: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement that treats the one module at both ends of a V as two copies."""

    def twice(parameters: Any, tensors: Any, *arguments: Any) -> None:
        complete(parameters, tensors, *arguments)
        for each in parameters:
            if each.name == gradients.EMBEDDING:
                tensors[each.name].grad.mul_(2)

    return twice


def _fill_from_the_first_layer(fill: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, layers, kept_back: fill(self, layers[::-1], kept_back)


def _norm_of_first_stage(share: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def share_of_first_stage(parameters: Any, tensors: Any, mesh: Any, **options: Any) -> Tensor:
        return share(parameters, tensors, mesh, **options) * (mesh.pp.rank == 0)

    return share_of_first_stage


def _forget_reduced_micro_batches(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, stage: Any) -> Callable[..., Tensor]:
        run = wrap(self, stage)

        def forgetting(*inputs: Any, **arguments: Any) -> Tensor:
            self._zero.averaged_gradients.clear()
            return run(*inputs, **arguments)

        return forgetting

    return wrapped


def _forget_earlier_micro_batches(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, stage: Any) -> Callable[..., Tensor]:
        run = wrap(self, stage)

        def forgetting(*inputs: Any, **arguments: Any) -> Tensor:
            for tensor in self._tensors.values():
                tensor.grad = None
            return run(*inputs, **arguments)

        return forgetting

    return wrapped


def _of_own_shards(shards: Any, function: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    return (function(each.values) for each in shards)


def _as_one_matrix(parameter: Any, tensor: Tensor, mesh: Any) -> Iterator[MatrixShard]:
    part, ranks = Part(parameter.name, parameter.spec.full_shape), mesh.cut_over(parameter)
    yield MatrixShard(parameter, part, tensor, ranks, mesh.copies(parameter))


TP, PP, DP = ({"layout": layout} for layout in ("tp2-pp1-dp1", "tp1-pp2-dp1", "tp1-pp1-dp2"))
INTERLEAVED = {**PP, "schedule": "interleaved_1f1b", "chunks": "2"}
SEQUENCE = {**TP, "sequence": "on"}
DROPOUT = {"dropout": "hidden"}
FUSED_DROPOUT = {"dropout": "attention", "kernels": "fused"}

FAULTS: dict[str, Fault] = {
    "missing all-reduce of column-parallel input gradients": Fault(
        layers, "start_all_reduce", _instead(_leave_alone), TP
    ),
    "missing all-reduce of row-parallel outputs": Fault(
        collectives._Reduce, "forward", _instead(staticmethod(_reduce_without_reduce)), TP
    ),
    "tied head counted twice in the norm": Fault(
        place.RankPlace,
        "is_counted",
        _instead(lambda self, parameter: parameter.spec.dim is not None or self.at.tp == 0),
        PP,
    ),
    "replicated norms counted once a tensor rank": Fault(
        place.RankPlace,
        "is_counted",
        _instead(lambda self, parameter: len(parameter.spec.stages) < 2 or self.at.pp == 0),
        TP,
    ),
    "norm of one stage": Fault(torch_path, "squared_norm_share", _norm_of_first_stage, PP),
    "DeepSpeed's norm counts replicas": Fault(
        deepspeed, "_mark", _instead(_nothing), {"layout": "tp2-pp1-dp2", "zero": "1"}
    ),
    "loss normalised by the rank's own tokens": Fault(
        train_step.TrainStep, "_this_batch", _normalise_by_own_tokens, DP
    ),
    "loss reported once a tensor rank": Fault(
        pipeline._LossSums, "_counted", _instead(_count_every_tensor_rank), TP
    ),
    "label smoothing over the shard's vocabulary": Fault(
        head, "vocab_parallel_cross_entropy", _smooth_over_own_vocabulary, {**TP, "loss": "smoothed"}
    ),
    "z-loss of the shard's vocabulary": Fault(
        head, "vocab_parallel_cross_entropy", _z_loss_of_own_vocabulary, {**TP, "loss": "z-loss"}
    ),
    "a dropped layer": Fault(transformer.Chunk, "decode", _skip_one_layer, PP),
    "a dropped chunk": Fault(transformer.Chunk, "decode", _skip_one_chunk, INTERLEAVED),
    "two chunks swapped": Fault(transformer.Stage, "__init__", _swap_two_chunks, INTERLEAVED),
    "weights initialised alike on two shards": Fault(stages, "normal_slice", _draw_the_first_shard, TP),
    "only the last micro batch kept": Fault(
        pipeline.StepBatch, "micro_batches", _keep_the_last_micro_batch, DP
    ),
    "a ZeRO stage that drops micro steps": Fault(
        deepspeed.DeepSpeedOptimizer, "wrap", _forget_earlier_micro_batches, {**DP, "zero": "1"}
    ),
    "a ZeRO stage that drops micro steps it has reduced": Fault(
        deepspeed.DeepSpeedOptimizer, "wrap", _forget_reduced_micro_batches, {**DP, "zero": "2"}
    ),
    "documents of the first micro batch for all": Fault(
        pipeline.StepBatch, "micro_batches", _documents_of_the_first, {**DP, "documents": "on"}
    ),
    "missing sum over data-parallel ranks": Fault(
        gradient_buckets, "start_all_reduce", _instead(lambda values, ranks: lambda: values), DP
    ),
    "gradients summed over data-parallel ranks in the first backward": Fault(
        pipeline, "_watched", _instead(lambda buckets, completes: buckets.last_forward()), DP
    ),
    "gradients summed over data-parallel ranks a layer too early": Fault(
        gradient_buckets.GradientBuckets, "_fill", _fill_from_the_first_layer, DP
    ),
    "tied copies that drift": Fault(torch_path, "all_reduce_replicated_gradients", _sum_no_tied_copies, PP),
    "tied copies that drift under ZeRO": Fault(
        deepspeed, "all_reduce_replicated_gradients", _sum_no_tied_copies, {**PP, "zero": "1"}
    ),
    "tied weight of a V summed as if it were two": Fault(
        torch_path,
        "all_reduce_replicated_gradients",
        _sum_the_shared_embedding,
        {**PP, "schedule": "zbv", "chunks": "2"},
    ),
    "norm weights' gradients of own positions only": Fault(
        gradients, "is_partial", _partial_gradients_only_of_heads, SEQUENCE
    ),
    "head norms' gradients of own heads only": Fault(
        gradients, "is_partial", _partial_gradients_only_by_position, {**TP, "family": "qwen3"}
    ),
    "shared key-value heads' gradients of own queries only": Fault(
        gradients, "is_partial", _partial_gradients_only_where_whole, {**TP, "kv_heads": "1"}
    ),
    "norm weights' gradients of own positions reduced by ZeRO": Fault(
        deepspeed,
        "all_reduce_replicated_in_backward",
        _instead(_nothing),
        {"layout": "tp2-pp1-dp2", "zero": "2", "sequence": "on"},
    ),
    "sequence gather whose backward only splits": Fault(
        layers, "start_reduce_scatter", _instead(_split_instead_of_reduce_scatter), SEQUENCE
    ),
    "fresh dropout in recompute": Fault(
        recompute, "checkpoint", _draw_anew_in_recompute, {**DROPOUT, "recompute": "full"}
    ),
    "dropout keyed by the rank's own samples": Fault(
        transformer, "DropoutContext", _number_samples_on_this_rank, {**DP, **DROPOUT}
    ),
    "dropout keyed by the rank's own positions": Fault(
        dropout, "keep_mask", _drop_from_position_zero, {**SEQUENCE, **DROPOUT}
    ),
    "dropout keyed by the rank's own features": Fault(
        dropout, "keep_mask", _drop_from_feature_zero, {**TP, **DROPOUT}
    ),
    "attention dropout keyed by the rank's own heads": Fault(
        dropout.DropoutSites, "attention_mask", _drop_from_head_zero, {**TP, "dropout": "attention"}
    ),
    "fused attention dropout without the head in its key": Fault(
        dropout.DropoutSites, "attention_mask", _drop_from_head_zero, {**TP, **FUSED_DROPOUT}
    ),
    "fused attention dropout without the sample in its key": Fault(
        dropout.DropoutSites, "attention_mask", _drop_alike_in_all_samples, FUSED_DROPOUT
    ),
    "fused attention dropout drawn anew in recompute": Fault(
        recompute, "checkpoint", _draw_anew_in_recompute, {**FUSED_DROPOUT, "recompute": "selective"}
    ),
    "one dropout mask in all layers": Fault(dropout, "keep_mask", _drop_alike_in_all_layers, DROPOUT),
    "dropout that does not scale what it keeps": Fault(
        dropout.DropoutSites, "_mask", _keep_without_scaling, DROPOUT
    ),
    "fresh dropout in selective recompute": Fault(
        recompute,
        "checkpoint",
        _draw_anew_in_recompute,
        {"dropout": "attention", "recompute": "selective"},
    ),
    "LoRA scaled by the rank over tp": Fault(
        layer, "add_lora", _scale_by_local_rank, {**TP, "adapter": "lora"}
    ),
    "LoRA whose A has the gradient of one rank's rows": Fault(
        parameters, "_lora_parameters", _without_sums, {**TP, "adapter": "lora"}
    ),
    "weights beside an adapter trained too": Fault(
        parameters, "_as_trained", _instead(lambda shape, parameter: parameter), {"adapter": "lora"}
    ),
    "DoRA with the row norms of a rank's own columns": Fault(
        lora, "all_reduce", _instead(lambda values, ranks: values), {**TP, "adapter": "dora"}
    ),
    "adapter dropout keyed by the rank's own features": Fault(
        dropout, "keep_mask", _drop_from_feature_zero, {**TP, "adapter": "lora"}
    ),
    "loss scale not divided out": Fault(
        torch_path, "scale_gradients", _instead(_nothing), {"precision": "fp16", "clipping": "none"}
    ),
}

# tests/parity/test_optimizers.py plants them: the optimizer is no axis of the table.
OPTIMIZER_FAULTS: dict[str, Fault] = {
    "Newton-Schulz on a shard": Fault(
        muon, "map_matrices", _instead(_of_own_shards), {**TP, "optimizer": "muon"}
    ),
    "Newton-Schulz on a fused weight": Fault(
        muon, "matrix_shards", _instead(_as_one_matrix), {"optimizer": "muon"}
    ),
    "second moments of a shard's rows and columns": Fault(
        adafactor, "all_reduce", _instead(lambda values, ranks: values), {**TP, "optimizer": "adafactor"}
    ),
}

PREFIX_FAULTS: dict[str, Fault] = {
    "prefix positions forgotten": Fault(transformer.Chunk, "decode", _start_at_position_zero, {"job": "tp2"}),
    "prefix hidden from other documents than the first": Fault(
        choice, "documents_seen", _hide_the_prefix_from_later_documents, {"job": "documents"}
    ),
    "prefix hidden by a sliding window": Fault(
        attention, "_behind_prefix", _count_the_prefix_in_the_window, {"job": "soft cap, windows"}
    ),
    "prefix trunk's gradients of the own stage only": Fault(
        torch_path, "all_reduce_replicated_gradients", _sum_no_tied_copies, {"job": "pp2"}
    ),
    "prefix trunk's gradients summed over the first and last stage only": Fault(
        gradients.ParallelMesh, "tied_over", _instead(lambda self, stages: self.tied), {"job": "pp4"}
    ),
    "prefix trunk's gradients of own heads only": Fault(
        gradients, "is_partial", _partial_gradients_only_by_position, {"job": "tp2"}
    ),
    "prefix trunk counted once a stage in the norm": Fault(
        place.RankPlace,
        "is_counted",
        _instead(lambda self, parameter: parameter.spec.dim is not None or self.at.tp == 0),
        {"job": "pp2"},
    ),
    "prefix counted in the loss mask": Fault(
        transformer.Chunk, "forward", _count_the_prefix_in_the_loss, {"job": "dp2"}
    ),
}


# tests/parity/test_preference.py plants these: the table has no axis of objectives.
PREFERENCE_FAULTS: dict[str, Fault] = {
    "DPO reference with dropout": Fault(transformer.Chunk, "forward", _in_mode(training=True), DROPOUT),
    "DPO reference with its adapter": Fault(transformer.Chunk, "forward", _in_mode(adapters=None), {}),
}


@contextmanager
def planted_fault(name: str | None) -> Iterator[None]:
    """Run with the named fault planted; None: without a fault."""
    if name is None:
        yield
        return
    fault = {**FAULTS, **OPTIMIZER_FAULTS, **PREFIX_FAULTS, **PREFERENCE_FAULTS}[name]
    with mock.patch.object(
        fault.target, fault.attribute, fault.replace(getattr(fault.target, fault.attribute))
    ):
        yield
