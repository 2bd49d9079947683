"""Rules over parallel.expert and parallel.expert_tensor: how the ranks of a stage are laid out for its experts."""

from collections.abc import Iterator
from math import lcm

from megalite.config.rules.batch import data_size
from megalite.config.sections.checked import CheckedRun
from megalite.errors import Problem
from megalite.topology.sharding import divisors


def expert_ranks_have_experts(run: CheckedRun) -> Iterator[Problem]:
    expert, number = run.parallel.expert, run.model.num_experts
    if expert > 1 and not number:
        yield Problem.reset(
            "parallel.expert", f"{expert} ranks divide experts, but the model has none", "use 1", 1
        )
    elif expert > max(number, 1):
        message = f"{expert} ranks cannot divide model.num_experts = {number}"
        yield Problem.reset("parallel.expert", message, f"use at most {number}", number)
    if run.parallel.expert_tensor is not None and not number:
        message = f"{run.parallel.expert_tensor} ranks share each expert, but the model has none"
        yield Problem.reset("parallel.expert_tensor", message, "leave it out", None)


def expert_tensor_is_one_or_tensor(run: CheckedRun) -> Iterator[Problem]:
    shared, tensor = run.parallel.expert_tensor, run.parallel.tensor
    if shared not in (None, 1, tensor):
        message = f"{shared} ranks cannot share each expert with parallel.tensor = {tensor}"
        sizes = "use 1" if tensor == 1 else f"use 1, or {tensor} as by default"
        yield Problem.reset("parallel.expert_tensor", message, sizes, 1)


def tensor_fits_the_widths_of_experts(run: CheckedRun) -> Iterator[Problem]:
    tensor, model = run.parallel.tensor, run.model
    if not model.num_experts:
        return
    for name, cut in (
        ("moe_intermediate_size", run.parallel.expert_tensor != 1),
        ("shared_intermediate_size", bool(model.shared_intermediate_size)),
    ):
        size = getattr(model, name)
        if cut and size is not None and tensor > size:
            message = f"{tensor} ranks cannot share model.{name} = {size}"
            yield Problem.reset("parallel.tensor", message, f"use at most {size}", size)


def whole_experts_need_sequence_parallelism(run: CheckedRun) -> Iterator[Problem]:
    shared, parallel = run.parallel.expert_tensor, run.parallel
    if run.model.num_experts and shared == 1 and parallel.tensor > 1 and not parallel.sequence:
        message = "1 leaves experts whole, and each tensor-parallel rank would send all tokens to them"
        remedy = f"use parallel.sequence true, or parallel.expert_tensor {parallel.tensor}"
        yield Problem("parallel.expert_tensor", message, remedy, {"parallel.sequence": True})


def experts_divide_the_ranks(run: CheckedRun) -> Iterator[Problem]:
    parallel, data = run.parallel, data_size(run)
    shared = parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
    stage, wanted = data * parallel.context * parallel.tensor, parallel.expert * shared
    if stage % wanted:
        each = f" of {shared} each (parallel.expert_tensor)" if shared > 1 else ""
        message = f"{parallel.expert} groups of ranks{each} do not divide the {stage} ranks of a stage"
        if shared == 1:
            message = f"{parallel.expert} does not divide the {stage} ranks of a stage"
        if parallel.data == "auto" and run.world_size is None:
            more = lcm(stage, wanted) // stage
            remedy = f"use parallel.data {more} or a multiple of it"
            yield Problem("parallel.expert", message, remedy, {"parallel.data": more})
            return
        fitting = [size for size in divisors(stage // shared) if size <= run.model.num_experts] or [1]
        smaller = max(size for size in fitting if size <= parallel.expert)
        remedy = f"use {' or '.join(map(str, fitting))}: ranks of data * context * tensor"
        yield Problem.reset("parallel.expert", message, remedy, smaller)
