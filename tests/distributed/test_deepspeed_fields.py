"""Names every private field of DeepSpeed that megalite uses: an upgrade that renames one fails here."""

import ast
import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megalite.train import optimizer
from tests.support.tiny import tiny_shape
from tests.support.training import Job, build, local_batch

# Private fields of the engine, of the optimizers of ZeRO 1 and 2, and of ZeRO 3.
ENGINE = {"scale", "step", "get_global_grad_norm"}
EVERY_STAGE = {"optimizer", "overflow", "override_loss_scale"}
ZERO_1 = EVERY_STAGE | {
    "_build_compact_grad_partition_buffer",
    "_grad_acc_hooks",
    "averaged_gradients",
    "communication_data_type",
    "copy_grads_in_partition",
    "cpu_offload",
    "get_param_id",
    "grad_start_offset",
    "params_in_partition",
    "params_not_in_partition",
    "refresh_fp32_params",
    "set_gradient_accumulation_boundary",
    "single_partition_of_fp32_groups",
}
ZERO_3 = EVERY_STAGE | {
    "_gradient_averaging_world_size",
    "_optimizer_states_and_gradient_swap_in",
    "_optimizer_states_and_gradient_swap_out",
    "_partition_all_parameters",
    "_swappable_optimizer_subgroup",
    "fp32_partitioned_groups_flat",
    "get_param_id",
    "grad_position",
    "persistent_parameters",
    "sub_group_to_group_id",
}
ON_DISK = {"optimizer_swapper"}


def held(stage: int) -> None:
    """On one rank, after a step."""
    job = Job(tiny_shape(layers=2), zero_stage=stage, dtype=torch.float32)
    parts = build(job)
    parts.accumulate(local_batch(job, parts.mesh, 0))
    parts.update(0.1)
    engine, zero = parts.optimizer._engine, parts.optimizer._zero  # type: ignore[attr-defined]
    for owner, names in ((engine, ENGINE), (zero, ZERO_3 if stage == 3 else ZERO_1)):
        missing = sorted(name for name in names if not hasattr(owner, name))
        assert not missing, f"{type(owner).__name__} has no {', '.join(missing)}"
    tensor = parts.stage.get_parameter("model.norm.weight")
    if stage == 3:
        assert tensor.ds_tensor.status.name and tensor.ds_tensor.ds_numel and tensor.ds_numel
        group, offset, length = zero.grad_position[zero.get_param_id(tensor)]
        assert zero.fp32_partitioned_groups_flat[group].numel() >= offset + length
        assert callable(tensor.all_gather)
    else:
        fragment = tensor._hp_mapping
        place = fragment.hp_fragment_address
        flat = zero.single_partition_of_fp32_groups[fragment.param_group_index]
        gradients = zero._build_compact_grad_partition_buffer(fragment.param_group_index)
        assert gradients.flat_partition.numel() == flat.numel()
        padding = sum(each.numel() for each in gradients if getattr(each, "_zero_padding", False))
        assert flat.numel() - padding == sum(
            each.numel() for each in zero.params_in_partition[fragment.param_group_index]
        )
        assert flat.numel() >= place.start + place.numel and fragment.lp_fragment_address.start == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_we_take_of_deepspeed_is_there(ranks, stage):
    ranks.run(held, world_size=1, stage=stage)


def test_the_gather_in_shards_takes_the_arguments_of_deepspeed_s():
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero import stage_1_and_2

    from megalite.train.optimizer.deepspeed_gather import _all_gather

    ours, theirs = (inspect.signature(each).parameters for each in (_all_gather, utils.all_gather_dp_groups))
    assert [*ours] == [*theirs]
    assert "all_gather_dp_groups(" in inspect.getsource(stage_1_and_2.DeepSpeedZeroOptimizer.step)


def test_what_is_kept_in_files_is_found_by_these_names():
    from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    assert "self.optimizer_swapper" in inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    assert "self.swap_params_info" in inspect.getsource(optimizer_utils.OptimizerSwapper)
    info = inspect.getsource(optimizer_utils)
    assert all(
        name in info for name in ("self.tensors", "self.compute_tensor", "self.swap_path", "def numel")
    )
    assert hasattr(partitioned_param_swapper.AsyncPartitionedParameterSwapper, "get_path")


def test_no_other_name_is_used():
    used: set[str] = set()
    folder = Path(optimizer.__file__).parent
    for path in (folder / name for name in ("deepspeed.py", "zero_gradients.py", "zero_state.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self._zero", "self._engine"):
                used.add(node.attr)
    assert used == ENGINE | ZERO_1 | ZERO_3 | ON_DISK


def test_deepspeed_is_pinned_to_the_version_that_is_tested():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"deepspeed=={version('deepspeed')}" in project["dependencies"]


# ------------------------------------------------------------------------------------------------------------- experts

EXPERT_GROUPS = {
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
}
OF_EXPERTS = {"_gradient_reduction_buffer_dtype", "_grad_norm_counts_every_rank"}


def test_what_experts_stand_on_is_there():
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from deepspeed.utils import groups

    assert all(isinstance(getattr(groups, name), dict) for name in EXPERT_GROUPS)
    first, last = stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3
    assert "dtype=self._gradient_reduction_buffer_dtype()" in inspect.getsource(first.setup_buckets)
    counts = inspect.signature(stage3.DeepSpeedZeroOptimizer_Stage3._grad_norm_counts_every_rank).parameters
    assert [*counts] == ["self", "params", "process_group"]
    # Two norms, of gradients on the device and of those that were offloaded.
    assert inspect.getsource(last).count("= self._grad_norm_counts_every_rank(") == 2
    marks = inspect.getsource(first._configure_moe_settings)
    assert all(key in marks for key in ("group['name']", "self.contiguous_gradients", "self.reduce_scatter"))
    assert "isinstance(module, MoE)" in inspect.getsource(engine.DeepSpeedEngine._configure_distributed_model)
    assert hasattr(MoE, "set_deepspeed_parallelism")
    placement = inspect.getsource(engine.DeepSpeedEngine._resolve_zero3_param_placement)
    for name in ("ds_zero_placement_family", "autoep_expert", "ds_zero_partition_group_name"):
        assert name in placement
    tensor = torch.nn.Parameter(torch.ones(1))
    assert not is_moe_param(tensor)
    tensor.allreduce = False  # type: ignore[attr-defined]
    assert is_moe_param(tensor)


def test_no_other_name_is_used_for_experts():
    path = Path(optimizer.__file__).parent / "deepspeed_experts.py"
    used: dict[str, set[str]] = {"groups": set(), "zero": set()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in used:
            used[ast.unparse(node.value)].add(node.attr)
    assert used == {"groups": EXPERT_GROUPS, "zero": OF_EXPERTS}
