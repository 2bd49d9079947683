"""Faults of mixtures of experts to plant, with the settings of a `Job` that show each. Most leave the loss as it is."""

from collections.abc import Callable, Mapping
from typing import Any

from megalite.model import moe, stages
from megalite.parallel import experts, gradient_buckets, gradients, mesh
from megalite.topology.axes import Layout
from megalite.topology.place import RankPlace
from megalite.topology.sharding import TensorSlice
from tests.support.context_faults import ContextFault

_COPIES = {"layout": Layout(data=4, expert=2)}
_DATA = {"layout": Layout(data=2, expert=2)}
_CONTEXT = {"layout": Layout(context=2, expert=2)}
_TENSOR = {"layout": Layout(tensor=2)}
_WHOLE = {"layout": Layout(tensor=2, expert=2, expert_tensor=1), "sequence_parallel": True}


def _over_copies(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Sum the gradients of experts over their copies in another way: change(values, size) before the sum."""

    def of(start_all_reduce: Any) -> Any:
        def changed(values: Any, ranks: Any) -> Any:
            if ranks.role == "edp":
                values = change(values, ranks.size)
            return start_all_reduce(values, ranks)

        return changed

    return of


def _only_own(start_all_reduce: Any) -> Any:
    def own(values: Any, ranks: Any) -> Any:
        return (lambda: values) if ranks.role == "edp" else start_all_reduce(values, ranks)

    return own


def _first_expert_ranks(is_counted: Any) -> Any:
    def counted(place: RankPlace, parameter: Any) -> bool:
        first = parameter.spec.axis != "etp" or place.peers["ep"][0] == place.rank
        return first and is_counted(place, parameter)

    return counted


def _each_copy_of_experts(squared_norm_shares: Any) -> Any:
    def counted(values: Any, *others: Any, **rest: Any) -> Any:
        each = [(index, 1 if copies == 2 else copies, value) for index, copies, value in values]
        return squared_norm_shares(each, *others, **rest)

    return counted


def _of_all_rows(balance_loss: Any) -> Any:
    def of_micro_batch(shares: Any, counts: Any, *others: Any) -> Any:
        mean = counts.double().mean(dim=0, keepdim=True).expand_as(counts)
        return balance_loss(shares, mean, *others)

    return of_micro_batch


def _twice(with_loss: Any) -> Any:
    return lambda output, loss, weights: with_loss(output, loss, 2 * weights)


def _gradients_not_back_in_order(reordered: Any) -> Any:
    """Send the gradients of rows the way of the rows: the forward, and so the loss, stay as they are."""
    return lambda values, order, inverse: reordered(values, order, order)


def _of_the_next_choice(tokens_of_rows: Any) -> Any:
    return lambda rows, weights, order: tokens_of_rows(rows, weights.roll(1, dims=1), order)


def _by_local_index(normal_slice: Any) -> Any:
    def drawn(seed: int, name: str, region: TensorSlice, *others: Any, **rest: Any) -> Any:
        before, _, after = name.partition(".experts.")
        if after:
            number, _, part = after.partition(".")
            name = f"{before}.experts.{int(number) % 4}.{part}"  # the second rank has experts 4 to 6
        return normal_slice(seed, name, region, *others, **rest)

    return drawn


def _all_but_routers(is_partial: Any) -> Any:
    return lambda parameter, part, mesh: "mlp.gate." not in part.name and is_partial(parameter, part, mesh)


def _all_but_their_adapters(is_partial: Any) -> Any:
    def partial(parameter: Any, part: Any, mesh: Any) -> bool:
        of_expert = ".experts." in part.name and ".lora_" in part.name
        return not of_expert and is_partial(parameter, part, mesh)

    return partial


def _of_the_other_rank(slices: Any) -> Any:
    def cut(place: RankPlace, parameter: Any) -> Any:
        index, size = place.cut(parameter)
        other = parameter.name.endswith("experts.gate_up_proj.lora.B")
        return parameter.spec.slices(size - 1 - index, size) if other else slices(place, parameter)

    return cut


def _doubled(forward: Any) -> Any:
    return lambda *inputs: 2 * forward(*inputs)


EXPERT_FAULTS: Mapping[str, ContextFault] = {
    "mean over the copies of experts": ContextFault(
        gradient_buckets, "start_all_reduce", _over_copies(lambda values, size: values.div_(size)), _COPIES
    ),
    "experts not summed over their copies": ContextFault(
        gradient_buckets, "start_all_reduce", _only_own, _COPIES
    ),
    "experts summed over all data ranks": ContextFault(
        mesh, "COPIES", lambda copies: {**copies, "etp": "dense_gradients"}, {**_COPIES, "even": True}
    ),
    "adapters of experts summed over all data ranks": ContextFault(
        mesh,
        "COPIES",
        lambda copies: {**copies, "etp": "dense_gradients"},
        {**_COPIES, "even": True, "adapted": True},
    ),
    "adapters of experts not summed over the ranks that share one": ContextFault(
        gradients, "is_partial", _all_but_their_adapters, {**_TENSOR, "adapted": True}
    ),
    "B of an expert cut as another rank's": ContextFault(
        RankPlace, "slices", _of_the_other_rank, {**_TENSOR, "adapted": True}
    ),
    "norm without the experts of other ranks": ContextFault(
        RankPlace, "is_counted", _first_expert_ranks, _DATA
    ),
    "norm of every copy of experts": ContextFault(
        gradients, "squared_norm_shares", _each_copy_of_experts, _COPIES
    ),
    "balance of a rank's own positions": ContextFault(
        moe, "all_reduce", lambda _: lambda values, ranks: values, _CONTEXT
    ),
    "balance of a micro batch": ContextFault(
        moe, "balance_loss", _of_all_rows, {**_DATA, "micro_batch_size": 4}
    ),
    "router losses of each data rank": ContextFault(moe, "with_loss", _twice, _DATA),
    "router losses of each tensor rank": ContextFault(moe, "with_loss", _twice, _TENSOR),
    "router losses not attached": ContextFault(
        moe, "with_loss", lambda _: lambda output, loss, weights: output, _DATA
    ),
    "rows not sorted after the exchange": ContextFault(
        experts, "reordered", lambda _: lambda values, order, inverse: values, _COPIES
    ),
    "gradients of rows in the order of the forward": ContextFault(
        experts, "reordered", _gradients_not_back_in_order, _COPIES
    ),
    "weights of another choice": ContextFault(experts, "tokens_of_rows", _of_the_next_choice, _DATA),
    "experts drawn by their place on the rank": ContextFault(stages, "normal_slice", _by_local_index, _DATA),
    "router's gradient of a rank's own positions": ContextFault(
        gradients, "is_partial", _all_but_routers, _WHOLE
    ),
    "shared experts of each tensor rank": ContextFault(
        moe.GatedMLP, "forward", _doubled, {**_TENSOR, "shared": True}
    ),
}
