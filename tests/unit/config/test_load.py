"""Reading a run: files, flags, presets and Hugging Face shapes; what is filled in, and every wrong value at once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from megalite.config.load import load_run
from megalite.config.output.write import write_resolved
from megalite.config.sections.schema import ParallelConfig
from megalite.errors import ConfigError
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES
from tests.unit.config.runs import REMOVED, changed, load, problems, write_run

ROOT = Path(__file__).parents[3]

WRONG = [
    (
        {"training.micro_batchsize": 4},
        "training.micro_batchsize: unknown key; did you mean training.micro_batch_size?",
    ),
    (
        {"training.learning_rate": 4},
        "training.learning_rate: unknown key; did you mean optimizer.learning_rate?",
    ),
    ({"training.qwertz": 4}, "training.qwertz: unknown key"),
    (
        {"data.check_document_mask": True},
        "data.check_document_mask: is no longer a setting; delete the line: the tests of megalite check",
    ),
    ({"modle.hidden_size": 4}, "modle: unknown section; did you mean model?"),
    ({"model.hidden_size": REMOVED}, "model.hidden_size: is required (width of the residual stream)"),
    (
        {"data.source": REMOVED, "data.shuffle": True},
        "data.source: is required; name a text file, or several",
    ),
    ({"model.hidden_size": "48"}, 'model.hidden_size: "48" should be a whole number'),
    ({"model.hidden_size": 48.0}, "model.hidden_size: 48.0 should be a whole number"),
    ({"model.hidden_size": True}, "model.hidden_size: true should be a whole number"),
    ({"model.hidden_size": 0}, "model.hidden_size: 0 should be greater than or equal to 1"),
    ({"model.hidden_size": 2**31}, "model.hidden_size: 2147483648 should be less than 2147483648"),
    (
        {"model.vocab_size": "atuo"},
        'model.vocab_size: "atuo" should be a whole number or "auto"; did you mean auto?',
    ),
    (
        {"parallel.schedule": "1f1bb"},
        'parallel.schedule: "1f1bb" should be "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", '
        '"interleaved_zero_bubble", "zbv" or "dualpipev"; did you mean 1f1b?',
    ),
    (
        {"parallel.virtual_stages": "two"},
        'parallel.virtual_stages: "two" should be a whole number or "auto"',
    ),
    ({"checkpoint.every": 0}, 'every: 0 should be a whole number of at least 1 or epochs as in "1 epoch"'),
    ({"validation.every": 2**31}, 'should be a whole number below 2147483648 or epochs as in "1 epoch"'),
    ({"training.loss_scale": 0.0}, 'loss_scale: 0.0 should be a number above 0 or "dynamic"'),
    ({"training.stop_after": True}, 'should be a number or a duration as in "23h30m"'),
    ({"parallel.data": 0}, 'parallel.data: 0 should be a whole number of at least 1 or "auto"'),
    ({"checkpoint.export": "x"}, 'checkpoint.export: "x" should be true, false or "best"'),
    ({"training.precision": "fp8"}, 'should be "auto", "fp32", "bf16", "fp16" or "fp64"'),
    ({"optimizer.learning_rate": float("nan")}, "optimizer.learning_rate: nan should be a finite number"),
    ({"model.mlp_dropout": 1.0}, "model.mlp_dropout: 1.0 should be less than 1"),
    ({"optimizer.betas": [0.9]}, "optimizer.betas: [0.9] should be a list with an item 2"),
    (
        {"optimizer.betas": [0.9, 1.0]},
        "optimizer.betas: [0.9, 1.0] should be a list whose item 2 is less than 1",
    ),
    ({"optimizer.betas": [0.9, 0.9, 0.9]}, "optimizer.betas: [0.9, 0.9, 0.9] should be a list of 2"),
    ({"optimizer.betas": 0.9}, "optimizer.betas: 0.9 should be a list"),
    ({"data.source": ["a", 3]}, 'data.source: ["a", 3] should be text or a list whose item 2 is text'),
    ({"data.source": ""}, 'data.source: "" should be text that is not empty'),
    (
        {"data.blend": [{"source": "a"}]},
        "data.blend[1].weight: is required (sampling weight relative to the other data sets)",
    ),
    (
        {"data.blend": [{"source": "a", "weight": 1}, {"source": "a", "weight": 1, "wieght": 1}]},
        "data.blend[2].wieght: unknown key; did you mean weight?",
    ),
    (
        {"data.blend": [{"source": 3, "weight": 1}]},
        "data.blend[1].source: 3 should be text or a list",
    ),
    ({"data.blend": [{"source": "a", "weight": "1"}]}, 'data.blend[1].weight: "1" should be a number'),
    ({"data.blend": ["a"]}, 'data.blend: ["a"] should be a list whose item 1 is a table'),
    ({"data.blend": {"source": "a"}}, 'data.blend: {source = "a"} should be a list'),
    (
        {"data.curriculum": [{"step": 0, "weights": [1]}]},
        "data.curriculum[1].step: 0 should be greater than or equal to 1",
    ),
    ({"data.curriculum": [[2, 1]]}, "data.curriculum: [[2, 1]] should be a list whose item 1 is a table"),
    ({"data.split": [0.9, "x"]}, 'data.split: [0.9, "x"] should be a list whose item 2 is a number'),
    ({"data.min_length": -1}, "data.min_length: -1 should be greater than or equal to 0"),
    ({"run.folder": ""}, 'run.folder: "" should be text that is not empty'),
    ({"data.shuffle": 1}, "data.shuffle: 1 should be true or false"),
    ({"model.preset": "smal"}, 'model.preset: there is no preset "smal"; did you mean small?'),
    (
        {"model.preset": "qwertz"},
        'model.preset: there is no preset "qwertz"; megalite config presets lists all',
    ),
    ({"model.preset": 3}, "model.preset: there is no preset 3; megalite config presets lists all"),
    ({"model.hf_config": "nowhere.json"}, 'model.hf_config: "nowhere.json" cannot be read: No such file'),
    ({"deepspeed.config": 3}, "deepspeed.config: 3 is not a path"),
    (
        {"deepspeed.config": "~nobody-here/a"},
        "deepspeed.config: ~nobody-here/a cannot be read: Could not determine",
    ),
    (
        {"model.hf_config": "~nobody-here/a"},
        'model.hf_config: "~nobody-here/a" cannot be read: Could not determine',
    ),
]


@pytest.mark.parametrize(
    ("changes", "said"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_value_is_one_problem_with_a_remedy(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    [found] = problems(tmp_path, changes)
    assert said in str(found)


def test_what_stands_outside_of_a_section(tmp_path: Path) -> None:
    path = write_run(tmp_path, changed({}))
    path.write_text('steps = 3\nmodell = 1\noptimizer = "adamw"\n' + path.read_text())
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert set(map(str, caught.value.problems)) == {
        "steps: is outside of any section; did you mean training.steps?",
        "modell: unknown key",
        'optimizer: is "adamw", but should be a section; write [optimizer] and keys below it',
    }


def test_all_problems_come_at_once_and_each_once(tmp_path: Path) -> None:
    """Unknown keys, wrong types, rules across sections and DeepSpeed's JSON in one block, as the user reads it."""
    changes = {
        "training.micro_batchsize": 1,
        "parallel.tensor": 16,
        "data.workers": "two",
    }
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, changes, ds_json={"zero_optimisation": {"stage": 1}}, flags=["--run.seed", "x"])
    assert str(caught.value).splitlines() == [
        "run.toml has 5 problems",
        "  ds.json: zero_optimisation: DeepSpeed 0.19.8 has no such key; did you mean zero_optimization?",
        '  run.seed: "x" (--run.seed) should be a whole number',
        "  training.micro_batchsize: unknown key; did you mean training.micro_batch_size?",
        '  data.workers: "two" should be a whole number',
        "  parallel.tensor: 16 does not divide model.num_attention_heads = 8; use one of [1, 2, 4, 8]",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[run]\nfolder = runs\n", "line 2, column 10: Invalid value"),
        (
            b"[run]\nseed = 1\nseed = 2\n",
            "line 3: seed of [run] is already set in line 2; delete one of the two",
        ),
        (b"[data]\nsplit = [1,\n0]\nsplit = [\n1]\n", "line 4: split of [data] is already set in line 2;"),
        (b"[run]\nseed = 1\n[data]\n[run]\n", "line 4: [run] is already set in line 1;"),
        (
            b"[data]\n[[data.blend]]\nweight = 1\n[[data.blend]]\nweight = 1\nweight = 2\n",
            "line 6: weight of",
        ),
        (b"[run]\nseed = 1\n[run.seed]\n", "line 3: [run.seed] is already set above;"),
        (b"run.seed = 1\nrun.seed = 2", "line 2: run.seed is already set in line 1;"),
        (b"[run", "end of file: Expected ']'"),
        (b"[run]\nfolder = '\xff'\n", "byte 16: is not UTF-8; save the file as UTF-8"),
        (b"a = " + b"[" * 5000, "is nested too deeply"),
        (b"", "model: has no shape; set model.preset, for example "),
    ],
)
def test_a_file_that_cannot_be_read_is_said_with_its_place(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run.toml has \d problem") as caught:
        load_run(path)
    assert said in str(caught.value)


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "other.toml").touch()
    with pytest.raises(ConfigError, match=r"no such file; there is .*other.toml"):
        load_run(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="does not exist either"):
        load_run(tmp_path / "nowhere" / "run.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_run(tmp_path)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write_run(tmp_path, changed({}))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_run(path).config.model.hidden_size == 48


def test_flags_lie_over_the_file_and_are_typed_as_toml(tmp_path: Path) -> None:
    flags = ["--optimizer.betas", "[0.8, 0.9]", "--run.folder=12", "--data.shuffle", "false"]
    flags += ["--data.source", '["a", "b"]', "--data.pattern", "[ab]*", "--run.seed", "1", "--run.seed", "2"]
    flags += ["--training.steps", "unset", "--training.epochs", "2", "--model.preset", "unset"]
    loaded = load(tmp_path, {"optimizer.betas": [0.1, 0.2]}, flags=flags)
    config = loaded.config
    assert config.optimizer.betas == (0.8, 0.9)
    assert (config.run.folder, config.run.seed) == ("12", 2)
    assert (config.data.source, config.data.pattern, config.data.shuffle) == (("a", "b"), "[ab]*", False)
    assert (config.training.steps, config.training.epochs) == (None, 2.0)
    assert loaded.origin("optimizer.betas") == "--optimizer.betas"
    assert loaded.origin("training.sequence_length") == "run.toml"
    assert loaded.origin("training.micro_batches") == "derived"
    assert loaded.origin("monitor.every") == "default"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--traning.steps", "3"], "--traning.steps: there is no section traning; did you mean training?"),
        (["--training.steps"], "--training.steps: has no value; write --training.steps VALUE"),
        (["--training.steps", "--run.seed", "3"], "--training.steps: has no value"),
        (["steps"], "steps: is not a setting; write --section.key value"),
        (["--training.step", "3"], "training.step: unknown key; did you mean training.steps?"),
        (["--training.steps", "many"], 'training.steps: "many" (--training.steps) should be a whole number'),
    ],
)
def test_a_wrong_flag_is_said_by_its_name(tmp_path: Path, flags: list[str], said: str) -> None:
    [found] = problems(tmp_path, flags=flags)
    assert said in str(found)


