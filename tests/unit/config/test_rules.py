"""Every rule that spans settings: broken, it says so and nothing else does; cured as it says, the run loads."""

from pathlib import Path
from typing import Any

import pytest

from megalite.config.rules.batch import BatchProblem
from megalite.config.rules.every import RULES
from megalite.config.sections.checked import Unknown
from megalite.topology.sharding import divisors
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.planted import without_rule
from tests.unit.config.expert_cases import EXPERT_CASES
from tests.unit.config.latent_cases import LATENT_CASES
from tests.unit.config.layout_cases import LAYOUT_CASES
from tests.unit.config.rule_cases import (
    CURRICULUM_CASES,
    FAMILY_CASES,
    INSTRUCT_CASES,
    VALIDATION_CASES,
    Case,
)
from tests.unit.config.runs import REMOVED, load, problems
from tests.unit.config.tuning_cases import ADAPTER_CASES, MEGATRON_CASES, PREFERENCE_CASES, STREAMING_CASES

CASES = [
    *FAMILY_CASES,
    *LAYOUT_CASES,
    *VALIDATION_CASES,
    *ADAPTER_CASES,
    *INSTRUCT_CASES,
    *CURRICULUM_CASES,
    *PREFERENCE_CASES,
    *STREAMING_CASES,
    *MEGATRON_CASES,
    *EXPERT_CASES,
    *LATENT_CASES,
    Case(
        "batch_numbers_agree",
        {"training.micro_batches": 3, "parallel.data": 2},
        "training.global_batch_size: 8 (run.toml) is not micro_batch_size 2 (run.toml) * micro_batches 3 (run.toml) "
        "* data 2 (run.toml) = 12; use global_batch_size 12 or micro_batches 2",
        {"training.micro_batches": 2},
    ),
    Case(
        "batch_numbers_agree",
        {"training.global_batch_size": 10, "parallel.tensor": 2, "parallel.pipeline": 2},
        "training.global_batch_size: 10 (run.toml) is not a multiple of micro_batch_size 2 (run.toml) "
        "* data 2 (8 ranks / tensor 2 / pipeline 2) = 4; use 8 or 12",
        {"training.global_batch_size": 12},
        world_size=8,
        cured_world_size=8,
    ),
    Case(
        "batch_numbers_agree",
        {"training.micro_batch_size": REMOVED, "training.micro_batches": 3},
        "training.global_batch_size: 8 (run.toml) is not a multiple of micro_batches 3 (run.toml) "
        "* data 1 (default) = 3; use 6 or 9",
        {"training.global_batch_size": 9},
    ),
    Case(
        "batch_numbers_agree",
        {"training.global_batch_size": REMOVED},
        "training.global_batch_size: training.micro_batch_size = 2 (run.toml) alone does not determine the batch; "
        "set one of training.global_batch_size, training.micro_batches",
        {"training.micro_batches": 1},
    ),
    Case(
        "batch_numbers_agree",
        {"training.global_batch_size": REMOVED, "training.micro_batch_size": REMOVED},
        "training.global_batch_size: the batch size is not set; set two of training.global_batch_size, "
        "training.micro_batch_size, training.micro_batches",
        {"training.micro_batches": 1, "training.micro_batch_size": 1},
    ),
    Case(
        "schedule_has_micro_batches",
        {"parallel.pipeline": 4, "training.global_batch_size": 6},
        "training.micro_batches: 3 micro batches are fewer than the 4 that 1f1b needs for 4 stages; "
        'use 4 (training.global_batch_size 8), or parallel.schedule "gpipe"',
        {"parallel.schedule": "gpipe"},
    ),
    Case(
        "schedule_has_micro_batches",
        {"parallel.pipeline": 2, "parallel.schedule": "dualpipev", "training.global_batch_size": 2},
        "training.micro_batches: 1 micro batch is fewer than the 4 that dualpipev needs for 2 stages; "
        'use 4 (training.global_batch_size 8), or parallel.schedule "zbv"',
        {"parallel.schedule": "zbv"},
    ),
    Case(
        "schedule_has_micro_batches",
        {"parallel.pipeline": 2, "parallel.schedule": "interleaved_1f1b", "training.global_batch_size": 10},
        "training.micro_batches: 5 micro batches do not make 2 equal rounds, as interleaved_1f1b needs for 2 stages; "
        'use 6 (training.global_batch_size 12), or parallel.schedule "looped_bfs"',
        {"training.global_batch_size": 12},
    ),
    Case(
        "schedule_has_micro_batches",
        {
            "parallel.pipeline": 2,
            "parallel.schedule": "interleaved_zero_bubble",
            "training.micro_batches": 5,
            "training.global_batch_size": REMOVED,
        },
        "training.micro_batches: 5 micro batches do not make 2 equal rounds, as interleaved_zero_bubble needs for "
        '2 stages; use 6 (training.global_batch_size 12), or parallel.schedule "zbv"',
        {"training.micro_batches": 6},
    ),
    Case(
        "zero_fits_the_pipeline",
        {"parallel.pipeline": 2, "deepspeed.zero_optimization.stage": 2},
        "deepspeed.zero_optimization.stage: 2 (run.toml) reduces gradients in every micro batch, but "
        "parallel.pipeline = 2 interleaves them; use 1, or parallel.pipeline 1",
        {"deepspeed.zero_optimization.stage": 1},
    ),
    Case(
        "zero_fits_the_pipeline",
        {"parallel.pipeline": 2, "deepspeed.zero_optimization.stage": 3},
        "deepspeed.zero_optimization.stage: 3 (run.toml) gathers weights in every micro batch, but "
        "parallel.pipeline = 2 interleaves them; use 1, or parallel.pipeline 1",
        {"parallel.pipeline": 1},
    ),
    Case(
        "recomputed_layers_are_chosen_once",
        {"training.recompute": "full", "training.recompute_layers": 2, "training.recompute_ratio": 0.5},
        "training.recompute_layers: 2 and training.recompute_ratio = 0.5 are both set; set only one of them",
        {"training.recompute_layers": REMOVED},
    ),
    Case(
        "chosen_layers_are_recomputed",
        {"training.recompute_layers": 2},
        'training.recompute_layers: 2 has no effect with training.recompute = "none"; '
        'set training.recompute to "full" or "selective"',
        {"training.recompute": "full"},
    ),
    Case(
        "chosen_layers_are_recomputed",
        {"training.recompute_ratio": 0.5},
        'training.recompute_ratio: 0.5 has no effect with training.recompute = "none"; '
        'set training.recompute to "full" or "selective"',
        {"training.recompute": "selective"},
    ),
    Case(
        "compiled_layers_fit_the_schedule",
        {"training.compile": True, "parallel.pipeline": 2, "parallel.schedule": "zbv"},
        'training.compile: true does not work with parallel.schedule = "zbv", which computes input and weight '
        "gradients separately: a compiled layer computes them together; use one of the schedules "
        '"1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", or training.compile = false',
        {"parallel.schedule": "interleaved_1f1b"},
    ),
    Case(
        "compiled_layers_hold_no_collectives",
        {"training.compile": True, "parallel.tensor": 2},
        "training.compile: true does not work with parallel.tensor = 2: collectives are not compiled; "
        "use parallel.tensor 1, or training.compile = false",
        {"training.compile": False},
    ),
    Case(
        "compiled_layers_are_recomputed_whole",
        {"training.compile": True, "training.recompute": "selective"},
        'training.compile: true does not work with training.recompute = "selective": the attention of a compiled '
        "layer cannot be recomputed alone; "
        'use training.recompute "full" or "none", or training.compile = false',
        {"training.recompute": "full"},
    ),
    Case(
        "compiled_layers_hold_their_mlp",
        {"training.compile": True, "training.sequence_chunk": 8},
        "training.sequence_chunk: 8 does not work with training.compile = true: a compiled layer computes the MLP of "
        "all tokens at once; set training.compile = false, or model.chunked_loss = 8 for the loss alone",
        {"training.sequence_chunk": REMOVED},
    ),
    Case(
        "compiled_layers_keep_their_activations",
        {"training.compile": True, "training.offload_activations": True},
        "training.offload_activations: true does not work with training.compile = true: compiled backwards write over "
        "saved tensors; set it or training.compile to false",
        {"training.offload_activations": False},
    ),
    Case(
        "compiled_layers_hold_their_weights",
        {"training.compile": True, "deepspeed.zero_optimization.stage": 3},
        "training.compile: true does not work with deepspeed.zero_optimization.stage = 3, which gathers weights "
        "inside a layer; use stage 1 or 2, or training.compile = false",
        {"deepspeed.zero_optimization.stage": 2},
    ),
    Case(
        "length_is_given_once",
        {"training.steps": REMOVED},
        "training.steps: the length of the run is not set; set training.steps or training.epochs",
        {"training.epochs": 1.5},
    ),
    Case(
        "length_is_given_once",
        {"training.epochs": 2},
        "training.steps: 10 and training.epochs = 2.0 are both set; "
        "set only one of them; on the command line --training.steps unset removes a value of the file",
        {"training.steps": REMOVED},
    ),
    Case(
        "stop_after_is_a_duration",
        {"training.stop_after": "1.5h"},
        'training.stop_after: "1.5h" is not a duration; write "23h30m", "45m" or a number of seconds',
        {"training.stop_after": "1h30m"},
    ),
    Case(
        "sequences_fit_the_model",
        {"training.sequence_length": 4096},
        "training.sequence_length: 4096 is longer than model.max_position_embeddings = 2048; "
        "use at most 2048, or raise model.max_position_embeddings",
        {"model.max_position_embeddings": 4096},
    ),
    Case(
        "sequences_fit_the_model",
        {"training.sequence_length": 4097, "model.rope_type": "dynamic", "model.rope_factor": 2.0},
        "training.sequence_length: 4097 is longer than model.max_position_embeddings * model.rope_factor = 4096; "
        "use at most 4096, or raise model.max_position_embeddings",
        {"training.sequence_length": 4096, "model.rope_type": "dynamic", "model.rope_factor": 2.0},
    ),
    Case(
        "deepspeeds_schedule_is_there",
        {"optimizer.schedule": "deepspeed"},
        'optimizer.schedule: "deepspeed" needs a scheduler in DeepSpeed\'s JSON or in [deepspeed.scheduler]; '
        'add one, or use "cosine"',
        {"optimizer.schedule": "deepspeed", "deepspeed.scheduler.type": "WarmupLR"},
    ),
    Case(
        "decay_follows_the_warmup",
        {"optimizer.warmup_steps": 5, "optimizer.decay_steps": 5},
        "optimizer.decay_steps: 5 is not more than optimizer.warmup_steps = 5; use 6 or more",
        {"optimizer.decay_steps": 6},
    ),
    Case(
        "settings_are_read_by_the_optimizer",
        {"optimizer.momentum": 0.5},
        'optimizer.momentum: 0.5 has no effect with optimizer.name = "adamw"; '
        'delete it, or use optimizer.name "sgd" or "muon"',
        {"optimizer.name": "sgd"},
    ),
    Case(
        "settings_are_read_by_the_optimizer",
        {"optimizer.name": "sgd", "optimizer.betas": [0.9, 0.99]},
        'optimizer.betas: [0.9, 0.99] has no effect with optimizer.name = "sgd"; '
        'delete it, or use optimizer.name "adamw", "lion" or "muon"',
        {"optimizer.name": "lion"},
    ),
    Case(
        "patterns_choose_whole_parameters",
        {"optimizer.groups": [{"pattern": "*.up_proj.*"}]},
        'optimizer.groups: "*.up_proj.*" matches model.layers.0.mlp.up_proj.weight and not '
        "model.layers.0.mlp.gate_proj.weight, which are one parameter (model.layers.0.mlp.gate_up_proj.weight); "
        "match whole parameters by the names of llama's files (megalite convert families)",
        {"optimizer.groups": [{"pattern": "*.mlp.*"}]},
    ),
    Case(
        "patterns_choose_whole_parameters",
        {"optimizer.groups": [{"pattern": "*.layernorm.*"}]},
        'optimizer.groups: "*.layernorm.*" matches no parameter; '
        "match whole parameters by the names of llama's files (megalite convert families)",
        {"optimizer.groups": [{"pattern": "*norm*"}]},
    ),
    Case(
        "zero_finds_every_group_on_every_stage",
        {
            "optimizer.groups": [{"pattern": "model.embed_tokens.weight"}],
            "parallel.pipeline": 2,
            "deepspeed.zero_optimization.stage": 1,
        },
        'optimizer.groups: parameters that match "model.embed_tokens.weight" are not on each '
        "of the 2 stages, but DeepSpeed needs every group on every stage; choose patterns that "
        'match on every stage, such as "*norm*", or delete [deepspeed]',
        {"optimizer.groups": [{"pattern": "*norm*"}]},
    ),
    Case(
        "values_are_clipped_without_zero",
        {"optimizer.clip_value": 0.5, "deepspeed.zero_optimization.stage": 1},
        "optimizer.clip_value: 0.5 is not supported with ZeRO 1: DeepSpeed clips in its own step, and only by norm; "
        "use 0, and optimizer.gradient_clipping instead",
        {"optimizer.clip_value": 0.0},
    ),
    Case(
        "ema_works_without_zero_3",
        {"optimizer.ema_decay": 0.5, "deepspeed.zero_optimization.stage": 3},
        "optimizer.ema_decay: 0.5 is not supported with ZeRO 3: no rank holds the updated "
        "weights to average; use 0, or deepspeed.zero_optimization.stage 1 or 2",
        {"deepspeed.zero_optimization.stage": 2},
    ),
    Case(
        "the_stable_rate_follows_the_warmup",
        {"optimizer.schedule": "wsd", "optimizer.warmup_steps": 6, "optimizer.decay_fraction": 0.5},
        "optimizer.decay_fraction: 0.5 of 10 steps begins the decay after step 5, before the "
        "end of optimizer.warmup_steps = 6; use at most 0.4, or optimizer.warmup_steps 5",
        {"optimizer.decay_fraction": 0.4},
    ),
    Case(
        "the_loss_scale_starts_above_its_minimum",
        {"training.initial_loss_scale_power": 3, "training.minimum_loss_scale": 9},
        "training.minimum_loss_scale: 9 is more than 2 ** training.initial_loss_scale_power 3 = 8; use at most 8",
        {"training.minimum_loss_scale": 8},
    ),
    Case(
        "tokenizer_is_given_once",
        {"tokenizer.path": "tokenizer"},
        "tokenizer.vocab_size: 300 trains a new tokenizer, but tokenizer.path names an existing one; "
        "set only one of them",
        {"tokenizer.vocab_size": REMOVED},
    ),
    Case(
        "model_holds_every_token",
        {"model.vocab_size": 299},
        'model.vocab_size: 299 is less than tokenizer.vocab_size = 300; use 300 or more, or "auto"',
        {"model.vocab_size": "auto"},
    ),
    Case(
        "text_is_given_once",
        {"data.source": REMOVED},
        "data.source: is required; name a text file, or several texts with weights in [[data.blend]]",
        {"data.source": "stdlib"},
    ),
    Case(
        "text_is_given_once",
        {"data.blend": [{"source": "a", "weight": 1.0}]},
        "data.source: is set together with [[data.blend]]; move its text into [[data.blend]], or delete the blend",
        {"data.source": REMOVED},
    ),
    Case(
        "text_is_given_once",
        {"data.source": REMOVED, "data.blend": []},
        "data.blend: is empty; add a [[data.blend]] table with source and weight",
        {"data.blend": [{"source": "a", "weight": 1}]},
    ),
    Case(
        "blend_weights_are_positive",
        {
            "data.source": REMOVED,
            "data.blend": [{"source": "a", "weight": 1}, {"source": "b", "weight": 0.0}],
        },
        "data.blend[2].weight: 0 is not greater than 0; use a positive weight, or delete this table",
        {"data.blend": [{"source": "a", "weight": 1}]},
    ),
    Case(
        "blend_weights_are_positive",
        {
            "data.source": REMOVED,
            "data.blend": [{"source": "a", "weight": -0.5}, {"source": "b", "weight": 1}],
        },
        "data.blend[1].weight: -0.5 is not greater than 0; use a positive weight, or delete this table",
        {"data.blend": [{"source": "a", "weight": 0.5}, {"source": "b", "weight": 1}]},
    ),
    Case(
        "blend_names_each_set_once",
        {"data.source": REMOVED, "data.blend": [{"source": "a", "weight": 1}, {"source": "a", "weight": 2}]},
        'data.blend[2].source: "a" is also the source of data.blend[1]; name it once, with the sum of the weights',
        {"data.blend": [{"source": "a", "weight": 3}]},
    ),
    Case(
        "split_shares_add_up",
        {"data.split": [0.9, 0.2]},
        "data.split: [0.9, 0.2] adds up to 1.1, not 1; write for example [0.98, 0.01, 0.01] for "
        "training, validation and test",
        {"data.split": [0.98, 0.01, 0.01]},
    ),
    Case(
        "split_shares_add_up",
        {"data.split": [0, 1]},
        "data.split: [0, 1] has no share for training; write for example [0.98, 0.01, 0.01] for "
        "training, validation and test",
        {"data.split": [0.9, 0.1]},
    ),
    Case(
        "split_shares_add_up",
        {"data.split": [1.2, -0.2]},
        "data.split: [1.2, -0.2] has a share below 0; write for example [0.98, 0.01, 0.01] for "
        "training, validation and test",
        {"data.split": [0.9, 0, 0.1]},
    ),
    Case(
        "split_shares_add_up",
        {"data.split": [0.4, 0.3, 0.2, 0.1]},
        "data.split: [0.4, 0.3, 0.2, 0.1] has 4 shares, not 2 or 3; write for example [0.98, 0.01, 0.01] for "
        "training, validation and test",
        {"data.split": REMOVED},
    ),
    Case(
        "validation_is_other_text",
        {"data.validation": "stdlib"},
        'data.validation: "stdlib" is also the training text; name other text, or set data.split instead',
        {"data.validation": "held-out.txt"},
    ),
    Case(
        "validation_is_other_text",
        {"data.validation": "held-out.txt", "data.split": [0.9, 0.1]},
        "data.split: 0.1 of the documents are for validation, but data.validation is set too; set only one of them, "
        "or the second share to 0",
        {"data.split": [0.9, 0.0, 0.1]},
    ),
    Case(
        "every_loader_worker_has_a_step",
        {"data.loader_workers": 3},
        "data.loader_workers: 3 threads are more than the data.prefetch = 2 steps that are read "
        "ahead; use at most 2, "
        "or data.prefetch 3 or more",
        {"data.loader_workers": 3, "data.prefetch": 3},
    ),
]


