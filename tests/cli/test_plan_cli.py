"""megalite plan: the plan that it prints and writes, and the errors of wrong input."""

import argparse
import json
import re
from pathlib import Path

import pytest

from megalite.cli import main
from megalite.cli.plan_cluster import take_cluster
from megalite.config.load import load_run
from megalite.errors import ConfigError
from megalite.planner.calibration import write_calibration
from megalite.planner.cluster import Cluster
from megalite.planner.parameter_count import ParameterCount
from megalite.planner.search import search
from megalite.topology.context import CONTEXT_METHODS
from tests.support.mixture_configs import CONFIGS, shape_of
from tests.unit.planner.calibrated import calibration

CARD = ["--card", "H100 80GB HBM3"]
SMALL = ["small", *CARD, "--cards-per-node", "4", "--sequence-length", "512", "--batch", "32"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Return what `megalite plan` prints with these arguments and this exit code."""
    assert main(["plan", *arguments]) == code
    output = capsys.readouterr()
    return output.err if code == 2 else output.out


def test_the_best_layout_comes_first_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, *SMALL, "--tokens", "1e9", "--price", "2")
    for words in (
        "parameters",
        "GFLOP a token",
        "assumed:",
        "best: ",
        "memory",
        "tokens/s",
        "MWh",
        "at 2 a card-hour",
    ):
        assert words in shown
    assert max(map(len, shown.splitlines())) < 200


def test_the_written_file_is_the_best_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "run.toml"
    report = json.loads(said(capsys, *SMALL, "--json"))
    said(capsys, *SMALL, "--write", str(written))
    config = load_run(written, world_size=4).config
    best = report["layouts"][0]["settings"]
    assert config.layout.world_size == 4
    assert (config.layout.tensor, config.layout.pipeline) == (
        best["parallel.tensor"],
        best["parallel.pipeline"],
    )
    assert config.batch.global_batch_size == 32 and config.training.sequence_length == 512
    assert "exists already" in said(capsys, *SMALL, "--write", str(written), code=2)


def test_a_run_file_is_planned_with_its_own_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, again = tmp_path / "run.toml", tmp_path / "again.toml"
    said(capsys, *SMALL, "--write", str(written))
    text = written.read_text().replace("[training]", '[training]\nprecision = "bf16"\nlabel_smoothing = 0.25')
    written.write_text(text)
    said(capsys, str(written), *CARD, "--cards-per-node", "4", "--write", str(again))
    before, after = (load_run(file, world_size=4).config for file in (written, again))
    assert after.training.label_smoothing == 0.25 and after.layout == before.layout


def test_the_written_layout_replaces_that_of_the_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, again = tmp_path / "run.toml", tmp_path / "again.toml"
    said(capsys, *SMALL, "--write", str(written))
    own = (
        written.read_text()
        .partition("[parallel]")[0]
        .replace("[training]", "[training]\nrecompute_layers = 1")
    )
    zero = '[deepspeed.zero_optimization]\nstage = 3\noffload_optimizer = { device = "cpu" }'
    written.write_text(
        f"{own}[parallel]\npipeline = 1\n{zero}\n".replace('recompute = "none"', 'recompute = "full"')
    )
    report = json.loads(
        said(capsys, str(written), *CARD, "--cards-per-node", "4", "--json", "--write", str(again))
    )
    best, config = report["layouts"][0], load_run(again, world_size=4).config
    assert config.zero_stage == best["settings"].get("deepspeed.zero_optimization.stage", 0)
    assert config.training.recompute_layers is None
    assert best["memory_bytes"]["host"] == 0 and "offload" not in again.read_text()


def test_options_that_a_run_file_decides_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    said(capsys, *SMALL, "--write", str(file))
    message = "--batch: has no effect with a run file, which is planned with its own training.global_batch_size; set"
    assert message in said(capsys, str(file), *CARD, "--batch", "8", code=2)


def test_a_config_json_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "llama", "vocab_size": 384, "max_position_embeddings": 256, **shape})
    )
    for model in (file, tmp_path):
        shown = said(capsys, str(model), *CARD, "--sequence-length", "256", "--batch", "8")
        assert "vocabulary 384" in shown and "best: " in shown


def test_what_fits_one_card(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "small", *CARD, "--fit").splitlines()
    none, selective, full = (line.split() for line in lines[-3:])
    sizes = [int(row[1].replace(",", "")) for row in (none, selective, full)]
    assert sizes == sorted(sizes) and sizes[0] > 1
    assert "plan with more cards" in said(capsys, "llama-3-70b", *CARD, "--fit")


def test_bands_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The bands of trainers' guides: 125M in 4 to 8 GB, 350M in 8 to 16, 1.3B in 16 to 32, 6B in 32 and more."""
    rows = {line.split()[0]: line.split() for line in said(capsys, "--table").splitlines() if "GiB" in line}
    gigabytes = {name: float(row[-2]) * 2**30 / 1e9 for name, row in rows.items() if name[0].isdigit()}
    assert 4 < gigabytes["125M"] < 8 < gigabytes["350M"] < 16 < gigabytes["1.3B"] < 32 < gigabytes["6.7B"]


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "llama-3-70b", "--card", "L4", "--cards-per-node", "1", code=1)
    assert "nothing fits: the smallest, " in shown and "use more cards" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smal", *CARD], 'MODEL: "smal" is no preset'),
        (CARD, "MODEL: is needed"),
        (["small"], "--card: is needed"),
        (["small", *CARD, "--write", "nowhere/run.toml"], "--write: nowhere is no folder"),
        (["{run}", *CARD], "MODEL: {run} is a folder; name its run file, {run}/run.toml"),
        (["small", "--card", "h100"], 'there is no card "h100"; use one of H100 80GB HBM3'),
    ],
)
def test_wrong_input(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").touch()
    words = [word.format(run=tmp_path) for word in arguments]
    assert message.format(run=tmp_path) in said(capsys, *words, code=2)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--tokens=nan", "'nan' is not a number above 0"),
        ("--price=-1", "'-1' is not a number above 0"),
        ("--network=0", "'0' is not a number above 0"),
        ("--efficiency=55", "'55' is not a number above 0, at most 1"),
        ("--link-efficiency=x", "'x' is not a number above 0, at most 1"),
    ],
)
def test_numbers_that_no_plan_has(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "small", *CARD, option])
    assert f"argument {option.partition('=')[0]}: {message};" in capsys.readouterr().err


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("node-a slots=4  # two\nnode-b slots=4\n")
    return file


