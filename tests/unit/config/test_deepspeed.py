"""DeepSpeed's JSON: what is read into our sections, what is refused, what DeepSpeed is handed in the end."""

from pathlib import Path
from typing import Any

import pytest

from megalite.config.sections.schema import DEEPSPEED_LOSS_SCALE
from tests.unit.config.runs import REMOVED as NOT_SET
from tests.unit.config.runs import load, problems

# As a common guide to a trainer has it, for 4 GPUs.
GUIDE: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 5},
    },
    "gradient_clipping": 0.5,
    "wall_clock_breakdown": False,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "nvme_path": None},
    },
}
NO_BATCH = {"training.micro_batch_size": NOT_SET, "training.global_batch_size": NOT_SET}
ZERO_1 = {"zero_optimization": {"stage": 1}}


def test_the_json_of_a_common_trainer_guide(tmp_path: Path) -> None:
    """Accepted on 4 ranks; on 2, one error shows the equation and where each number came from."""
    loaded = load(tmp_path, NO_BATCH, ds_json=GUIDE, world_size=4)
    config = loaded.config
    assert (config.batch.micro_batch_size, config.batch.micro_batches) == (4, 4)
    assert (config.batch.global_batch_size, config.batch.data) == (64, 4)
    assert (config.zero_stage, config.training.precision) == (2, "fp16")
    assert (config.optimizer.name, config.optimizer.schedule) == ("adamw", "deepspeed")
    assert (config.optimizer.learning_rate, config.optimizer.betas) == (3e-5, (0.8, 0.999))
    assert (config.optimizer.warmup_steps, config.optimizer.gradient_clipping) == (5, 0.5)
    assert loaded.origin("optimizer.learning_rate") == "scheduler.params.warmup_max_lr in ds.json"

    [found] = problems(tmp_path, NO_BATCH, ds_json=GUIDE, world_size=2)
    assert str(found) == (
        "training.global_batch_size: 64 (train_batch_size in ds.json) is not "
        "micro_batch_size 4 (train_micro_batch_size_per_gpu in ds.json) * "
        "micro_batches 4 (gradient_accumulation_steps in ds.json) * data 2 (2 ranks) = 32; "
        "use global_batch_size 32 or micro_batches 8 or micro_batch_size 8 or data 4 (4 ranks)"
    )


def test_deepspeed_is_handed_one_micro_batch_a_step_and_no_optimizer(tmp_path: Path) -> None:
    config = load(tmp_path, NO_BATCH, ds_json=GUIDE, world_size=4).config
    kept = GUIDE["zero_optimization"].items()
    zero = {key: value for key, value in kept if key != "offload_optimizer" and value != "auto"}
    assert config.deepspeed_json() == {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "fp16": {**GUIDE["fp16"], "initial_scale_power": 16},
        "zero_optimization": {**zero, "offload_optimizer": {"device": "cpu"}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def test_the_loss_scale_of_the_json_is_ours(tmp_path: Path) -> None:
    fp16 = {
        "enabled": True,
        "loss_scale": 128.0,
        "initial_scale_power": 10,
        "hysteresis": 3,
        "min_loss_scale": 2,
    }
    loaded = load(tmp_path, ds_json={"fp16": fp16, **ZERO_1})
    training = loaded.config.training
    assert (training.loss_scale, training.initial_loss_scale_power) == (128.0, 10)
    assert (training.loss_scale_hysteresis, training.minimum_loss_scale) == (3, 2)
    assert loaded.origin("training.loss_scale") == "fp16.loss_scale in ds.json"
    assert loaded.config.deepspeed_json()["fp16"] == {**fp16, "loss_scale_window": 1000}
    [found] = problems(tmp_path, {"training.loss_scale_hysteresis": 1}, ds_json={"fp16": fp16, **ZERO_1})
    assert str(found).startswith(
        "training.loss_scale_hysteresis: 1 (run.toml) differs from 3 (fp16.hysteresis"
    )


@pytest.mark.parametrize(
    ("blocks", "precision"),
    [
        ({}, "auto"),
        ({"fp16": {"enabled": False}}, "auto"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16"),
    ],
)
def test_what_the_json_enables_decides_and_auto_keeps_off_what_it_switches_off(
    tmp_path: Path, blocks: dict[str, Any], precision: str
) -> None:
    config = load(tmp_path, ds_json={**blocks, **ZERO_1}).config
    assert config.training.precision == precision
    resolved = config.in_precision("bf16").deepspeed_json()
    assert resolved["bf16"]["enabled"] and not resolved.get("fp16", {}).get("enabled", False)


def test_auto_and_null_say_nothing(tmp_path: Path) -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": None,
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_type": "auto"},
        },
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "offload_param": {"device": "auto"},
        },
        "communication_data_type": "auto",
    }
    changes = {"optimizer.learning_rate": 0.5, "training.precision": "bf16"}
    loaded = load(tmp_path, changes, ds_json=auto)
    optimizer = loaded.config.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.decay_steps) == (0.5, "deepspeed", None)
    assert 'ds.json: zero_optimization.stage "auto" is 2 here; write 1, 2 or 3 to choose' in loaded.notes
    assert loaded.config.deepspeed_json() == {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2},
    }


