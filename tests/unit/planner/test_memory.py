"""The bytes of each kind on each rank, by sums that are written out here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megalite.config.sections.schema import ModelComputeSettings, OptimizerConfig
from megalite.config.sections.training_section import ComputeSettings
from megalite.planner import memory as planner_memory
from megalite.planner.activations import layer_activations, layer_tensors
from megalite.planner.liveness import LiveState
from megalite.planner.memory import RankMemory, stage_counts, stage_memory, stage_states
from megalite.planner.planned_run import PlannedRun
from megalite.planner.stage_parameters import ValueCounts
from megalite.planner.zero_buffers import ZeroBuffers, zero_buffers
from megalite.topology.adapter import Lora, Prefix
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.parity import about
from tests.unit.planner.plans import SHAPE, plan

H, INNER, V, LAYERS, TOKENS = 64, 160, 1000, 8, 64
A_LAYER = 4 * H * H + 3 * INNER * H + 2 * H
ONE_PROCESS = 2 * V * H + LAYERS * A_LAYER + H
TIED = replace(SHAPE, tie_word_embeddings=True)


def memories(**changes: Any) -> list[RankMemory]:
    run = plan(**changes)
    return [stage_memory(run, stage) for stage in range(run.layout.pipeline)]


def test_states_of_one_process() -> None:
    [memory] = memories()
    assert memory.weights == 2 * ONE_PROCESS and memory.gradients == 4 * ONE_PROCESS
    assert memory.masters == 4 * ONE_PROCESS and memory.moments == 8 * ONE_PROCESS


@pytest.mark.parametrize(
    ("changes", "bytes_a_weight"),
    [
        ({"precision": "fp32"}, (4, 4, 0, 8)),
        ({"accumulation": "model"}, (2, 2, 4, 8)),
        ({"layout": Layout(data=4), "zero_stage": 1}, (2, 4, 1, 2)),
        ({"layout": Layout(data=4), "zero_stage": 2}, (2, 1, 1, 2)),
        ({"layout": Layout(data=4), "zero_stage": 3}, (0.5, 1, 1, 2)),
        ({"precision": "fp32", "layout": Layout(data=2), "zero_stage": 1}, (4, 4, 2, 4)),
    ],
)
def test_bytes_a_weight(changes: dict[str, Any], bytes_a_weight: tuple[float, ...]) -> None:
    [memory] = memories(**changes)
    states = (memory.weights, memory.gradients, memory.masters, memory.moments)
    assert states == about([ONE_PROCESS * each for each in bytes_a_weight]) or states == tuple(
        ONE_PROCESS * each for each in bytes_a_weight
    )


def test_offloaded_states_lie_on_the_host() -> None:
    [memory] = memories(zero_stage=2, offload={"offload_optimizer": "cpu"})
    # Masters and moments; their gradients, the rounded weights on their way back, and one gradient.
    assert memory.optimizer == 0 and memory.host == (12 + 4 + 2) * ONE_PROCESS + 2 * V * H
    [memory] = memories(zero_stage=2, offload={"offload_optimizer": "nvme"})
    assert memory.optimizer == 0 and memory.host == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_is_on_both_ends_of_a_pipeline(tied: bool) -> None:
    shape = TIED if tied else SHAPE
    first, second, last = (
        memory.weights / 2 for memory in memories(shape=shape, layout=Layout(pipeline=3), layers=(3, 3, 2))
    )
    assert first == V * H + 3 * A_LAYER and second == 3 * A_LAYER
    assert last == V * H + 2 * A_LAYER + H
    [alone] = memories(shape=shape)
    assert alone.weights / 2 == ONE_PROCESS - tied * V * H


def test_an_adapter_has_gradients_and_optimizer_state_of_its_own_weights_alone() -> None:
    lora = Lora(rank=4, alpha=8, targets=("q_proj", "down_proj"))
    [memory] = memories(shape=replace(SHAPE, adapter=lora))
    trained = LAYERS * (4 * (H + H) + 4 * (INNER + H))
    assert memory.weights == 2 * (ONE_PROCESS + trained)
    assert memory.gradients == 4 * trained and memory.moments == 8 * trained
    [memory] = memories(shape=replace(SHAPE, adapter=Prefix(tokens=5)))
    assert memory.gradients == 4 * LAYERS * 5 * 2 * H


def test_a_layer_keeps_what_its_modules_save() -> None:
    """Llama without grouped heads: e T (8 H + 3 I) and 4 T (a + 2), as benchmarks/memory.py counts by storages."""
    whole = 2 * TOKENS * (8 * H + 3 * INNER) + 4 * TOKENS * (8 + 2)
    assert layer_activations(plan(), "none").kept == whole
    assert layer_activations(plan(), "selective").kept == whole - 4 * TOKENS * 8
    assert layer_activations(plan(), "full").kept == 2 * TOKENS * H
    grouped = layer_activations(plan(replace(SHAPE, num_key_value_heads=2)), "none").kept
    assert grouped == whole - 2 * TOKENS * 2 * (H - H // 4)


def test_a_layer_of_another_form_keeps_other_tensors() -> None:
    whole = layer_activations(plan(), "none").kept
    # Both norms read the same input.
    parallel = layer_activations(plan(replace(SHAPE, norm_placement="parallel")), "none").kept
    assert parallel == whole - 2 * TOKENS * H
    swiglu, geglu = (
        layer_activations(plan(replace(SHAPE, hidden_act=act), plain_torch=True), "none").kept
        for act in ("silu", "gelu")
    )
    assert geglu == swiglu + 2 * TOKENS * INNER


@pytest.mark.parametrize(
    ("precision", "on_cpu", "plain_torch", "repeats"),
    [
        ("fp32", False, True, True),
        ("fp32", True, True, True),
        ("fp32", True, False, False),
        ("bf16", False, True, False),
        ("bf16", True, False, True),
    ],
)
def test_attention_keeps_grouped_heads_repeated(
    precision: str, on_cpu: bool, plain_torch: bool, repeats: bool
) -> None:
    def kept(key_value_heads: int) -> float:
        shape = replace(SHAPE, num_key_value_heads=key_value_heads)
        run = plan(shape, precision=precision, on_cpu=on_cpu, plain_torch=plain_torch)
        return layer_activations(run, "none").kept

    size = 4 if precision == "fp32" else 2
    assert kept(2) - kept(8) == 2 * TOKENS * (repeats * H - (H - H // 4)) * size


def test_tensor_and_sequence_parallel_cut_a_layer() -> None:
    layout = Layout(tensor=2)
    stats = 4 * TOKENS * (4 + 2)
    assert layer_activations(plan(layout=layout), "none").kept == TOKENS * (8 * H + 4 * H + 3 * INNER) + stats
    cut = layer_activations(plan(layout=layout, sequence_parallel=True), "none").kept
    assert cut == TOKENS * (8 * H + 3 * INNER) + 4 * TOKENS * (4 + 1)
    # All positions, and their copy in the order of ranks.
    gathered = layer_activations(plan(layout=layout, sequence_parallel=True), "none").forward
    assert gathered == 2 * 2 * TOKENS * H


def test_a_frozen_linear_keeps_no_input() -> None:
    frozen = replace(SHAPE, adapter=Prefix(tokens=4))
    names = layer_tensors(plan(frozen), "none")
    assert "input of mlp.down_proj" not in names and "input of mlp.down_proj" in layer_tensors(plan(), "none")


@exhibit(
    "Megatron-LM#525",
    also=("Megatron-LM#597", "Megatron-LM#482", "Megatron-Bridge PR#5077"),
    subject="settings",
    there="the memory that was estimated for a stage was far from what it took",
    here="each stage is counted with the micro batches that its schedule keeps there",
    fault=faults.A_MICRO_BATCH_IS_NOT_COUNTED,
)
def test_a_stage_holds_the_micro_batches_that_its_schedule_has_in_flight() -> None:
    """1F1B: stages - stage micro batches; GPipe: all. Each is 2 layers, and a little for the one that runs."""
    layer = layer_activations(plan(), "none")
    for schedule, in_flight in (("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])):
        stages = memories(layout=Layout(pipeline=4), schedule=schedule, micro_batches=8)
        norm = [0, 0, 0, 2 * 2 * TOKENS * H]
        expected = [number * (2 * layer.kept + extra) for number, extra in zip(in_flight, norm, strict=True)]
        for memory, kept in zip(stages, expected, strict=True):
            assert memory.activations - kept == about(layer.backward) or memory.activations == about(kept)
    # The logits of all eight micro batches, and the gradient of the hidden states that enter the head.
    assert stages[3].loss == 8 * 2 * TOKENS * V + 2 * TOKENS * H


def test_interleaved_chunks_raise_the_first_stage_as_published() -> None:
    """Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / (p m) times the layers of the model."""
    layer = layer_activations(plan(), "none").kept
    first, *_ = memories(layout=Layout(pipeline=4), schedule="interleaved_1f1b", micro_batches=8)
    working = layer_activations(plan(), "none").backward
    assert first.activations - working == about(LAYERS * layer * (1 + 3 / (4 * 2)))


def test_gradients_take_the_place_of_activations_in_the_only_micro_batch() -> None:
    [single], [several] = memories(micro_batches=1), memories(micro_batches=2)
    assert single.gradients == several.gradients and single.activations == several.activations
    # At the peak the head's gradient is on its way. The embedding's comes in both types, when activations are freed.
    assert several.peak == sum(several.kinds.values()) - (2 + 4) * V * H + 2 * V * H
    saved = several.peak - single.peak - (several.buffers - single.buffers)
    assert 0.4 * several.gradients < saved < several.gradients


@pytest.mark.parametrize(
    ("shape", "changes", "bytes_of_table"),
    [
        (SHAPE, {"micro_batches": 1}, 2),
        (SHAPE, {}, 2 + 4),
        (SHAPE, {"precision": "fp32"}, 4),
        (SHAPE, {"precision": "fp32", "micro_batches": 1}, 0),
        (SHAPE, {"accumulation": "model"}, 2),
        (TIED, {"micro_batches": 1}, 2 + 4),
        (TIED, {"micro_batches": 1, "model": ModelComputeSettings(chunked_loss=16)}, 2 + 4),
        (TIED, {"model": ModelComputeSettings(chunked_loss=16)}, 4 + 2 + 4),
    ],
)
def test_the_gradient_of_the_embedding_has_every_row_beside_the_sum(
    shape: ModelShape, changes: dict[str, Any], bytes_of_table: int
) -> None:
    """In the type of the weights and in that of the sum; of a tied head, autograd keeps one more until then."""
    [memory] = memories(shape=shape, **changes)
    alone = plan(shape, **changes)
    ids = 2 * alone.micro_batches * TOKENS * (3 * 8 + 4)
    assert memory.buffers - ids == bytes_of_table * V * H


def test_on_the_host_only_the_used_rows_of_the_embedding_are_added() -> None:
    [memory] = memories(precision="fp32", on_cpu=True)
    assert memory.buffers == 2 * 4 * TOKENS * (3 * 8 + 4) + 4 * TOKENS * H


def test_the_heads_gradient_has_the_type_of_the_logits_before_it_is_added() -> None:
    """The backward of the logits, whose stage has no embedding."""
    last = memories(shape=replace(SHAPE, num_hidden_layers=2), layout=Layout(pipeline=2))[-1]
    assert last.buffers - (2 * 2 * 2 * TOKENS * H + 2 * 4 * TOKENS * (3 * 8 + 4)) == 2 * V * H


def test_zero_1_copies_its_share_of_the_gradients() -> None:
    shape = replace(SHAPE, vocab_size=100 * V)  # of which the largest bucket is a small part
    [memory] = memories(shape=shape, layout=Layout(data=2), zero_stage=1, micro_batches=1)
    assert memory.buffers - 2 * TOKENS * (3 * 8 + 4) == memory.gradients / 2
    assert memory.peak >= memory.states + memory.gradients / 2


def test_zero_2_and_3_reduce_a_bucket_of_gradients_beside_the_copy_that_is_reduced() -> None:
    ids, everything = 2 * 4 * TOKENS * (3 * 8 + 4), {"stage": 3, "reduce_bucket_size": 10**9}
    fp32: dict[str, Any] = {"precision": "fp32", "layout": Layout(data=2)}
    [memory] = memories(**fp32, zero_stage=3, zero=everything | {"stage3_max_live_parameters": 0})
    # At the end of a backward the embedding is still gathered.
    assert memory.buffers - ids == 2 * 4 * ONE_PROCESS + 4 * V * H
    [memory] = memories(**fp32, zero_stage=2, zero={"stage": 2, "reduce_bucket_size": 2 * V * H})
    # Half of the layers and a table on either rank, of this micro batch and of those before.
    own = 4 * (V * H + 4 * A_LAYER + H)
    assert memory.buffers - ids == about(2 * own - memory.gradients + 2 * 4 * 2 * V * H)


def test_zero_3_has_weights_gathered_and_the_buffer_that_they_come_in() -> None:
    run = plan(layout=Layout(data=2), zero_stage=3)
    of_zero = zero_buffers(run, 0, stage_counts(run, 0))
    # The embedding comes first, by itself; then all others in one buffer.
    assert of_zero.gathered == of_zero.prefetched + 2 * V * H == 2 * ONE_PROCESS
    limits = {"stage": 3, "stage3_max_live_parameters": 2 * V * H, "stage3_prefetch_bucket_size": 10}
    of_zero = zero_buffers(replace(run, zero=limits), 0, stage_counts(run, 0))
    assert (of_zero.gathered, of_zero.prefetched) == (2 * 2 * V * H, 2 * 10)


def test_muon_works_on_a_matrix_of_a_layer_at_a_time() -> None:
    """Its embedding and head, here larger, are updated by AdamW in place."""
    shape = replace(SHAPE, num_hidden_layers=1, vocab_size=100 * V, intermediate_size=100 * INNER)
    muon = OptimizerConfig(name="muon")
    [memory] = memories(shape=shape, precision="fp32", micro_batches=1, optimizer=muon)
    assert memory.buffers - 2 * TOKENS * (3 * 8 + 4) == 3 * 4 * 2 * 100 * INNER * H


def _half_a_master_and_moment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlannedRun, "exact_bytes", 2)


def _no_tied_copy(patch: pytest.MonkeyPatch) -> None:
    def forgetful(run: PlannedRun, stage: int) -> ValueCounts:
        counts, copy = stage_counts(run, stage), run.shape.vocab_size * run.shape.hidden_size
        copied = run.shape.tie_word_embeddings and 0 < stage == run.layout.pipeline - 1
        return replace(counts, weights=counts.weights - copy) if copied else counts

    patch.setattr(planner_memory, "stage_counts", forgetful)


def _one_micro_batch_too_few(patch: pytest.MonkeyPatch) -> None:
    def too_few(run: PlannedRun, stage: int) -> tuple[LiveState, ...]:
        fewer = []
        for state in stage_states(run, stage):
            chunks = len(state.numbers) // 3
            kept = tuple(max(0, number - 1) for number in state.numbers[:chunks])
            fewer.append(state._replace(numbers=kept + state.numbers[chunks:]))
        return tuple(fewer)

    patch.setattr(planner_memory, "stage_states", too_few)


def _no_bucket(patch: pytest.MonkeyPatch) -> None:
    def without(run: PlannedRun, stage: int, counts: ValueCounts) -> ZeroBuffers:
        return replace(zero_buffers(run, stage, counts), bucket=0.0)

    patch.setattr(planner_memory, "zero_buffers", without)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (_half_a_master_and_moment, test_states_of_one_process),
        (_no_tied_copy, lambda: test_a_tied_table_is_on_both_ends_of_a_pipeline(True)),
        (
            _one_micro_batch_too_few,
            test_a_stage_holds_the_micro_batches_that_its_schedule_has_in_flight,
        ),
        (_no_bucket, test_zero_2_and_3_reduce_a_bucket_of_gradients_beside_the_copy_that_is_reduced),
    ],
)
def test_a_planted_fault_turns_its_check_red(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[], None],
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_chunked_mlp_keeps_its_input_alone(mode: Any) -> None:
    """bf16: two bytes a value, and the gate and up of all tokens are gone with what "down" reads."""
    whole, chunked = (
        plan(training=ComputeSettings(recompute=mode, sequence_chunk=chunk)) for chunk in (0, TOKENS // 4)
    )
    kept, less = (sum(layer_tensors(run, mode).values()) for run in (whole, chunked))
    assert kept - less == 3 * INNER * TOKENS * 2
    inner = 3 * INNER * (TOKENS // 4) * 2
    assert layer_activations(chunked, mode).forward == inner + H * TOKENS * 2
    assert layer_activations(chunked, "full").backward < layer_activations(whole, "full").backward
    too_large = plan(training=ComputeSettings(recompute=mode, sequence_chunk=TOKENS))
    assert layer_activations(too_large, mode) == layer_activations(whole, mode)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_attention_s_backward_has_a_workspace_a_thread_on_the_host(mode: Any) -> None:
    """By csrc/cpu/attention.cpp: of one key-value head two copies of the keys, the values, and both gradients.

    With chunks of the MLP attention's backward is the highest moment of a layer: with the gradients of its output, of
    query, key and value, and of the residual stream, while the MLP's input and that of its norm are gone.
    """
    changes: dict[str, Any] = {
        "precision": "fp32",
        "training": ComputeSettings(recompute=mode, sequence_chunk=4),
    }
    on_card, *on_host = (
        plan(**changes, on_cpu=on_cpu, threads=count) for on_cpu, count in ((False, 2), (True, 1), (True, 3))
    )
    highest = [layer_activations(run, mode).backward for run in (on_card, *on_host)]
    hidden = 4 * H * TOKENS
    recomputed = sum(layer_tensors(on_card, "none").values()) - hidden if mode == "full" else 0.0
    assert highest[0] - recomputed == (5 - 2) * hidden
    head = 4 * SHAPE.head_dim * on_card.sequence_length
    assert [size - highest[0] for size in highest[1:]] == [5 * head, 15 * head]
    # No more threads than key-value heads of all sequences; torch's own attention has none of it.
    many, all_heads = (
        replace(on_host[0], threads=count)
        for count in (1000, SHAPE.num_key_value_heads * on_card.micro_batch_size)
    )
    assert layer_activations(many, mode) == layer_activations(all_heads, mode)
    for torch_s in ({"plain_torch": True}, {"precision": "bf16"}):
        few, more = (replace(run, **torch_s) for run in on_host)
        assert layer_activations(few, mode) == layer_activations(more, mode)


def test_offloaded_activations_lie_on_the_host_for_every_micro_batch_in_flight() -> None:
    pipeline = {"layout": Layout(pipeline=2), "micro_batches": 8}
    runs = [plan(training=ComputeSettings(offload_activations=on), **pipeline) for on in (False, True)]
    a_layer = sum(layer_tensors(runs[0], "none").values())
    for stage in range(2):
        plain, offloaded = (stage_memory(run, stage) for run in runs)
        in_flight = 2 - stage
        assert offloaded.host - plain.host >= in_flight * a_layer * LAYERS / 2
        assert offloaded.host - plain.host < 1.1 * in_flight * a_layer * LAYERS / 2
        assert offloaded.activations < plain.activations / 2 and offloaded.peak < plain.peak
    on_cpu = [replace(run, on_cpu=True) for run in runs]
    assert stage_memory(on_cpu[0], 0) == stage_memory(on_cpu[1], 0)
