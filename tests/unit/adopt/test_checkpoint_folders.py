"""`megalite adopt` of a checkpoint folder: the arguments that it carries become a run file, and no code is run."""

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.cli import main
from megalite.config.load import load_run
from megalite.convert.adopt.account import Account, Outcome
from megalite.errors import CheckpointError, ConfigError, MegaliteError
from megalite.topology.parameters import canonical_tensors
from tests.support.engine_folders import EngineFolder, random_states
from tests.support.megatron_sharded import write_sharded
from tests.support.megatron_writer import Written, arguments_of, write_megatron
from tests.support.neox_pipeline import HIDDEN, LAYERS, PADDED, Toy, write_configs
from tests.support.tiny import tiny_shape
from tests.support.tiny_run import VOCABULARY, write_token_files
from tests.unit.adopt.adopted import LLAMA, account_of, answer, refused

DEFAULTS: dict[str, Any] = json.loads(
    Path(__file__).with_name("megatron_lm_0.12.0_defaults.json").read_text(encoding="utf-8")
)
"""dest of argparse -> default, of all arguments of Megatron-LM core 0.12.0."""
SHAPE = tiny_shape(layers=2)
STEPS = 1002
COUNTED = {
    "world_size": 1,
    "rank": 0,
    "data_parallel_size": 1,
    "consumed_train_samples": 56,
    "iteration": 1000,
}
TRAINING = {
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "train_iters": STEPS,
    "lr_decay_iters": STEPS,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "seq_length": 12,
    "encoder_seq_length": 12,
    "encoder_num_layers": 2,
    "data_path": ["train"],
    "split": "1",
    "eval_iters": 0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "adam_beta2": 0.95,
    "save": "theirs",
    "load": "theirs",
    "start_weight_decay": 0.01,
    "end_weight_decay": 0.01,
    "main_grads_dtype": torch.float32,
    **COUNTED,
}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def megatron_arguments(**changes: Any) -> dict[str, Any]:
    """All arguments of a small Llama's training, with the defaults of those that no script sets."""
    model = vars(arguments_of(SHAPE, Written(padded=104)))
    return {**DEFAULTS, **model, **TRAINING, "vocab_size": VOCABULARY, **changes}


def megatron_folder(**changes: Any) -> Path:
    shape = tiny_shape(layers=2)
    weights = {name: torch.zeros(size) for name, size in canonical_tensors(shape).items()}
    return write_megatron(
        Path("theirs"), shape, weights, Written(padded=104), **megatron_arguments(**changes)
    )