def test_tables_of_the_run_file_are_the_json_too_and_flags_change_it(tmp_path: Path) -> None:
    inline = load(tmp_path, {"deepspeed.zero_optimization.stage": 1, "deepspeed.train_batch_size": 8})
    assert inline.config.zero_stage == 1
    [found] = problems(tmp_path, {"deepspeed.train_batch_size": 9})
    assert str(found).startswith(
        "training.global_batch_size: 8 (run.toml) differs from 9 (deepspeed.train_batch_size)"
    )
    by_flag = load(
        tmp_path, NO_BATCH, ds_json=GUIDE, world_size=4, flags=["--deepspeed.zero_optimization.stage", "1"]
    )
    zero = {key: value for key, value in GUIDE["zero_optimization"].items() if value != "auto"}
    assert by_flag.config.deepspeed_json()["zero_optimization"] | {"stage": 2} == {
        **zero,
        "offload_optimizer": {"device": "cpu"},
    }
    only_flags = load(tmp_path, flags=["--deepspeed.zero_optimization.stage=3"])
    assert only_flags.config.zero_stage == 3


def test_without_zero_deepspeed_is_not_used(tmp_path: Path) -> None:
    assert load(tmp_path).config.zero_stage == 0
    assert load(tmp_path, ds_json={"zero_optimization": {"stage": 0}}).config.zero_stage == 0
    assert load(tmp_path, ds_json={}).config.zero_stage == 0


