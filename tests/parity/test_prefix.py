"""Prefix tuning: every layout trains to the numbers of one process, and one process computes what PEFT does."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.errors import ConfigError
from megalite.model.context import StepContext
from megalite.model.kv_cache import CachedStep
from megalite.model.options import ModelOptions
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.parallel.gradients import first_nonfinite
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import weight_share
from megalite.parallel.step_batch import StepBatch
from megalite.topology.adapter import Prefix
from megalite.topology.axes import Layout
from megalite.topology.flops import flops_per_token
from megalite.topology.parameters import HEAD, model_parameters, trained_tensors
from megalite.topology.shape import ModelShape, RopeScaling
from megalite.topology.stages import pipeline_split
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.parity.test_transformers import _canonical, _in_their_names, _transformers_model
from tests.support.checkpoints import save_checkpoint
from tests.support.generation import generate_ids, one_slot, prompt_step
from tests.support.huggingface import names_in_files
from tests.support.mutations import PREFIX_FAULTS, planted_fault
from tests.support.options import Dropout, Recompute
from tests.support.parity import (
    FLOAT32_GRADIENT_RTOL,
    FLOAT32_RTOL,
    LAYOUT_RTOL,
    ZERO_RTOL,
    assert_close,
    assert_same_tensors,
)
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, in_documents, tiny_batch, tiny_shape
from tests.support.training import Job, RankResult, build, local_batch, train_on_rank

DIRECT, PROJECTED = Prefix(3), Prefix(5, projection=10)
TINY = Job(tiny_shape(tied=True), steps=2)
FULL, SELECTIVE = Recompute("full"), Recompute("selective")
JOBS = {
    "tp2": replace(TINY, layout=Layout(tensor=2)),
    "pp2": replace(TINY, layout=Layout(pipeline=2)),
    "dp2": replace(TINY, layout=Layout(data=2), micro_batch_size=2),
    # The first, the last and two stages between them.
    "pp4": replace(TINY, layout=Layout(pipeline=4), schedule="gpipe"),
    "tp2-pp2, sequence, recompute": replace(
        TINY, layout=Layout(pipeline=2, tensor=2), sequence_parallel=True, recompute=FULL
    ),
    "tp2-pp2-dp2": replace(TINY, layout=Layout(2, 2, 2), recompute=SELECTIVE),
    "tp4, two key-value heads": replace(
        TINY, shape=replace(TINY.shape, num_key_value_heads=2), layout=Layout(tensor=4)
    ),
    "interleaved": replace(TINY, layout=Layout(2, 2, 1), schedule="interleaved_1f1b", chunks_per_stage=2),
    "zero bubble": replace(
        TINY, layout=Layout(2, 2, 1), schedule="interleaved_zero_bubble", chunks_per_stage=2
    ),
    "zbv": replace(TINY, layout=Layout(pipeline=2), schedule="zbv", chunks_per_stage=2),
    "dualpipev, tp2": replace(TINY, layout=Layout(2, 1, 2), schedule="dualpipev", chunks_per_stage=2),
    "documents": replace(TINY, layout=Layout(data=2, tensor=2), documents=True, micro_batch_size=2),
    "attention dropout": replace(TINY, layout=Layout(tensor=2), dropout=Dropout(attention=0.2)),
    "windows, documents": replace(
        TINY, shape=FAMILY_SHAPES["mistral"], layout=Layout(pipeline=2, tensor=2), documents=True
    ),
    "soft cap, windows": replace(TINY, shape=FAMILY_SHAPES["gemma2"], layout=Layout(tensor=2)),
    "head norms, sequence": replace(
        TINY, shape=FAMILY_SHAPES["qwen3"], layout=Layout(tensor=2), sequence_parallel=True
    ),
    "learned positions": replace(TINY, shape=FAMILY_SHAPES["gpt2"], layout=Layout(pipeline=2)),
    "compiled operators": replace(TINY, layout=Layout(pipeline=2), kernels="fused", documents=True),
    "ZeRO 1": replace(TINY, layout=Layout(2, 2, 2), zero_stage=1),
    "ZeRO 2": replace(TINY, layout=Layout(data=2, tensor=2), zero_stage=2),
    "ZeRO 3": replace(TINY, layout=Layout(data=2), zero_stage=3, recompute=FULL),
}
CORE = [
    ("tp2-pp2, sequence, recompute", PROJECTED),
    ("tp4, two key-value heads", PROJECTED),
    ("pp4", PROJECTED),
    ("zbv", PROJECTED),
    ("documents", DIRECT),
    ("ZeRO 1", PROJECTED),
    ("ZeRO 3", DIRECT),
]


def _alone(job: Job) -> Job:
    """Return the job in one process, on the torch optimizer path."""
    plain = {"schedule": "1f1b", "chunks_per_stage": 1, "sequence_parallel": False, "zero_stage": 0}
    return replace(
        job, layout=Layout(), recompute=TINY.recompute, kernels="reference", micro_batch_size=1, **plain
    )


KINDS = pytest.mark.parametrize("prefix", [DIRECT, PROJECTED], ids=["direct", "projected"])
EVERY = [
    pytest.param(name, prefix, id=f"{name}-{kind}")
    for name in JOBS
    for kind, prefix in (("direct", DIRECT), ("projected", PROJECTED))
]


def _with(prefix: Prefix, job: Job) -> Job:
    return replace(job, shape=replace(job.shape, adapter=prefix))


@pytest.mark.parametrize(("name", "prefix"), cases(EVERY, core=CORE))
def test_any_layout_equals_one_process(ranks, reference, name, prefix):
    job = _with(prefix, JOBS[name])
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    rtol = ZERO_RTOL if job.zero_stage else LAYOUT_RTOL
    _assert_equal_to_one_process(job, results, reference(_alone(job)), rtol)


def train_with_fault(job: Job, fault: str) -> RankResult:
    """Train on this rank with a planted fault."""
    with planted_fault(fault):
        return train_on_rank(job)


@pytest.mark.parametrize("name", PREFIX_FAULTS)
def test_a_planted_fault_departs_from_one_process(ranks, reference, name):
    job = _with(PROJECTED, JOBS[PREFIX_FAULTS[name].shown_by["job"]])
    results = ranks.run(train_with_fault, world_size=job.layout.world_size, job=job, fault=name)
    with pytest.raises(AssertionError, match="relative error"):
        _assert_equal_to_one_process(job, results, reference(_alone(job)), LAYOUT_RTOL)


def go_on(job: Job, folder: str) -> RankResult:
    """Train on this rank from the folder's latest checkpoint, if any, up to step `job.steps`, then save."""
    latest, parts = find_latest(Path(folder)), build(job)
    replica, optimizer = parts.replica, parts.optimizer
    result = RankResult(replica.mesh.batch.rank)
    first = load_checkpoint(latest, replica, optimizer.state).step if latest else 0
    for step in range(first, job.steps):
        result.losses.append(parts.accumulate(local_batch(job, replica.mesh, step)))
        result.norms.append(parts.update(job.learning_rate).grad_norm)
    counters = {"step": job.steps, "samples": 8 * job.steps, "tokens": 96 * job.steps}
    save_checkpoint(Path(folder), replica, optimizer.state, trainer_state=counters, config={})
    return result


