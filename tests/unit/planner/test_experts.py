"""Experts' formulas against rows that are sent one by one, and tensors that a toy on the meta device keeps."""

from dataclasses import replace
from math import prod

import pytest
import torch

from megalite.config.load import load_run
from megalite.model.context import StepContext
from megalite.model.dropout import NO_MASKS
from megalite.model.latent_attention import LatentSelfAttention
from megalite.model.layer import DecoderLayer
from megalite.model.moe import Mixture
from megalite.model.options import ModelOptions
from megalite.model.rope import LayerRotations
from megalite.parallel.mesh import ParallelMesh
from megalite.planner.cluster import Cluster
from megalite.planner.experts import (
    IMBALANCE,
    adapter_values,
    block_activations,
    exchange_of_a_token,
    exchange_seconds,
    exchanged_values,
    expert_values,
    latent_values,
    layers_with_experts,
    reduction_factors,
)
from megalite.planner.memory import stage_memory
from megalite.planner.planned_run import PlannedRun
from megalite.planner.stage_parameters import stage_counts
from megalite.planner.step_time import step_time
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape, LatentAttention, MixtureShape
from megalite.topology.parameters import model_parameters
from megalite.topology.place import RankPlace
from tests.support.parity import about
from tests.unit.planner.plans import SHAPE, plan

EXPERTS = ExpertShape(8, 2, 48, shared_intermediate_size=32, first_k_dense_replace=3)
MIXTURE = MixtureShape(**vars(SHAPE), experts=EXPERTS)
TOKENS, HIDDEN = 64, 64
CLUSTER = Cluster("H100 80GB HBM3", nodes=2, cards_per_node=4, efficiency=0.5, link_efficiency=1.0)