WRONG = [
    (
        {"zero_optimisation": {}},
        "ds.json: zero_optimisation: DeepSpeed 0.19.8 has no such key; did you mean zero_opt",
    ),
    (
        {"zero_optimization": {"stagee": 1}},
        "stagee: DeepSpeed 0.19.8 has no such key; did you mean zero_optimization.stage?",
    ),
    ({"stage": 1}, "ds.json: stage: DeepSpeed 0.19.8 has no such key; did you mean zero_optimization.stage?"),
    (
        {"fp16": {"enable": True}},
        "ds.json: fp16.enable: DeepSpeed 0.19.8 has no such key; did you mean fp16.enabled?",
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"devise": "cpu"}}},
        "did you mean zero_optimization.offload_optimizer.device?",
    ),
    (
        {"activation_checkpointing": {"partitioned_activations": True}},
        "activation_checkpointing.partition_activations",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
        "optimizer.params.learning_rate: AdamW has no such parameter in DeepSpeed 0.19.8",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
        "WarmupLR has no such parameter in DeepSpeed 0.19.8; did you mean warmup_num_steps?",
    ),
    ({"fp16": True}, "ds.json: fp16: true should be an object; it has auto_cast"),
    ({"amp": {"enabled": True}}, "ds.json: amp: was removed from DeepSpeed 0.19.8; use fp16 or bf16"),
    ({"zero_optimization": {"mics_shard_size": 2}}, "zero_optimization.mics_shard_size: was removed"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is not a ZeRO stage; use 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": "1"}}, 'zero_optimization.stage: "1" is not a ZeRO stage'),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: true is not a ZeRO stage"),
    (
        {"train_batch_size": 16},
        "training.global_batch_size: 8 (run.toml) differs from 16 (train_batch_size in ds.json)",
    ),
    (
        {"gradient_accumulation_steps": "many"},
        'training.micro_batches: "many" (gradient_accumulation_steps in ds.json)',
    ),
    (
        {"gradient_clipping": -1},
        "optimizer.gradient_clipping: -1 (gradient_clipping in ds.json) should be greater",
    ),
    (
        {"optimizer": {"type": "Lamb"}},
        'ds.json: optimizer.type: megalite does not support "Lamb"; use AdamW, SGD or Lion',
    ),
    (
        {"optimizer": {"type": "Muon"}},
        'ds.json: optimizer.type: megalite does not support DeepSpeed\'s "Muon", but has its own; remove the block '
        'and set optimizer.name = "muon", without ZeRO',
    ),
    ({"optimizer": {"type": "AdamWW"}}, "did you mean AdamW?"),
    (
        {"optimizer": {"type": "OneBitAdam"}},
        'ds.json: optimizer.type: "OneBitAdam" was removed from DeepSpeed 0.19.8; use AdamW, SGD or Lion',
    ),
    ({"optimizer": {"type": "ZeroOneAdam"}}, '"ZeroOneAdam" was removed from DeepSpeed 0.19.8; use AdamW'),
    ({"optimizer": {"type": "OneBitLamb"}}, '"OneBitLamb" was removed from DeepSpeed 0.19.8; use AdamW'),
    ({"optimizer": {"type": "FusedLamb"}}, 'DeepSpeed 0.19.8 has no optimizer "FusedLamb"'),
    (
        {"optimizer": {"type": "DeepSpeedCPUAdam", "params": {"adamw_mode": False, "weight_decay": 1}}},
        "optimizer.params.adamw_mode: megalite does not support false, Adam with weight decay in the gradient",
    ),
    ({"optimizer": {"type": "FusedAdam", "params": {"amsgrad": True}}}, "amsgrad: megalite does not support"),
    (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 1}}},
        "use AdamW, or weight_decay 0",
    ),
    (
        {"optimizer": {"params": {"amsgrad": True}}},
        "optimizer.params.amsgrad: megalite does not support true; use false",
    ),
    (
        {"optimizer": {"params": {"max_grad_norm": 1}}},
        "max_grad_norm: is refused by DeepSpeed; use gradient_clipping",
    ),
    (
        {"optimizer": {"params": {"lr": 0}}},
        "optimizer.learning_rate: 0 (optimizer.params.lr in ds.json) should be",
    ),
    (
        {"scheduler": {"type": "CosineAnnealingLR"}},
        'megalite does not support "CosineAnnealingLR"; use one of Warm',
    ),
    ({"scheduler": {"type": "WarmupCosinLR"}}, "did you mean WarmupCosineLR?"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "square"}}},
        'warmup_type: "square" should be one of log, linear',
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR"}},
        'total_num_steps: is required by WarmupDecayLR; write "auto" for the last step of the run',
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
        "cycle_momentum: megalite does not support true, DeepSpeed's default, which changes betas at every update; "
        'write "cycle_momentum": false',
    ),
    (
        {
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": [1e-4, 1e-5], "cycle_max_lr": 1e-3, "cycle_momentum": False},
            }
        },
        "scheduler.params.cycle_min_lr: megalite does not support [0.0001, 1e-05], a number for each group; "
        "write one number, and set learning_rate_ratio in [[optimizer.groups]]",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-4]}}},
        "a number for each group",
    ),
    ({"fp16": {"enabled": "yes"}}, 'ds.json: fp16.enabled: "yes" should be true or false'),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "ds.json: fp16.enabled: and bf16.enabled are both true",
    ),
    (
        {"tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size: is not supported by megalite; remove it, and set parallel.tensor",
    ),
    ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op: is not supported by megalite; use "mean"'),
    (
        {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
        "compute_grad_norm: is not supported by megalite",
    ),
    (
        {"torch_autocast": {"enabled": True}},
        "torch_autocast.enabled: is not supported by megalite; remove it, and set training.precision",
    ),
    (
        {"comms_logger": {"prof_ops": [None]}},
        "ds.json: comms_logger.prof_ops: has a null in a list; remove it",
    ),
]


@pytest.mark.parametrize(
    ("ds_json", "said"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_key_or_value_is_one_problem(tmp_path: Path, ds_json: dict[str, Any], said: str) -> None:
    [found] = problems(tmp_path, ds_json=ds_json)
    assert said in str(found)


@pytest.mark.parametrize(
    ("changes", "ds_json", "said"),
    [
        (
            {"optimizer.learning_rate": 1.0},
            {"optimizer": {"params": {"lr": 2.0}}},
            "optimizer.learning_rate: 1.0",
        ),
        (
            {"optimizer.schedule": "cosine"},
            {"scheduler": {"type": "WarmupLR"}},
            'optimizer.schedule: "cosine"',
        ),
        (
            {"optimizer.betas": [0.9, 0.95]},
            {"optimizer": {"params": {"betas": [0.9, 0.99]}}},
            "optimizer.betas: [0.9,",
        ),
        (
            {"optimizer.gradient_clipping": 0.0},
            {"gradient_clipping": 1.0},
            "optimizer.gradient_clipping: 0.0",
        ),
        (
            {"training.precision": "fp32"},
            {"bf16": {"enabled": True}},
            'training.precision: "fp32" (run.toml) differs',
        ),
        (
            {"training.precision": "bf16"},
            {"bf16": {"enabled": False}},
            'training.precision: "bf16" (run.toml) differs',
        ),
        (
            {"training.precision": "bf16"},
            {"fp16": {"enabled": True}},
            'training.precision: "bf16" (run.toml) differs',
        ),
        (
            {"deepspeed.bf16.enabled": True},
            ZERO_1,
            "deepspeed.config: is set together with deepspeed.bf16; move bf16 into",
        ),
        ({"deepspeed.zero_optimization.a": float("inf")}, None, "inf is not a finite number"),
    ],
)
def test_a_different_value_in_both_places_is_a_problem(
    tmp_path: Path, changes: dict[str, Any], ds_json: dict[str, Any] | None, said: str
) -> None:
    found = problems(tmp_path, changes, ds_json=ds_json)
    assert any(said in str(problem) for problem in found)
    assert {problem.key for problem in found if said not in str(problem)} <= {"deepspeed.zero_optimization.a"}


def test_equal_values_in_both_places_are_none(tmp_path: Path) -> None:
    changes = {"optimizer.learning_rate": 1.0, "optimizer.betas": [0.9, 0.95], "training.precision": "bf16"}
    ds_json = {
        "optimizer": {"type": "adam", "params": {"lr": 1, "betas": [0.9, 0.95], "torch_adam": True}},
        "bf16": {"enabled": True},
    }
    assert not problems(tmp_path, changes, ds_json=ds_json)
    assert not problems(tmp_path, {"training.precision": "bf16"}, ds_json={"bfloat16": {"enabled": True}})


def test_what_has_no_effect_is_noted(tmp_path: Path) -> None:
    ds_json = {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "dump_state": True,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    assert load(tmp_path, ds_json=ds_json).notes == (
        "ds.json: activation_checkpointing has no effect: use training.recompute",
        "ds.json: dump_state, steps_per_print have no effect: megalite reports every step itself (monitor.every)",
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_round_robin_gradients_are_not_handed_on(tmp_path: Path, stage: int) -> None:
    """DeepSpeed 0.19.8 links states to other parameters with them, so that a checkpoint has the wrong moments."""
    zero = {"stage": stage, "round_robin_gradients": True}
    loaded = load(tmp_path, ds_json={"zero_optimization": zero})
    assert any("zero_optimization.round_robin_gradients has no effect" in note for note in loaded.notes)
    assert "round_robin_gradients" not in loaded.config.deepspeed_json()["zero_optimization"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_keys_of_deepspeed_s_reduction_have_no_effect_under_zero_1(tmp_path: Path, stage: int) -> None:
    keys = {"contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True}
    zero = {**keys, "use_multi_rank_bucket_allreduce": True}
    notes = load(tmp_path, ds_json={"zero_optimization": {"stage": stage, **zero}}).notes
    note = (
        "ds.json: zero_optimization.contiguous_gradients, zero_optimization.reduce_scatter, "
        "zero_optimization.use_multi_rank_bucket_allreduce have no effect: "
        "under ZeRO 1 megalite sums the gradients itself, by all-reduce"
    )
    assert notes == ((note,) if stage == 1 else ())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"fp16": }', "ds.json: line 1, column 10: Expecting value; it must be JSON"),
        ("[]", "holds no JSON object"),
        ('{"fp16": {}, "fp16": {}}', "it has the key 'fp16' twice"),
        ('{"gradient_clipping": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_json_that_cannot_be_read_is_the_only_problem(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "ds.json").write_text(content)
    [found] = problems(tmp_path, NO_BATCH | {"deepspeed.config": "ds.json"})
    assert said in str(found)


def test_a_missing_json_is_named(tmp_path: Path) -> None:
    [found] = problems(tmp_path, {"deepspeed.config": "nowhere.json"})
    assert "nowhere.json cannot be read: No such file or directory" in str(found)


@pytest.mark.parametrize(
    ("ds_json", "key"),
    [
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_optimizer.ratio",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "5e8"}}, "reduce_bucket_size"),
        (
            {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}},
            "two names",
        ),
        ({"fp16": {"enabled": True, "consecutive_hysteresis": True}, **ZERO_1}, "consecutive_hysteresis"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}, **ZERO_1}, "bf16_optimizer_states"),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}, "fp16": {"enabled": True}, **ZERO_1},
            "grad_accum_dtype",
        ),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}, **ZERO_1}, "expert_parallel"),
    ],
)
def test_a_key_that_would_end_in_the_ranks_is_refused_before(
    tmp_path: Path, ds_json: dict[str, Any], key: str
) -> None:
    [found] = problems(tmp_path, ds_json=ds_json)
    assert key in str(found)
    assert found.remedy