def cluster_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, int, int]:
    report = json.loads(
        said(capsys, "small", "--sequence-length", "512", "--batch", "32", "--json", *arguments)
    )
    return tuple(report["cluster"][key] for key in ("card", "nodes", "cards_per_node"))


def test_a_hostfile_has_the_nodes_and_their_cards(hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster_of(capsys, *CARD, "--hostfile", str(hostfile)) == (CARD[1], 2, 4)
    hostfile.write_text("node-a slots=4\nnode-b slots=2\n")
    assert cluster_of(capsys, *CARD, "--hostfile", str(hostfile), "--cards-per-node", "2") == (CARD[1], 2, 2)


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (
            "node-a slots=4\nnode-b slots=2\n",
            (),
            "has 4 slots on node-a and 2 on node-b, and a plan is for equal nodes; use --cards-per-node 2, or leave",
        ),
        (
            "node-a slots=4\n",
            ("--cards-per-node", "8"),
            "--cards-per-node: 8 is more than the 4 slots of a host",
        ),
        ("node-a slots=4\n", ("--nodes", "2"), "--nodes: has no effect with --hostfile"),
        ("node-a\n", (), "'node-a' has no slots; write `node-a slots=N`"),
    ],
)
def test_a_hostfile_without_equal_nodes_is_refused(
    hostfile: Path, capsys: pytest.CaptureFixture[str], text: str, flags: tuple[str, ...], message: str
) -> None:
    hostfile.write_text(text)
    assert message in said(capsys, "small", *CARD, "--hostfile", str(hostfile), *flags, code=2)