def test_a_run_needs_no_file() -> None:
    flags = [
        "--model.preset=tiny",
        "--training.steps=1",
        "--training.sequence_length=8",
        "--data.source=text",
    ]
    config = load_run(None, [*flags, "--training.micro_batch_size=1", "--training.micro_batches=1"]).config
    assert config.batch.global_batch_size == 1
    with pytest.raises(ConfigError, match="the command line has 1 problem"):
        load_run(None, [*flags, "--training.micro_batch_size=1"])


def test_data_follows_from_the_ranks_that_a_launcher_started(tmp_path: Path) -> None:
    layout = {"parallel.tensor": 2, "parallel.pipeline": 2}
    assert load(tmp_path, layout).config.layout == Layout(pipeline=2, data=1, tensor=2)
    assert load(tmp_path, layout, world_size=8).config.layout == Layout(pipeline=2, data=2, tensor=2)
    assert load(tmp_path, layout | {"parallel.data": 2}).config.layout.world_size == 8


def test_data_takes_the_slots_that_whole_replicas_fill(tmp_path: Path) -> None:
    layout = {"parallel.tensor": 2, "parallel.pipeline": 2, "training.global_batch_size": 8}
    assert load(tmp_path, layout, slots=11).config.layout == Layout(pipeline=2, data=2, tensor=2)
    # Fewer slots than one replica, and a layout that is set: the number of ranks is told, and may be too large.
    assert load(tmp_path, layout, slots=3).config.layout.world_size == 4
    assert load(tmp_path, layout | {"parallel.data": 1}, slots=11).config.layout.world_size == 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training.global_batch_size": REMOVED, "training.micro_batches": 4},
        {"training.micro_batch_size": REMOVED, "training.micro_batches": 4},
        {"training.micro_batches": 4},
    ],
)
def test_any_two_batch_numbers_give_the_third(tmp_path: Path, changes: dict[str, Any]) -> None:
    batch = load(tmp_path, changes).config.batch
    assert (batch.micro_batch_size, batch.micro_batches, batch.global_batch_size, batch.data) == (2, 4, 8, 1)