def mixed(expert: int = 1, *, tensor: int = 1, data: int = 1, cut: int = 1, **changes: object) -> PlannedRun:
    layout = Layout(tensor=tensor, data=data, expert=expert, expert_tensor=cut)
    return replace(plan(MIXTURE, layout=layout, sequence_parallel=tensor > 1), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_exchange_sends_the_rows_of_other_ranks_experts(ranks: int) -> None:
    """Every token goes to two experts, all of them equally often; there, back, and their gradients both ways."""
    holder = {expert: expert * ranks // 8 for expert in range(8)}
    sent = 0
    for token in range(TOKENS):
        for expert in (token % 8, (token + 3) % 8):
            sent += HIDDEN * (holder[expert] != 0)
    run = mixed(ranks, data=ranks)
    assert exchanged_values(run) == 4 * sent
    assert exchanged_values(run, recomputed=True) == 6 * sent
    assert exchanged_values(replace(run, layout=Layout(data=ranks))) == 0


def test_the_words_of_an_exchange_are_of_a_token_and_all_layers() -> None:
    """256 x 2 values of 4 bytes on their way through 8 layers, of which half stay on the rank; two ways more again."""
    settings = {
        "model.family": "qwen3_moe",
        "model.num_experts": 4,
        "model.num_experts_per_tok": 2,
        "model.moe_intermediate_size": 96,
        "model.hidden_size": 256,
        "model.intermediate_size": 96,
        "training.sequence_length": 16,
        "training.global_batch_size": 4,
        "training.micro_batch_size": 2,
        "training.steps": 1,
        "data.source": "stdlib",
        "model.num_hidden_layers": 8,
        "model.num_attention_heads": 4,
        "parallel.data": 2,
        "training.precision": "fp32",
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]

    def words(*more: str) -> str:
        return exchange_of_a_token(load_run(None, [*flags, *more], 2).config)

    assert words() == ""
    assert words("--parallel.expert", "2") == "experts: 32 KiB a token and step"
    again = ("--parallel.expert", "2", "--training.recompute", "full")
    assert words(*again) == "experts: 48 KiB a token and step"


def test_tensor_parallel_ranks_route_their_own_tokens_or_with_cut_experts_all() -> None:
    assert exchanged_values(mixed(2, tensor=2)) == exchanged_values(mixed(2, data=2)) / 2
    assert exchanged_values(mixed(2, tensor=2, data=2, cut=2)) == exchanged_values(mixed(2, data=2))


def test_a_layer_keeps_the_tensors_of_its_experts() -> None:
    """The block that trains is asked what it keeps of its rows and of the router."""
    block = Mixture(MIXTURE, 3, ParallelMesh.single(), ModelOptions())
    weights = {weight.data_ptr() for weight in block.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights and tensor.is_floating_point():
            kept[tensor.data_ptr()] = tensor
        return tensor

    for weight in block.parameters():
        torch.nn.init.normal_(weight)
    hidden_states = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden_states, StepContext(), NO_MASKS)
    sizes = sorted(tensor.numel() for tensor in kept.values())
    values, rows = expert_values(mixed(), EXPERTS), TOKENS * EXPERTS.num_experts_per_tok
    inside = [2 * rows * EXPERTS.moe_intermediate_size, rows * EXPERTS.moe_intermediate_size]
    assert sum(inside) == values["gate, up and their product"]
    # The router's input and the MLP of all tokens are those of a dense layer, the weights of choices too few to plan.
    dense = [TOKENS * HIDDEN, TOKENS * 2 * 32, TOKENS * 32]
    arrived, returned, logits = (
        values[name] for name in ("arrived rows", "returned rows", "router's logits")
    )
    assert sorted([*inside, arrived, returned, logits, *dense]) == [each for each in sizes if each >= logits]


def kept_by(block: torch.nn.Module) -> int:
    """Return the values that a block keeps of a micro batch beside its weights."""
    weights = {weight.data_ptr() for weight in block.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights and tensor.is_floating_point():
            kept[tensor.data_ptr()] = tensor
        return tensor

    for weight in block.parameters():
        torch.nn.init.normal_(weight)
    hidden_states = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden_states, StepContext(), NO_MASKS)
    return sum(tensor.numel() for tensor in kept.values())


def test_adapters_of_experts_are_counted_as_they_are_kept_and_held() -> None:
    lora = Lora(3, 6.0, ("*.experts.*.gate_proj", "*.experts.*.up_proj", "*.experts.*.down_proj"))
    shape = replace(MIXTURE, adapter=lora)
    plain, adapted = (DecoderLayer(each, 3, ParallelMesh.single()).mlp for each in (MIXTURE, shape))
    more = adapter_values(replace(mixed(), shape=shape), EXPERTS, 3)
    assert kept_by(adapted) - kept_by(plain) == more > 0
    assert (
        adapter_values(replace(mixed(), shape=shape), EXPERTS, 3) > adapter_values(mixed(), EXPERTS, 3) == 0
    )
    for cut in (1, 2):
        run = replace(mixed(4, tensor=2, data=4, cut=cut), shape=shape)
        parameters = RankPlace(run.layout, 0).parameters(shape, run.split)
        sizes = [prod(RankPlace(run.layout, 0).local_shape(each)) for each in parameters if each.trained]
        assert stage_counts(run, 0).trained == sum(sizes) > 0


def test_the_fullest_rank_gets_more_rows_than_the_mean() -> None:
    alone, shared = expert_values(mixed(), EXPERTS), expert_values(mixed(4, data=4), EXPERTS)
    for name in ("arrived rows", "gate, up and their product"):
        assert shared[name] == about(IMBALANCE * alone[name])
    assert shared["returned rows"] == alone["returned rows"]


def test_only_layers_with_experts_keep_them() -> None:
    dense, mixture = (block_activations(mixed(), "none", layer) for layer in (2, 3))
    shared = replace(SHAPE, intermediate_size=32)
    plain = block_activations(plan(shared), "none", 0)
    assert dense == block_activations(plan(SHAPE), "none", 0)
    assert mixture.kept == plain.kept + 2 * sum(expert_values(mixed(), EXPERTS).values())
    assert layers_with_experts(mixed()) == 5
    again = block_activations(mixed(), "full", 3)
    assert again.kept == block_activations(plan(shared), "full", 0).kept < again.forward


@pytest.mark.parametrize(("zero", "expert"), [(0, 1), (0, 4), (1, 4), (2, 2), (3, 4)])
def test_states_of_a_rank_are_counted_over_the_ranks(zero: int, expert: int) -> None:
    """Four replicas with `expert` of them to a set of experts: a rank's share, added up tensor by tensor."""
    run = mixed(expert, data=4, zero_stage=zero)
    weights = gradients = moments = 0.0
    for parameter in model_parameters(MIXTURE):
        is_expert = ".experts." in parameter.name
        local = parameter.numel / (expert if is_expert else 1)
        copies = 4 / expert if is_expert else 4
        weights += 2 * local / (copies if zero == 3 else 1)
        gradients += 4 * local / (copies if zero >= 2 else 1)
        moments += 8 * local / (copies if zero >= 1 else 1)
    memory = stage_memory(run, 0)
    assert (memory.weights, memory.gradients, memory.moments) == about((weights, gradients, moments))


def test_experts_that_do_not_divide_leave_the_first_rank_the_most() -> None:
    three, all_of_them = (stage_counts(mixed(size, data=3), 0).experts for size in (3, 1))
    assert three is not None and all_of_them is not None
    assert three.weights == all_of_them.weights * 3 / 8


def test_cut_experts_are_shared_by_the_tensor_parallel_ranks() -> None:
    cut, whole = (stage_counts(mixed(tensor=2, cut=size), 0).experts for size in (2, 1))
    assert cut is not None and whole is not None and 2 * cut.weights == whole.weights


@pytest.mark.parametrize("zero", [0, 3])
def test_a_reduction_moves_experts_between_their_copies_only(zero: int) -> None:
    """Rings of four dense copies and of two of each expert: (n - 1) / n of the whole, against 3 / 4 of all."""
    run = mixed(2, data=4, zero_stage=zero)
    experts = sum(each.numel for each in model_parameters(MIXTURE) if ".experts." in each.name)
    dense = sum(each.numel for each in model_parameters(MIXTURE)) - experts
    moved = dense * 3 / 4 + experts / 2 * 1 / 2
    on_rank = dense / 4 + experts / 2 / 2 if zero else dense + experts / 2
    all_over = on_rank * (4 if zero else 1) * 3 / 4
    assert reduction_factors(run) == about((moved / all_over,) * 2)
    assert reduction_factors(plan(layout=Layout(data=4))) == (1, 1)


def test_an_all_to_all_waits_for_the_slower_of_links_and_network() -> None:
    inside, across = mixed(4, data=4), mixed(8, data=8)
    assert exchange_seconds(inside, CLUSTER) == about(2 * exchanged_values(inside) / 450e9)
    # Four of seven other ranks are in another node.
    assert exchange_seconds(across, CLUSTER) == about(2 * exchanged_values(across) * 4 / 7 / 50e9)
    assert exchange_seconds(mixed(), CLUSTER) == 0
    time = step_time(across, CLUSTER, stage_memory(across, 0))
    assert time.experts == about(4 * 5 * exchange_seconds(across, CLUSTER))


def test_latent_attention_keeps_its_heads_and_latent_vectors() -> None:
    """The attention that trains is asked what it keeps, beside the rotation's angles and the statistics of norms."""
    shape = MixtureShape(
        **{**vars(SHAPE), "head_dim": 32}, latent=LatentAttention(12, 24, 8, 16, q_lora_rank=20)
    )
    attention = LatentSelfAttention(shape, 0, ParallelMesh.single(), ModelOptions(), recompute=False)
    weights = {weight.data_ptr() for weight in attention.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in weights and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    for weight in attention.parameters():
        torch.nn.init.normal_(weight)
    rotation = LayerRotations(shape)(torch.arange(TOKENS).unsqueeze(0))
    hidden_states = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(hidden_states, StepContext(rotation=rotation), NO_MASKS)
    wide = plan(replace(SHAPE, head_dim=32))
    more = block_activations(plan(shape), "none", 0).kept - block_activations(wide, "none", 0).kept
    # The input of the query's projection is the layer's own, and a dense layer's heads are 4 x 8 x 32 values.
    values = sum(size for size in kept.values() if size > 8 * TOKENS)
    assert more / 2 == values - TOKENS * (HIDDEN + 4 * 8 * 32)


def test_recomputed_latent_attention_keeps_no_padded_output() -> None:
    latent = LatentAttention(12, 24, 8, 16)
    kept = [latent_values(plan(), latent, mode) for mode in ("none", "selective")]
    assert kept[0] - kept[1] == TOKENS * 8 * 32