def test_args_of_megatron_lm_become_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    folder = megatron_folder()
    assert main(["adopt", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 120, "arguments at their defaults are counted, not listed"
    assert "  megalite convert import theirs runs/theirs" in lines
    run = load_run("run.toml", places=False).config
    assert (run.optimizer.learning_rate, run.optimizer.betas, run.optimizer.minimum_ratio) == (
        1e-3,
        (0.9, 0.95),
        0.1,
    )
    assert (run.training.steps, run.training.global_batch_size, run.training.sequence_length) == (
        STEPS,
        2,
        12,
    )
    assert (run.model.hidden_size, run.model.vocab_size) == (SHAPE.hidden_size, VOCABULARY)
    assert (run.run.folder, run.checkpoint.resume, run.data.order) == ("runs/theirs", "auto", "megatron")


def test_an_adopted_folder_is_not_the_run_folder() -> None:
    Path("runs").mkdir()
    account = account_of(megatron_folder().rename("runs/theirs"))
    assert account.settings["run.folder"] == "runs/theirs-megalite"
    assert account.continues[0] == "megalite convert import runs/theirs runs/theirs-megalite"


def test_every_argument_is_accounted_for() -> None:
    arguments = megatron_arguments(train_iters=None, train_samples=8000, bf16=True, num_experts=8, ours=3)
    folder = megatron_folder(**arguments)
    account = account_of(folder)
    assert refused(account) == {"ours"} and account.settings["model.num_experts"] == 8
    assert account.settings["training.steps"] == 4000
    assert str(len(arguments)) in account.script[0]
    counted = sum(int(each.key.split()[0]) if " arguments (" in each.key else 1 for each in account.answers)
    # The vocabulary of the model and its rows are not among the answers.
    assert counted == len(arguments)


SWITCHES: list[tuple[str, Any, str, Any]] = [
    ("add_bias_linear", False, "model.mlp_bias", False),
    ("swiglu", True, "model.gated_mlp", True),
    ("use_distributed_optimizer", True, "deepspeed.zero_optimization.stage", 1),
    ("virtual_pipeline_model_parallel_size", 2, "parallel.virtual_stages", 2),
    ("weight_decay", 0.3, "optimizer.weight_decay", 0.3),
]


@pytest.mark.parametrize(("dest", "value", "setting", "ours"), SWITCHES)
def test_a_value_of_python_is_read_as_its_argument(dest: str, value: Any, setting: str, ours: Any) -> None:
    others: dict[str, Any] = {"pipeline_model_parallel_size": 2} if dest.startswith("virtual") else {}
    others |= {"start_weight_decay": None, "end_weight_decay": None}
    account = account_of(megatron_folder(**{**others, dest: value}))
    assert not refused(account)
    assert account.settings[setting] == ours


@pytest.mark.parametrize("value", [torch.bfloat16, "fp64"])
def test_another_dtype_of_the_moments_is_refused(value: object) -> None:
    account = account_of(megatron_folder(exp_avg_dtype=value))
    assert refused(account) == {"exp_avg_dtype"} and account.changes_numbers


def test_an_unknown_vocabulary_is_asked_for() -> None:
    account = account_of(megatron_folder(vocab_size=None))
    assert account.continues[0].endswith("--vocab-size N")
    assert "model.vocab_size" not in account.settings


@pytest.mark.extended
def test_a_torch_dist_run_goes_on_by_the_printed_commands(capsys: pytest.CaptureFixture[str]) -> None:
    write_token_files(Path())
    generator = torch.Generator().manual_seed(0)
    sizes = canonical_tensors(SHAPE)
    states = {
        key: {name: torch.rand(size, generator=generator) / 10 for name, size in sizes.items()}
        for key in ("weight", "exp_avg", "exp_avg_sq")
    }
    common = {
        name: value
        for name, value in megatron_arguments().items()
        if name not in ("consumed_train_samples", "lr")
    }
    write_sharded(Path("theirs"), SHAPE, states, "model space", **common)
    assert main(["adopt", "theirs"]) == 0
    commands = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  megalite ")
    ]
    for command in commands:
        assert main(["run.toml" if word == "RUN.toml" else word for word in command[1:]]) == 0
    steps = [json.loads(line) for line in Path("runs/theirs/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "loss" in step] == [STEPS - 1, STEPS]


def pipeline_folder(toy: Toy, arguments: Any) -> Path:
    """Write the files of a step that say what the run was; their weights are no whole model."""
    step = Path("theirs/global_step10")
    step.mkdir(parents=True)
    Path("theirs/latest").write_text(step.name)
    torch.save({"word_embeddings.weight": torch.zeros(PADDED, HIDDEN)}, step / "layer_00-model_states.pt")
    for layer in range(LAYERS):
        norm = {"input_layernorm.weight": torch.zeros(HIDDEN)}
        torch.save(norm, step / f"layer_{layer + 2:02d}-model_states.pt")
    engine = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.5,
        "elasticity": {},
    }
    torch.save({"args": arguments, "ds_config": engine, "module": None}, step / "mp_rank_00_model_states.pt")
    write_configs(toy, step)
    return Path("theirs")


def test_a_folder_of_gpt_neox_is_read_from_its_configs() -> None:
    toy = Toy()
    folder = pipeline_folder(toy, toy.arguments)
    run = {
        "train_micro_batch_size_per_gpu": 2,
        "train_iters": 50,
        "optimizer": {"params": {"lr": 3e-4}},
        "load": "old",
    }
    (folder / "global_step10/configs/run.yml").write_text(json.dumps(run))
    account = account_of(folder)
    settings = account.settings
    assert account.system == "GPT-NeoX" and not refused(account)
    assert (settings["training.steps"], settings["optimizer.learning_rate"]) == (50, 3e-4)
    assert (settings["model.num_hidden_layers"], settings["model.vocab_size"]) == (LAYERS, PADDED)
    assert (settings["data.source"], settings["run.folder"]) == ("text", "runs/theirs")


def test_a_folder_of_megatron_deepspeed_has_args_and_the_json_of_deepspeed() -> None:
    toy = Toy(program="megatron", rotary=1.0, biases=False, rms=True, gated=True)
    arguments = Namespace(
        **{**TRAINING, **vars(toy.arguments), "deepspeed": True, "zero_stage": 2.0, "clip_grad": 0.5}
    )
    arguments.start_weight_decay = arguments.end_weight_decay = None
    account = account_of(pipeline_folder(toy, arguments))
    settings = account.settings
    assert account.system == "Megatron-DeepSpeed" and not refused(account)
    assert settings["optimizer.gradient_clipping"] == 0.5
    assert settings["deepspeed.zero_optimization.stage"] == 1
    assert answer(account, "ds_config: train_batch_size").outcome is Outcome.TAKEN
    assert (settings["model.norm"], settings["model.rope_theta"]) == ("rms_norm", 10000.0)


def test_a_folder_of_gpt_neox_without_its_configs_says_what_is_missing() -> None:
    toy = Toy()
    folder = pipeline_folder(toy, toy.arguments)
    for path in (folder / "global_step10" / "configs").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="has no files of GPT-NeoX; put the"):
        account_of(folder)


def test_a_folder_of_deepspeeds_engine_has_its_json_alone() -> None:
    engine = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    EngineFolder(random_states(SHAPE), model={"ds_config": engine}).write(Path("theirs"))
    account = account_of(Path("theirs"))
    assert (account.system, refused(account)) == ("DeepSpeed", {"model", "data"})
    assert account.continues[0].endswith("--hf-config FOLDER")
    assert account.settings["training.micro_batch_size"] == 4
    assert account.settings["training.precision"] == "bf16"
    assert account.settings["deepspeed.zero_optimization.stage"] == 2
    Path("theirs/config.json").write_text(LLAMA)
    account = account_of(Path("theirs"))
    assert refused(account) == {"data"}
    assert account.settings["model.hf_config"] == str(Path("theirs").resolve())


def trainer_folder(arguments: object) -> Path:
    step = Path("theirs/checkpoint-40")
    step.mkdir(parents=True)
    torch.save(arguments, step / "training_args.bin")
    state = {"global_step": 40, "max_steps": 120, "num_train_epochs": 3, "train_batch_size": 4}
    (step / "trainer_state.json").write_text(json.dumps(state))
    (step / "config.json").write_text(LLAMA)
    for rank in range(2):
        (step / f"rng_state_{rank}.pth").touch()
    return Path("theirs")


@pytest.mark.extended
def test_a_folder_of_trainer_has_its_training_arguments() -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir="out",
        learning_rate=2e-4,
        per_device_train_batch_size=4,
        lr_scheduler_type="cosine",
        use_cpu=False,
    )
    account = account_of(trainer_folder(arguments))
    settings = account.settings
    assert account.system == "Hugging Face Trainer"
    assert refused(account) == {"train_dataset", "max_length"}, "a Trainer takes its data in Python"
    # The epochs of its run were 120 steps.
    assert (settings["training.steps"], "training.epochs" in settings) == (120, False)
    assert (settings["optimizer.learning_rate"], settings["optimizer.schedule"]) == (2e-4, "cosine")
    assert (settings["training.micro_batch_size"], settings["parallel.data"]) == (4, 2)
    assert settings["model.hf_config"] == "theirs/checkpoint-40"
    assert (settings["run.folder"], account.continues[0].split()[-1]) == ("runs/theirs", "runs/theirs")