RESOLVED = [
    {},
    {"training.steps": REMOVED, "training.epochs": 0.5, "model.vocab_size": 999},
    {
        "parallel.pipeline": 2,
        "parallel.layers_per_stage": [1, 3],
        "data.source": ["a\tb", 'c"d\\', "Straße\x7f"],
        "data.split": [0.5, 0.5],
    },
    {"parallel.pipeline": 2, "parallel.schedule": "zbv", "parallel.layers_per_stage": [1, 1, 1, 1]},
    {"parallel.pipeline": 2, "parallel.layers_per_stage": "auto"},
    {"parallel.schedule": "dualpipev", "training.global_batch_size": 4},
    {"deepspeed.zero_optimization.stage": 1, "deepspeed.fp16.enabled": True, "deepspeed.fp16.loss_scale": 0},
    {
        "deepspeed.train_batch_size": 8,
        "deepspeed.comms_logger.prof_ops": ["a", "b"],
        "deepspeed.zero_optimization": {},
    },
    {"deepspeed": {}, "optimizer.learning_rate": 1e-30, "run.seed": 2**63 - 1, "training.precision": "fp64"},
]


@pytest.mark.parametrize("changes", RESOLVED)
@pytest.mark.parametrize("world_size", [None, 2])
def test_a_resolved_run_loads_as_itself(
    tmp_path: Path, changes: dict[str, Any], world_size: int | None
) -> None:
    config = load(tmp_path, changes, world_size=world_size).config
    written = tmp_path / "runs" / "run.toml"
    write_resolved(config, written)
    again = load_run(written, world_size=world_size)
    assert again.config == config
    assert load_run(written).config == config, "a resolved run knows its layout without a launcher"
    assert not again.notes
    if not config.zero_stage:
        return
    assert again.config.deepspeed_json() == config.deepspeed_json()