@KINDS
def test_a_run_goes_on_in_another_layout(ranks, reference, prefix, tmp_path):
    """Every element is written once, the trunk by its first stage, and read by every stage."""
    job = _with(prefix, replace(TINY, steps=3))
    before = replace(job, layout=Layout(2, 2, 2), steps=1)
    after = replace(job, layout=Layout(4, 1, 1))
    ranks.run(go_on, world_size=8, job=before, folder=str(tmp_path))
    manifest = read_manifest(tmp_path / "step-000001")
    assert manifest.model == job.shape
    assert manifest.tensors["weight"].keys() == trained_tensors(job.shape).keys()
    for result in ranks.run(go_on, world_size=4, job=after, folder=str(tmp_path)):
        assert_close(result.losses, reference(job).losses[1:], what="losses")
        assert_close(result.norms, reference(job).norms[1:], what="norms")


def test_only_the_prefix_is_trained():
    for prefix, parts in ((DIRECT, 4), (PROJECTED, 3 + 2 * 4)):
        replica = _one_process(replace(tiny_shape(), adapter=prefix))
        trained = {name for name, tensor in replica.tensors.items() if tensor.requires_grad}
        assert trained == replica.trained_tensors.keys() == {each.name for each in replica.trained}
        assert len(trained) == parts and all("prefix" in name for name in trained)


def test_a_gradient_that_is_not_finite_is_named_by_the_layer_where_it_arose():
    replica = _one_process(replace(tiny_shape(), adapter=PROJECTED))
    for name, tensor in replica.trained_tensors.items():
        tensor.grad = torch.zeros_like(tensor)
        if "layers" not in name or ".1." in name:
            tensor.grad[-1] = torch.nan
    found = first_nonfinite(replica.trained, replica.tensors, replica.mesh)
    assert found == "model.layers.1.self_attn.prefix_value.bias (layer 1)"


def _one_process(shape: ModelShape, dtype: torch.dtype = torch.float32) -> Replica:
    """Return the whole model with weights so large that no term hides behind another, ready to evaluate."""
    split, options = pipeline_split(shape.num_hidden_layers), ModelOptions(dtype=dtype)
    replica = build_replica(shape, ParallelMesh.single(), split, options, seed=11)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in replica.tensors.items():
            if "prefix" not in name:
                tensor.mul_(2).add_(torch.randn(tensor.shape, generator=generator), alpha=0.03)
    return replica


