"""Launch scripts of Megatron-LM and Megatron-DeepSpeed become run files; every argument has an answer.

The scripts are written from the facts of public ones; the expected numbers are computed by hand.
"""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from megalite.convert.adopt.account import Account, Outcome
from megalite.convert.adopt.report import account_lines, nested
from megalite.convert.adopt.systems import adopt

SCRIPTS = Path(__file__).parent / "scripts"
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")

# Script -> settings that it must have. Numbers by hand: samples / batch, tokens / (batch * length), rate / peak.
TAKEN: dict[str, dict[str, Any]] = {
    "gpt3_175b": {
        "model.num_hidden_layers": 96,
        "model.intermediate_size": 49152,
        "model.position_embedding": "learned",
        "model.norm": "layer_norm",
        "model.hidden_act": "gelu_pytorch_tanh",
        "model.tie_word_embeddings": True,
        "model.attention_dropout": 0.1,
        "model.residual_dropout": 0.1,
        "parallel.tensor": 8,
        "parallel.pipeline": 16,
        "parallel.data": 1,
        "training.precision": "fp16",
        "training.initial_loss_scale_power": 32,
        "training.loss_scale_hysteresis": 2,
        "optimizer.warmup_steps": 430,
        "optimizer.decay_steps": 430000,
        "optimizer.minimum_ratio": 0.1,
        "validation.samples": 15360,
        "data.split": [949.0, 50.0, 1.0],
        "data.order": "megatron",
    },
    "llama3_8b": {
        "model.family": "llama",
        "model.num_key_value_heads": 8,
        "model.rope_theta": 500000.0,
        "model.rms_norm_eps": 1e-05,
        "model.gated_mlp": True,
        "model.attention_bias": False,
        "model.attention_dropout": 0.0,
        "parallel.tensor": 2,
        "parallel.sequence": True,
        "parallel.data": 4,
        "training.precision": "bf16",
        "training.steps": 15258789,
        "training.stop_after": "235m",
        "optimizer.decay_steps": 15228272,
        "optimizer.warmup_steps": 30518,
        "optimizer.minimum_ratio": 0.066666666667,
        "deepspeed.zero_optimization.stage": 1,
        "data.split": [99.0, 1.0, 0.0],
        "tokenizer.path": "llama3",
        "run.folder": "runs/llama3_8b",
    },
    "qwen3_8b": {
        "model.qk_norm": "head",
        "model.head_dim": 128,
        "model.rms_norm_eps": 1e-06,
        "data.blend": [{"source": "wiki", "weight": 0.3}, {"source": "code", "weight": 0.7}],
        "data.document_mask": True,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.schedule": "wsd",
        "optimizer.decay_shape": "sqrt",
        "optimizer.decay_fraction": 0.2,
        "optimizer.minimum_ratio": 0.1,
        "optimizer.warmup_steps": 0,
        "training.recompute": "selective",
        "training.sequence_length": 32768,
    },
    "mixtral_8x7b": {
        "model.family": "mixtral",
        "model.num_experts": 8,
        "model.num_experts_per_tok": 2,
        "model.moe_intermediate_size": 14336,
        "model.norm_topk_prob": True,
        "training.router_balance": 0.01,
        "parallel.expert": 8,
        "parallel.data": 8,
        "optimizer.betas": [0.9, 0.999],
    },
    "ds_gpt_1.3b": {
        "training.steps": 300000,
        "optimizer.warmup_steps": 3000,
        "optimizer.decay_steps": 300000,
        "optimizer.minimum_ratio": 0.005,
        "parallel.data": 8,
        "parallel.pipeline": 1,
        "training.initial_loss_scale_power": 11,
        "training.loss_scale_window": 500,
        "training.recompute": "full",
        "deepspeed.zero_optimization.stage": 1,
        "optimizer.betas": [0.9, 0.95],
    },
    "ds_gpt_13b": {
        "parallel.tensor": 4,
        "parallel.pipeline": 4,
        "parallel.data": 2,
        "training.global_batch_size": 1024,
        "training.accumulation": "fp32",
        "model.initializer_range": 0.008,
        "optimizer.warmup_steps": 375,
        "data.split": [969.0, 30.0, 1.0],
        "validation.every": 1000,
        "validation.samples": 102400,
    },
    "ds_llama2": {
        "model.num_key_value_heads": 4,
        "model.norm": "rms_norm",
        "model.position_embedding": "rope",
        "model.intermediate_size": 5504,
        "parallel.data": 2,
        "optimizer.learning_rate": 0.0003,
        "optimizer.gradient_clipping": 1.0,
        "data.source": "text",
    },
    "sc21_interleaved": {
        "model.num_hidden_layers": 40,
        "model.hidden_size": 6144,
        "parallel.schedule": "interleaved_1f1b",
        "parallel.virtual_stages": 4,
        "parallel.data": 2,
        "training.steps": 80,
        "training.recompute": "full",
        "training.recompute_layers": 2,
        "training.accumulation": "fp32",
    },
}
# Script -> arguments that are refused and change the numbers, and settings that it has with --partial.
REFUSED: dict[str, tuple[set[str], dict[str, Any]]] = {
    "gpt3_175b_rampup": ({"--rampup-batch-size"}, {"training.steps": 95367, "training.recompute": "full"}),
    "llama3_8b_fp8": ({"--decoupled-lr", "--fp8-format", "--mock-data", "--tokenizer-type"}, {}),
    "llama2_7b_finetune": ({"--load"}, {"optimizer.schedule": "constant", "optimizer.weight_decay": 0.01}),
    "bert_340m": ({"pretrain_bert.py"}, {"optimizer.schedule": "linear"}),
    "bigscience_13b": (
        {"--rampup-batch-size"},
        {
            "training.steps": 292968,
            "optimizer.warmup_steps": 212,
            "optimizer.decay_steps": 123978,
            "parallel.data": 8,
            "training.initial_loss_scale_power": 12,
            "deepspeed.zero_optimization.stage": 1,
        },
    ),
}
# Arguments in branches that are not read.
SKIPPED = {
    "llama3_8b": {"--fp8-format", "--fp8-amax-history-len"},
    "mixtral_8x7b": {"--wandb-project"},
    "ds_llama2": {"--deepspeed-activation-checkpointing"},
}
VARIABLES = {
    "gpt3_175b": {"1": "runs/gpt3", "2": "text", "3": "gpt2"},
    "mixtral_8x7b": {"SLURM_NNODES": "4"},
}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts, and the files that they name."""
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    for name in ("text.idx", "wiki.idx", "code.idx", "tokenizer.model", "llama/tokenizer.model"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for folder in ("gpt2", "llama3", "Qwen"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(name: str) -> Account:
    paths = [Path(f"{name}.sh"), *([Path("hostfile")] if name == "ds_gpt_13b" else [])]
    return adopt(paths, VARIABLES.get(name))


def run_adopt(name: str, *more: str) -> int:
    values = [f"{key}={value}" for key, value in VARIABLES.get(name, {}).items()]
    options = [word for value in values for word in ("--set", value)]
    paths = [f"{name}.sh", *(["hostfile"] if name == "ds_gpt_13b" else [])]
    return main(["adopt", *paths, *options, *more])


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.sh")))
def test_every_argument_has_an_answer(name: str, there: Path) -> None:
    lines = [
        line.split("#")[0] if not line.startswith("#SBATCH") else line for line in _text(name).splitlines()
    ]
    flags = set(FLAG.findall("\n".join(lines))) - SKIPPED.get(name, set()) - {"--jobid"}
    answered = {word for answer in read(name).answers for word in answer.key.split()}
    assert flags and flags <= answered, flags - answered
    unread = SKIPPED.get(name, set()) & answered
    assert not unread


@pytest.mark.parametrize("name", TAKEN)
def test_a_script_becomes_a_run_file_that_config_show_accepts(
    name: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_adopt(name) == 0, capsys.readouterr()
    _has(tomllib.loads(Path("run.toml").read_text()), TAKEN[name])
    assert main(["config", "show", "run.toml"]) == 0
    assert not [answer for answer in read(name).with_outcome(Outcome.REFUSED) if answer.numbers]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments_are_listed_and_end_with_2(
    name: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, settings = REFUSED[name]
    assert run_adopt(name) == 2
    shown = capsys.readouterr()
    assert not Path("run.toml").exists() and "add --partial" in shown.err
    account = read(name)
    assert {answer.key for answer in account.with_outcome(Outcome.REFUSED) if answer.numbers} == refused
    assert all(answer.reason and answer.remedy for answer in account.with_outcome(Outcome.REFUSED))
    _has(nested(account.settings), settings)
    lacks_text = "--mock-data" in refused
    assert run_adopt(name, "--partial") == 0
    text = Path("run.toml").read_text()
    assert all(f"# refused: {key}" in text for key in refused)
    if not lacks_text:
        assert main(["config", "show", "run.toml"]) == 0


def test_an_encoder_and_decoder_is_refused(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_adopt("t5_220m") == 2
    assert "pretrain_t5.py: trains another kind of model" in capsys.readouterr().out
    assert {"--encoder-num-layers", "--decoder-num-layers"} <= {
        answer.key for answer in read("t5_220m").with_outcome(Outcome.REFUSED)
    }


def test_values_of_a_run_are_asked_for(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adopt", "gpt3_175b.sh"]) == 2
    shown = capsys.readouterr().out
    assert "--data-path $2: its value $2 is known only when the script runs; add --set 2=VALUE" in shown
    assert "--save $1: known only in a run: set run.folder" in shown


def test_silent_defaults_are_said(there: Path) -> None:
    shown = "\n".join(account_lines(read("mixtral_8x7b")))
    for text in (
        "optimizer.betas = [0.9, 0.999]",
        "(0 in the first step)",
        "the mean over all tokens of the global batch",
        "norms and biases have none",
        "its softmax includes the padding rows",
        "those of megatron-core's GPTDataset in its order",
        "initial values have the same distribution",
    ):
        assert text in shown, text
    silent = {default.setting for default in read("bert_340m").silent}
    assert {"model.attention_dropout", "training.initial_loss_scale_power", "optimizer.betas"} <= silent


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ("--optimizer sgd", "momentum", 0.9),
        ("--optimizer sgd --sgd-momentum 0.5", "momentum", 0.5),
        ("--optimizer lion", "betas", [0.95, 0.98]),
        ("--optimizer lion --lion-beta2 0.9", "betas", [0.95, 0.9]),
        ("--optimizer adam --adam-beta2 0.95", "betas", [0.9, 0.95]),
        ("--clip-grad 0.5", "gradient_clipping", 0.5),
        ("--clip-grad 0.5 --deepspeed", "gradient_clipping", 1.0),
    ],
)
def test_an_optimizer_has_the_numbers_of_megatron_lm(
    words: str, setting: str, value: Any, there: Path
) -> None:
    Path("small.sh").write_text(f"python pretrain_gpt.py --num-layers 2 --lr 1e-4 {words}\n")
    assert read("small").settings[f"optimizer.{setting}"] == value


def test_a_batch_is_one_micro_batch_of_each_replica_where_the_script_is_silent(there: Path) -> None:
    words = "--num-layers 2 --lr 1e-4 --micro-batch-size 2"
    Path("small.sh").write_text(f"python pretrain_gpt.py {words} --optimizer lion --adam-eps 1e-6\n")
    settings = read("small").settings
    assert settings["training.micro_batches"] == 1
    assert "optimizer.eps" not in settings
    Path("small.sh").write_text(f"python pretrain_gpt.py {words} --dataloader-type cyclic\n")
    assert "--dataloader-type" in {answer.key for answer in read("small").with_outcome(Outcome.REFUSED)}


@pytest.mark.parametrize("first", [True, False])
def test_wsd_is_read_in_any_order(first: bool, there: Path) -> None:
    style, parts = "--lr-decay-style WSD", "--lr-wsd-decay-style linear --lr-wsd-decay-iters 20"
    order = f"{style} {parts}" if first else f"{parts} {style}"
    Path("small.sh").write_text(
        f"python pretrain_gpt.py --num-layers 2 --lr 1e-4 --train-iters 100 {order}\n"
    )
    settings = read("small").settings
    assert (settings["optimizer.decay_shape"], settings["optimizer.decay_fraction"]) == ("linear", 0.2)


def test_a_json_that_contradicts_the_arguments_is_refused(there: Path) -> None:
    path = Path("ds_config.json")
    path.write_text(path.read_text().replace("1024", "512"))
    [answer] = read("ds_gpt_13b").with_outcome(Outcome.REFUSED)
    assert answer.key == "ds_config.json: train_batch_size" and answer.numbers
    assert "--global-batch-size says training.global_batch_size = 1024" in answer.reason
    path.unlink()
    [answer] = read("ds_gpt_13b").with_outcome(Outcome.REFUSED)
    assert answer.reason == "DeepSpeed's JSON is not here"


def test_the_keys_of_the_json_are_answered_one_by_one(there: Path) -> None:
    answers = {answer.key: answer for answer in read("ds_gpt_1.3b").answers}
    bucket = answers["ds_config_gbs512.json: zero_optimization.reduce_bucket_size"]
    assert bucket.settings == {"deepspeed.zero_optimization.reduce_bucket_size": 500000000}
    assert answers["ds_config_gbs512.json: fp16.initial_scale_power"].outcome is Outcome.TAKEN
    assert answers["ds_config_gbs512.json: prescale_gradients"].outcome is Outcome.NO_EFFECT


def test_a_template_of_the_json_is_filled_in_as_sed_does(there: Path) -> None:
    template = (
        Path("ds_config.json").read_text().replace("1024", "GBSIZE").replace('"stage": 1', '"stage": ZERO')
    )
    Path("TEMPLATE.json").write_text(template)
    Path("ds_config.json").unlink()
    call = 'GLOBAL=1024\nsed "s/GBSIZE/${GLOBAL}/" TEMPLATE.json | sed "s/ZERO/1/" > ds_config.json\n'
    Path("ds.sh").write_text(call + _text("ds_gpt_13b"))
    answers = {answer.key: answer for answer in adopt([Path("ds.sh"), Path("TEMPLATE.json")]).answers}
    assert answers["TEMPLATE.json: train_batch_size"].settings == {"training.global_batch_size": 1024}
    stage = answers["TEMPLATE.json: zero_optimization.stage"]
    assert stage.settings == {"deepspeed.zero_optimization.stage": 1}


def test_an_unknown_argument_is_refused_with_the_closest_one(there: Path) -> None:
    Path("typo.sh").write_text(
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-sise 64 --lr 1e-3 --lr 1e-4\n"
    )
    answers = {(answer.key, answer.value): answer for answer in adopt([Path("typo.sh")]).answers}
    assert answers["--hidden-sise", "64"].remedy == "did you mean hidden-size?"
    assert answers["--hidden-sise", "64"].numbers
    assert "again later" in answers["--lr", "1e-3"].reason
    assert answers["--lr", "1e-4"].settings == {"optimizer.learning_rate": 0.0001}


def test_the_lines_of_sbatch_say_the_ranks(there: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node 8\n#SBATCH -t 10:00\n"
    call = "srun python pretrain_gpt.py --num-layers 2 --hidden-size 64 --tensor-model-parallel-size $SLURM_NNODES\n"
    Path("batch.sh").write_text(head + call)
    account = adopt([Path("batch.sh")])
    assert account.ranks == 32 and account.launch == ["--hosts 4", "--slots 8"]
    assert account.settings["parallel.tensor"] == 4 and account.settings["parallel.data"] == 8
    assert "#SBATCH -t" in {answer.key for answer in account.answers}


def test_an_existing_run_file_is_kept(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("mine")
    assert run_adopt("ds_llama2") == 2
    assert "exists already" in capsys.readouterr().err and Path("run.toml").read_text() == "mine"
    assert run_adopt("ds_llama2", "--overwrite") == 0


def _text(name: str) -> str:
    return (SCRIPTS / f"{name}.sh").read_text()


def _has(tables: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        table: Any = tables
        for part in key.split("."):
            table = table[part]
        assert table == value, key