@exhibit(
    "Megatron-LM PR#5530",
    subject="gradients",
    there="a rank without any trained gradient broke the clipping of all",
    here="adapter targets that leave a stage of the pipeline without an adapter are refused",
    fault=without_rule("every_stage_trains_something"),
    case="adapter.targets: adapts no linear of stage 1 of pa",
)
@exhibit(
    "DeepSpeed#823",
    also=("DeepSpeed#568", "DeepSpeed#1629", "gpt-neox#62"),
    subject="settings",
    there="ZeRO 2 or 3 with pipeline stages failed somewhere in the engine",
    here="it is refused before the start, with the reason and the nearest stage",
    fault=without_rule("zero_fits_the_pipeline"),
    case="deepspeed.zero_optimization.stage: 2 (run.toml) re",
)
@exhibit(
    "DeepSpeed#6914",
    also=("DeepSpeed#17", "LlamaFactory#2574"),
    subject="settings",
    there="batch sizes that contradict each other ended in an assertion without their origins",
    here="the equation is shown with the origin of each number and the nearest values that fit",
    fault=faults.CONTRADICTIONS_HAVE_NO_ORIGIN,
    case="training.global_batch_size: 8 (run.toml) is not mi",
)
@exhibit(
    "DeepSpeed#8279",
    also=("DeepSpeed PR#8280",),
    subject="gradients",
    there="ZeRO 1 and 2 crashed where a rank has a parameter without elements",
    here="a layout that would leave a tensor rank without rows is refused, with the largest that does not",
    fault=without_rule("tensor_fits_vocabulary"),
    case="parallel.tensor: 4 ranks cannot share model.vocab_",
)
@exhibit(
    "unsloth PR#9331",
    subject="adapters",
    there="adapter targets that name `embed_tokens` or `lm_head` were left out without a word",
    here="a target that is no linear of a layer is named, with those that are",
    fault=without_rule("adapter_patterns_name_modules"),
    case='adapter.targets: "c_attn" names no linear of a lay',
)
@exhibit(
    "transformers#45127",
    also=("peft#2777", "peft#2018"),
    subject="adapters",
    there="an adapter trained a copy of a tied head; the merged folder was tied again when it was loaded",
    here="`adapter.modules_to_save` with the head of a tied model is refused before training",
    fault=without_rule("adapter_patterns_name_modules"),
    case='adapter.modules_to_save: "lm_head" is the embeddin',
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.said[:50])
def test_a_broken_rule_is_said_once_and_its_remedy_cures(case: Case, tmp_path: Path) -> None:
    found = problems(tmp_path, case.changes, world_size=case.world_size)
    assert case.said in map(str, found)
    assert sorted(problem.key for problem in found) == sorted([case.said.split(":")[0], *case.also])
    load(tmp_path, case.changes | case.cure, world_size=case.cured_world_size)


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_case_needs_its_rule(rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule its cases would pass or say less: no other rule does its work."""
    monkeypatch.setattr("megalite.config.rules.every.RULES", [each for each in RULES if each is not rule])
    for case in CASES:
        if case.rule == rule.__name__:
            try:
                said = [
                    str(problem) for problem in problems(tmp_path, case.changes, world_size=case.world_size)
                ]
            except (BatchProblem, Unknown):  # for lack of the rule it comes up later, uncaught
                continue
            assert case.said not in said


def test_rules_that_need_a_wrong_value_are_silent_and_the_others_speak(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        {"model.num_attention_heads": "eight", "parallel.tensor": 3, "optimizer.momentum": 0.5},
    )
    assert [problem.key for problem in found] == ["model.num_attention_heads", "optimizer.momentum"]


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 2**31 - 1])
def test_divisors(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % each == 0 for each in found)
    if number < 100:
        assert len(found) == sum(number % each == 0 for each in range(1, number + 1))


@pytest.mark.parametrize(
    ("name", "given", "momentum", "noted"),
    [
        ("muon", {}, 0.95, False),
        ("muon", {"optimizer.momentum": 0.0}, 0.0, True),
        ("sgd", {}, 0.0, False),
        ("adamw", {}, 0.0, False),
    ],
)
def test_each_optimizer_has_its_momentum(
    tmp_path: Path, name: str, given: dict[str, float], momentum: float, noted: bool
) -> None:
    loaded = load(tmp_path, {"optimizer.name": name, **given})
    assert loaded.config.optimizer.momentum == loaded.config.optimizer.momentum_or_default == momentum
    assert any("without momentum" in note for note in loaded.notes) == noted


@pytest.mark.parametrize(("changes", "method"), [({}, "ring"), ({"adapter.kind": "prefix"}, "gather")])
def test_auto_is_no_ring_for_a_prefix(tmp_path: Path, changes: dict[str, Any], method: str) -> None:
    """16 ranks would gather more keys and values than a layer keeps, but the ring has no place for a prefix."""
    long = {"parallel.context": 16, "training.sequence_length": 32, "model.num_key_value_heads": 8}
    weights = {"model.weights": str(Path(__file__).parent / "small_llama")} if changes else {}
    config = load(tmp_path, {**long, **weights, **changes}, world_size=16).config
    assert config.parallel.context_method == method