def _logits(replica: Replica, batch: StepBatch, documents: Tensor | None = None) -> Tensor:
    chunk = replica.stage.whole
    hidden_states = chunk.decode(batch.input_ids, batch.position_ids, StepContext(documents=documents))
    return chunk.logits(hidden_states)


def _losses(replica: Replica, batch: StepBatch) -> Tensor:
    return replica.stage(batch.input_ids, batch=batch)


PEFT_SHAPES = {
    "llama": tiny_shape(),
    "llama, one key-value head": replace(tiny_shape(tied=True), num_key_value_heads=1),
    "dynamic positions": replace(
        tiny_shape(), max_position_embeddings=8, rope_scaling=RopeScaling("dynamic", 4.0)
    ),
    "qwen3": FAMILY_SHAPES["qwen3"],
    "gpt2": FAMILY_SHAPES["gpt2"],
}
PEFT_CASES = [
    pytest.param(name, prefix, id=f"{name}-{kind}")
    for name in PEFT_SHAPES
    for kind, prefix in (("direct", DIRECT), ("projected", PROJECTED))
]


@pytest.mark.parametrize(
    ("name", "prefix"), cases(PEFT_CASES, core=[("llama", DIRECT), ("llama", PROJECTED), ("gpt2", DIRECT)])
)
def test_logits_loss_and_gradients_equal_peft(name, prefix, tmp_path):
    shape = PEFT_SHAPES[name]
    replica = _one_process(replace(shape, adapter=prefix))
    model, encoder = _in_peft(shape, prefix, replica, tmp_path)

    batch = tiny_batch(shape, 5)
    labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
    mask = torch.ones_like(batch.loss_mask)
    expected = model(input_ids=batch.input_ids).logits
    assert_close(_logits(replica, batch), expected, rtol=FLOAT32_RTOL, what="logits")
    # Theirs shifts the labels: the first label of a row has no logits.
    theirs = model(input_ids=batch.input_ids, labels=torch.cat((labels[:, :1], labels[:, :-1]), dim=1)).loss
    counted = labels.clone()
    counted[:, -1] = -100
    ours = _losses(replica, replace(batch, labels=counted, loss_mask=mask)).sum() / (counted >= 0).sum()
    assert_close(ours, theirs, rtol=FLOAT32_RTOL, what="loss")
    theirs.backward()
    ours.backward()
    assert_same_tensors(
        {each: values.grad for each, values in encoder.items()},
        _as_peft(shape, prefix, {each: values.grad for each, values in replica.trained_tensors.items()}),
        rtol=FLOAT32_GRADIENT_RTOL,
    )


def _in_peft(
    shape: ModelShape, prefix: Prefix, replica: Replica, folder: Path
) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """Return PEFT's model with the replica's weights, and the parameters of its prefix."""
    peft = pytest.importorskip("peft")
    base = _transformers_model(shape, folder)
    own = {name: tensor for name, tensor in replica.tensors.items() if "prefix" not in name}
    weights = _in_their_names(shape, _canonical(replica.stage, shape, own))
    names = names_in_files(base)
    base.load_state_dict({name: weights[file].float() for name, file in names.items()}, strict=False)
    base.tie_weights()
    config = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=prefix.tokens,
        prefix_projection=prefix.projection is not None,
        encoder_hidden_size=prefix.projection,
    )
    model = peft.get_peft_model(base, config)
    encoder = dict(model.prompt_encoder["default"].named_parameters())
    assert encoder.keys() == _as_peft(shape, prefix, replica.tensors).keys()
    with torch.no_grad():
        for each, values in _as_peft(shape, prefix, replica.tensors).items():
            encoder[each].copy_(values)
    return model, encoder


def _as_peft(shape: ModelShape, prefix: Prefix, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a prefix by the names of PEFT's encoder, which has all layers in one tensor."""

    def layers(kind: str) -> Tensor:
        names = [f"model.layers.{each}.self_attn.prefix.{kind}" for each in range(shape.num_hidden_layers)]
        return torch.cat([tensors[name] for name in names])

    if prefix.projection is None:
        return {"embedding.weight": layers("weight").t()}
    return {
        "embedding.weight": tensors["model.prefix.embedding"],
        "transform.0.weight": tensors["model.prefix.hidden.weight"],
        "transform.0.bias": tensors["model.prefix.hidden.bias"],
        "transform.2.weight": layers("weight"),
        "transform.2.bias": layers("bias"),
    }


@KINDS
def test_only_the_tokens_count_in_the_loss(prefix):
    replica = _one_process(replace(tiny_shape(), adapter=prefix), torch.float64)
    batch = tiny_batch(replica.shape, 5)
    batch = replace(batch, loss_mask=batch.loss_mask.double())
    logits = _logits(replica, batch)
    assert logits.shape[:2] == batch.labels.shape
    token_losses = cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none", ignore_index=-100)
    assert_close(_losses(replica, batch), (token_losses * batch.loss_mask).sum(dim=1), what="losses")
    assert weight_share(batch, replica.mesh) == (batch.loss_mask * (batch.labels >= 0)).sum()
    nothing = _losses(replica, replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))).sum()
    nothing.backward()
    assert nothing == 0
    assert all(not tensor.grad.any() for tensor in replica.trained_tensors.values())