def test_an_allocation_of_slurm_is_planned_unless_options_say_another_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allocation = {"JOB_ID": "7", "JOB_NODELIST": "gpu[1-3]", "JOB_NUM_NODES": "3", "GPUS_ON_NODE": "4"}
    for name, value in allocation.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("NTASKS", "NTASKS_PER_NODE", "TASKS_PER_NODE"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    assert cluster_of(capsys, *CARD) == (CARD[1], 3, 4)
    assert cluster_of(capsys, *CARD, "--nodes", "2") == (CARD[1], 2, 4)
    assert cluster_of(capsys, *CARD, "--nodes", "1", "--cards-per-node", "8") == (CARD[1], 1, 8)


def driver(folder: Path, *names: str) -> Path:
    """Write what NVIDIA's driver lists of cards with these names."""
    for number, name in enumerate(names):
        (folder / f"0000:0{number}:00.0").mkdir(parents=True)
        (folder / f"0000:0{number}:00.0" / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 18\n")
    return folder


@pytest.mark.parametrize(
    ("names", "card", "cards_per_node"),
    [
        (["NVIDIA L40S"] * 2, "NVIDIA L40S", 2),
        (["NVIDIA L40S", "NVIDIA L4"], None, 2),
        ([], None, 8),
    ],
)
def test_the_card_of_this_machine_needs_no_name(
    tmp_path: Path, names: list[str], card: str | None, cards_per_node: int
) -> None:
    options = argparse.Namespace(card=None, nodes=None, cards_per_node=None, hostfile=None)
    take_cluster(options, {}, driver(tmp_path / "gpus", *names))
    assert (options.card, options.nodes, options.cards_per_node) == (card, 1, cards_per_node)
    named = argparse.Namespace(card="H200", nodes=None, cards_per_node=None, hostfile=None)
    take_cluster(named, {}, tmp_path / "gpus")
    assert (named.card, named.cards_per_node) == ("H200", 8)


def mixture_file(folder: Path, **changes: object) -> str:
    """Write the config.json of a small mixture with latent attention."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1000,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
    }
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIGS["DeepSeek-V2-Lite"] | sizes | changes))
    return str(file)


def unknown_file(folder: Path) -> str:
    """Write the config.json of a mixture that is planned alone."""
    (folder / "config.json").write_text(json.dumps(CONFIGS["Phi-3.5-MoE"]))
    return str(folder)


def test_a_mixture_is_planned_with_its_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        mixture_file(tmp_path),
        *CARD,
        "--cards-per-node",
        "4",
        "--sequence-length",
        "512",
        "--batch",
        "32",
    ]
    shown = said(capsys, *small, "--expert", "4")
    shape = shape_of(json.loads((tmp_path / "config.json").read_text()))
    count = ParameterCount.of(shape)
    assert f"latent attention of 64, 8 experts, 2 of them a token: {count.total:,} parameters" in shown
    assert f"{count.active:,} of them active" in shown
    assert " x expert 4, micro batch" in shown and "of tokens sent by a card a layer and micro batch" in shown
    layout = json.loads(said(capsys, *small, "--expert", "4", "--json"))["layouts"][0]
    assert layout["settings"]["parallel.expert"] == 4 and layout["step_seconds"]["experts"] > 0
    assert "8 experts, 2 of them a token, bf16, adamw" in said(capsys, *small, "--fit")
    written = tmp_path / "run.toml"
    said(capsys, *small, "--write", str(written))
    flags = ["--data.source", "text.txt", "--tokenizer.vocab_size", "1000"]
    assert load_run(written, flags).config.shape(1000) == shape


def test_the_experts_of_a_run_are_laid_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    small = ["olmoe-1b-7b", *CARD, "--cards-per-node", "4", "--sequence-length", "1024", "--batch", "16"]
    said(capsys, *small, "--expert", "4", "--write", str(file))
    config = load_run(file, ["--data.source", "text", "--training.precision", "bf16"], 4).config
    assert config.layout.expert == 4
    found = search(config, 1000, Cluster(CARD[1], nodes=2, cards_per_node=2))
    planned = {
        (each.choice.tensor, each.choice.data, each.choice.sequence, each.choice.expert)
        for each in (*found.fitting, *found.too_large)
    }
    # All experts on each rank, or divided by a node, or by a stage; with sequence parallelism they are whole.
    assert {expert for tensor, data, _, expert in planned if (tensor, data) == (1, 4)} == {1, 2, 4}
    assert {expert for *sizes, expert in planned if sizes == [2, 2, True]} == {1, 2, 4}
    assert {expert for *sizes, expert in planned if sizes == [2, 2, False]} == {1, 2}


def test_sequences_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for method in CONTEXT_METHODS:
        shown = said(capsys, *SMALL, "--context", "2", "--context-method", method)
        assert f" x context 2 ({method}) x pipeline 1 x data" in shown
        assert "of keys and values sent by a card a layer and micro batch" in shown
    found = json.loads(said(capsys, *SMALL, "--context", "2", "--json"))["layouts"]
    assert {layout["settings"]["parallel.context"] for layout in found} == {2}
    [line] = re.findall("^  context .* s a step.*$", said(capsys, *SMALL, "--context", "2"), re.M)
    assert line.count(", by ") == 2, "the seconds of the other methods"
    assert "3 does not divide 4 cards" in said(capsys, *SMALL, "--context", "3", code=2)
    assert "divide experts, but the model has none" in said(capsys, *SMALL, "--expert", "2", code=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--context", "2", "--calibration", "none.json"],
            "--calibration: has no times of context parallelism",
        ),
        (["--expert-tensor", "2", *CARD, "--fit"], "--expert: has no effect on one card"),
        (["--context", "2", *CARD, "--fit"], "--context: has no effect on one card"),
    ],
)
def test_axes_that_are_planned_only_go_without_other_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(capsys, "small", *options, code=2)


def test_a_mixture_is_not_planned_by_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "megalite train does not know this model yet" in said(
        capsys, unknown_file(tmp_path), "--calibrate", code=2
    )


def test_a_mixture_that_is_trained_is_planned_and_written_as_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["OLMoE 1B-7B"] | sizes))
    written = tmp_path / "run.toml"
    arguments = [*CARD, "--cards-per-node", "2", "--sequence-length", "512", "--batch", "8"]
    shown = said(capsys, str(tmp_path), *arguments, "--write", str(written))
    assert "64 experts, 8 of them a token" in shown
    flags = ["--data.source", "text.txt", "--tokenizer.vocab_size", "1000"]
    shape = load_run(written, flags).config.shape(1000)
    assert shape == shape_of(CONFIGS["OLMoE 1B-7B"] | sizes)


def test_train_refuses_the_mixture_that_plan_knows(tmp_path: Path) -> None:
    settings = {"model.hf_config": unknown_file(tmp_path), "training.steps": 1}
    with pytest.raises(ConfigError, match='is of model_type "phimoe"'):
        load_run(None, [word for key, value in settings.items() for word in (f"--{key}", str(value))])


MEASURED = ["small", "--sequence-length", "512", "--batch", "8"]


def test_a_measured_machine_takes_the_place_of_cards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "here.json"
    write_calibration(calibration(), file)
    assert main(["plan", *MEASURED, "--calibration", str(file)]) == 0
    shown = capsys.readouterr()
    assert "2 x cores in one node" in shown.out and "measured on here with torch 2.13.0" in shown.out
    assert "MWh" not in shown.out
    assert shown.err.startswith("note: measured on here; the plan is for that machine, not for this one")
    assert main(["plan", *MEASURED, "--calibration", str(file), "--cards-per-node", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cluster"] == {"measured": "measured on here with torch 2.13.0"}
    assert all(layout["step_seconds"]["compute"] > 0 for layout in report["layouts"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            CARD,
            "--card: has no effect with --calibration, which plans for one machine with its own measured times",
        ),
        (["--nodes", "2"], "--nodes: has no effect with --calibration"),
        (["--efficiency", "0.4"], "--efficiency: has no effect with --calibration"),
    ],
)
def test_assumptions_beside_measurements_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_calibration(calibration(), tmp_path / "here.json")
    said_ = said(capsys, *MEASURED, "--calibration", str(tmp_path / "here.json"), *options, code=2)
    assert message in said_


def test_a_precision_that_was_not_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "here.json", tmp_path / "run.toml"
    write_calibration(calibration(), file)
    said(capsys, *SMALL, "--write", str(run))
    run.write_text(run.read_text().replace("[training]", '[training]\nprecision = "bf16"'))
    assert "was measured in fp32, and the run trains in bf16" in said(
        capsys, str(run), "--calibration", str(file), code=2
    )


def test_no_other_file_is_overwritten_by_a_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.json").write_text("{}")
    for file, message in (("notes.json", "exists and is no calibration"), ("none/here.json", "is no folder")):
        refused = said(capsys, *MEASURED, "--calibrate", "--calibration", str(tmp_path / file), code=2)
        assert message in refused