class Runs:
    """Calls a function when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch trace",)


def laughs() -> list[Any]:
    """Return 2 to the power of 40 values in a small file."""
    values: list[Any] = [1]
    for _ in range(40):
        values = [values, values]
    return values


def itself() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


HOSTILE: dict[str, tuple[Callable[[], object], type[MegaliteError], str]] = {
    "a call of os.system": (
        lambda: megatron_folder(data_path=Runs()),
        CheckpointError,
        "asks for posix.system",
    ),
    "a call of os.system in Trainer's": (
        lambda: trainer_folder(Runs()),
        CheckpointError,
        "asks for posix.system",
    ),
    "a list of 2^40 values": (
        lambda: megatron_folder(data_path=laughs()),
        CheckpointError,
        "longer than any",
    ),
    "a list in itself": (lambda: megatron_folder(data_path=itself()), CheckpointError, "longer than any"),
    "a text of a megabyte": (
        lambda: megatron_folder(save="x" * (1 << 20)),
        CheckpointError,
        "longer than any",
    ),
    "no arguments": (lambda: trainer_folder({"lr": 1}), CheckpointError, "holds no arguments"),
    "a folder of no program": (lambda: Path("theirs").mkdir(), ConfigError, "is no checkpoint folder of"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_one_error_and_nothing_is_run_or_written(case: str) -> None:
    write, error, message = HOSTILE[case]
    write()
    with pytest.raises(error, match=message):
        account_of(Path("theirs"))
    assert main(["adopt", "theirs"]) > 0
    assert sorted(path.name for path in Path().iterdir()) == ["theirs"]


def test_a_folder_is_adopted_alone() -> None:
    folder = megatron_folder()
    Path("ds_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a folder, which is adopted alone"):
        account_of(folder, Path("ds_config.json"))


def test_keys_without_effect_share_a_line_for_each_reason() -> None:
    account: Account = account_of(megatron_folder())
    idle = account.with_outcome(Outcome.NO_EFFECT)
    assert len({each.reason for each in idle}) == len(idle)