@KINDS
def test_each_document_sees_the_prefix_and_nothing_of_the_others(prefix):
    replica = _one_process(replace(FAMILY_SHAPES["mistral"], adapter=prefix), torch.float64)
    batch = in_documents(tiny_batch(replica.shape, 3))
    seen = replica.stage.whole.ops.documents(
        batch.document_ids, None, dropout=False, softcap=None, prefix=prefix.tokens
    )
    together = _logits(replica, batch, seen)
    for row, ids in enumerate(batch.document_ids):
        for each in ids.unique():
            alone = tiny_batch(replica.shape, 1, sequence_length=int((ids == each).sum()))
            alone = replace(alone, input_ids=batch.input_ids[row : row + 1, ids == each])
            assert_close(together[row : row + 1, ids == each], _logits(replica, alone), what=f"row {row}")


@KINDS
@pytest.mark.parametrize("family", cases(["llama 3", "mistral", "gemma2", "gpt2"], core=["mistral"]))
def test_cached_decoding_equals_the_full_forward(family, prefix):
    replica = _one_process(replace(FAMILY_SHAPES[family], adapter=prefix), torch.float64)
    batch = tiny_batch(replica.shape, 1)
    expected = _logits(replica, batch)[0]
    ids = batch.input_ids
    cache, chunk, length = one_slot(replica.stage, ids.shape[1]), replica.stage.whole, 0
    for new in (4, 2, *[1] * (ids.shape[1] - 6)):
        span = slice(length, length + new)
        decodes = new == 1 and length % 2 == 0
        step = CachedStep(cache, (length,)) if decodes else prompt_step(cache, length, new)
        with torch.no_grad():
            hidden = chunk.decode(
                ids[:, span], torch.arange(length, length + new)[None], StepContext(cache=step)
            )
            logits = chunk.logits(hidden[:, -1:])[0, 0]
        length += new
        assert_close(logits, expected[length - 1], what=f"logits after {length} tokens")


def generate_on_rank(shape: ModelShape, layout: Layout) -> list[int]:
    """Generate greedily with a model of the layout whose weights are those of any other."""
    mesh = ParallelMesh.over_world(layout)
    split = pipeline_split(shape.num_hidden_layers, layout.pipeline)
    options = ModelOptions(dtype=torch.float64)
    replica = build_replica(shape, mesh, split, options, seed=11)
    return list(generate_ids(replica, [3, 14, 15], new_tokens=12))


def test_generation_is_the_same_in_any_layout(ranks):
    shape = replace(tiny_shape(), initializer_range=0.3, adapter=PROJECTED)
    [alone] = ranks.run(generate_on_rank, world_size=1, shape=shape, layout=Layout())
    layout = Layout(pipeline=2, tensor=2)
    assert ranks.run(generate_on_rank, world_size=4, shape=shape, layout=layout) == [alone] * 4
    assert len(set(alone)) > 4, "a model that repeats itself would hide a broken cache"


def test_virtual_tokens_take_positions_from_the_sequence():
    shape = replace(tiny_shape(), adapter=DIRECT)
    assert shape.longest_sequence == shape.base.longest_sequence - 3
    assert len(list(generate_ids(_one_process(shape), [7] * 57, new_tokens=4))) == 4
    with pytest.raises(ConfigError, match="= 61; use at most 4"):
        generate_ids(_one_process(shape), [7] * 57, new_tokens=5)


def test_the_flops_of_a_token_are_those_of_its_further_keys():
    shape = tiny_shape()
    width, layers = shape.num_attention_heads * shape.head_dim, shape.num_hidden_layers
    for prefix in (DIRECT, PROJECTED):
        prefixed = replace(shape, adapter=prefix)
        matrices = [
            each for each in model_parameters(prefixed) if each.layer is not None or each.name == HEAD
        ]
        frozen = sum(each.numel for each in matrices if not each.trained and len(each.spec.full_shape) == 2)
        further = flops_per_token(prefixed, 12) - flops_per_token(shape, 12) + 2 * frozen
        # Forward and twice that backward; per key a product with the query and one with the probability. A frozen
        # matrix has no product for its gradient.
        assert further == 3 * layers * 2 * 2 * width * prefix.tokens