def test_the_number_type_of_the_sums_is_read(tmp_path: Path) -> None:
    both = {"bf16": {"enabled": True}, **ZERO_1}
    for wanted, ours in (("bf16", "model"), ("fp32", "fp32")):
        loaded = load(tmp_path, ds_json={**both, "data_types": {"grad_accum_dtype": wanted}})
        assert loaded.config.training.accumulation == ours
        assert loaded.origin("training.accumulation") == "data_types.grad_accum_dtype in ds.json"
        assert "data_types" not in loaded.config.deepspeed_json()


def test_an_older_form_is_todays_with_a_note(tmp_path: Path) -> None:
    loaded = load(tmp_path, ds_json={"zero_optimization": {"stage": 2, "cpu_offload": True}})
    zero = loaded.config.deepspeed_json()["zero_optimization"]
    assert zero == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert any("older form of offload_optimizer" in note for note in loaded.notes)
    assert load(tmp_path, ds_json={"zero_optimization": True}).config.zero_stage == 1
    loaded = load(tmp_path, ds_json={"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert loaded.config.deepspeed_json()["zero_optimization"] == {"stage": 2}
    assert any("offload_param has no effect with ZeRO 2" in note for note in loaded.notes)


def test_a_removed_block_that_is_off_is_left_out(tmp_path: Path) -> None:
    off = {"amp": {"enabled": False}, "sparse_gradients": False, "elasticity": {"enabled": False}}
    zero = {"stage": 1, "mics_shard_size": -1}
    loaded = load(tmp_path, ds_json={**off, "zero_optimization": zero, "_comment": "free text"})
    assert loaded.config.deepspeed_json()["zero_optimization"] == {"stage": 1}
    assert not loaded.notes


def test_one_size_of_the_batch_means_no_accumulation(tmp_path: Path) -> None:
    """As in DeepSpeed."""
    config = load(tmp_path, NO_BATCH, ds_json={"train_batch_size": 8, **ZERO_1}, world_size=2).config
    assert (config.batch.micro_batch_size, config.batch.micro_batches) == (4, 1)


def test_the_loss_scale_has_deepspeeds_hysteresis(tmp_path: Path) -> None:
    training = load(tmp_path, ds_json={"fp16": {"enabled": True}, **ZERO_1}).config.training
    assert training.loss_scale_hysteresis == 2
    fp16 = pytest.importorskip("deepspeed.runtime.precision_config").DeepSpeedFP16Config()
    assert {
        name: getattr(training, ours) for name, ours in DEEPSPEED_LOSS_SCALE.items() if name != "loss_scale"
    } == {name: getattr(fp16, name) for name in DEEPSPEED_LOSS_SCALE if name != "loss_scale"}