@pytest.mark.parametrize(
    ("changes", "chunks", "layers"),
    [
        ({"parallel.schedule": "zbv"}, 1, [range(4)]),
        ({"parallel.pipeline": 2}, 1, [range(2), range(2, 4)]),
        ({"parallel.pipeline": 2, "parallel.schedule": "gpipe"}, 1, [range(2), range(2, 4)]),
        (
            {"parallel.pipeline": 2, "parallel.schedule": "looped_bfs", "parallel.virtual_stages": 1},
            1,
            [range(2), range(2, 4)],
        ),
        (
            {"parallel.pipeline": 2, "parallel.schedule": "interleaved_1f1b", "model.num_hidden_layers": 5},
            2,
            [range(1), range(1, 2), range(2, 4), range(4, 5)],
        ),
        (
            {"parallel.pipeline": 2, "parallel.schedule": "zbv", "parallel.layers_per_stage": [1, 1, 1, 1]},
            2,
            [range(1), range(1, 2), range(2, 3), range(3, 4)],
        ),
        # A vocabulary whose head costs about two layers.
        (
            {"parallel.pipeline": 2, "parallel.layers_per_stage": "auto", "model.vocab_size": 800},
            1,
            [range(3), range(3, 4)],
        ),
        (
            {"parallel.pipeline": 2, "parallel.layers_per_stage": "auto", "tokenizer.vocab_size": 300}
            | {"parallel.schedule": "zbv", "model.num_hidden_layers": 6},
            2,
            [range(2), range(2, 3), range(3, 5), range(5, 6)],
        ),
    ],
)
def test_the_chunks_of_a_run(
    tmp_path: Path, changes: dict[str, Any], chunks: int, layers: list[range]
) -> None:
    config = load(tmp_path, changes).config
    assert config.parallel.virtual_stages == chunks
    assert list(config.split.layers) == layers
    assert config.split.v_shaped == (config.parallel.schedule == "zbv")


def test_every_schedule_can_be_named() -> None:
    assert get_args(ParallelConfig.model_fields["schedule"].annotation) == tuple(SCHEDULES)


def test_a_resolved_run_takes_flags(tmp_path: Path) -> None:
    written = tmp_path / "resolved.toml"
    write_resolved(load(tmp_path).config, written)
    assert load_run(written, ["--training.global_batch_size", "16"]).config.batch.micro_batches == 8


def test_the_description_of_a_run_is_json_that_makes_the_same_run(tmp_path: Path) -> None:
    config = load(tmp_path, {"deepspeed.zero_optimization.stage": 1, "optimizer.betas": [0.1, 0.2]}).config
    described = config.model_dump(mode="json")
    assert type(config).model_validate(json.loads(json.dumps(described))) == config


def test_a_bad_run_is_answered_within_half_a_second_of_cpu_time_without_torch(tmp_path: Path) -> None:
    path = write_run(tmp_path, changed({"parallel.tensor": 3, "training.step": 1}))
    code = (
        "import resource, sys\n"
        "from megalite.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(code, used.ru_utime + used.ru_stime, *({'torch', 'rich', 'deepspeed'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "train", str(path)]
    seconds = []
    # Python keeps the compiled modules for a user's next command.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(5):  # of which the least counts: others may be using the caches
        run = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
        exit_code, used, *imported = run.stdout.split()
        assert (exit_code, imported) == ("2", [])
        assert "has 3 problems" in run.stderr
        seconds.append(float(used))
    assert min(seconds) < 0.5
