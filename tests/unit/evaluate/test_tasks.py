"""Tasks of lm_eval from YAML files: what the examples ask, which answers they count, and what is refused."""

import gzip
import importlib.util
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megalite.errors import ConfigError, DataError
from megalite.evaluate.task_list import load_tasks
from megalite.generation.loaded import LoadedModel, load
from tests.support.evaluated import write_evaluated
from tests.support.jobs import ROOT
from tests.support.parity import assert_close
from tests.support.waiting import soon, wait_until

pytestmark = pytest.mark.extended
EXAMPLES = ROOT / "examples" / "evaluate"


@pytest.fixture(autouse=True)
def quick_lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lm_eval writes torch's report of the machine into its results, which takes seconds."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_evaluated(tmp_path_factory.mktemp("evaluated")).run)


def asked(model: LoadedModel, names: list[str], texts: list[str] | None = None, **settings: Any) -> Any:
    """Return lm_eval's results with the samples; texts: answers instead of the model's own."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from megalite.evaluate.harness import MegaliteLM

    harness = MegaliteLM(model, max_gen_toks=4)
    if texts is not None:
        harness.generate_until = lambda requests: texts[: len(requests)]
    tasks = load_tasks(names, allow_code=True)
    manager = TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate(
        harness, tasks=tasks, task_manager=manager, confirm_run_unsafe_code=True, **settings
    )


CHOICES: dict[str, tuple[str, list[str], int]] = {
    "hellaswag": (
        "Washing a dog: A girl fills a tub in the garden. The dog",
        ["jumps into the water and shakes itself.", "reads the newspaper aloud."],
        0,
    ),
    "arc": (
        "Question: What does a plant need to grow?\nAnswer:",
        ["a radio", "light", "a shoe"],
        1,
    ),
    "mmlu": (
        "Which number is even?\nA. three\nB. five\nC. eight\nD. nine\nAnswer:",
        ["A", "B", "C", "D"],
        2,
    ),
    "choices": ("The sun rises in the", ["east.", "evening.", "cellar."], 0),
}


@pytest.mark.parametrize("name", CHOICES)
def test_an_example_with_choices_asks_and_counts_what_it_says(model: LoadedModel, name: str) -> None:
    context, choices, gold = CHOICES[name]
    results = asked(model, [str(EXAMPLES / f"{name}.yaml")])
    [samples] = results["samples"].values()
    first = samples[0]
    pairs = first["arguments"][: len(choices)]
    assert pairs == [(context, f" {choice}") for choice in choices]
    likelihoods = [float(response[0][0]) for response in first["resps"]]
    assert first["acc"] == (max(likelihoods) == likelihoods[gold])
    [figures] = results["results"].values()
    assert_close(figures["acc,none"], sum(sample["acc"] for sample in samples) / len(samples))


def test_examples_stand_before_a_question_and_never_the_question_itself(model: LoadedModel) -> None:
    results = asked(model, [str(EXAMPLES / "choices.yaml")], num_fewshot=2)
    for sample in results["samples"]["local_choices"]:
        *examples, question = sample["arguments"][0][0].split("\n\n")
        rows = [json.loads(line) for line in (EXAMPLES / "choices.jsonl").read_text().splitlines()]
        others = {f"{row['context']} {row['choices'][row['answer']]}" for row in rows if row != sample["doc"]}
        assert set(examples) == others and question == sample["doc"]["context"]


def test_numbers_and_first_lines_are_compared(model: LoadedModel) -> None:
    texts = ["3 + 4 = 7. It is 7.", " that is $1,200.\n#### 1,200", "nothing"]
    results = asked(model, [str(EXAMPLES / "gsm8k.yaml")], texts)["results"]["local_gsm8k"]
    assert_close(results["exact_match,flexible-extract"], 2 / 3)
    assert_close(results["exact_match,strict-match"], 1 / 3)
    texts = [" white\nQuestion", "\n cold", " a cat and a dog"]
    results = asked(model, [str(EXAMPLES / "answers.yaml")], texts)["results"]["local_answers"]
    assert_close(results["exact_match,first-line"], 2 / 3)


def test_programs_are_run_and_pass_at_k_is_counted(model: LoadedModel, tmp_path: Path) -> None:
    for name in ("humaneval.jsonl", "programs.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    text = (EXAMPLES / "humaneval.yaml").read_text()
    (tmp_path / "twice.yaml").write_text(
        text.replace("repeats: 1", "repeats: 2").replace("k: [1]", "k: [1, 2]")
    )
    # Two programs of each problem: one of four is right.
    texts = [
        "    return a - b\n",
        "    return a + b\n",
        "    return values[0]\n",
        "    import sys; sys.exit(0)\n",
    ]
    results = asked(model, [str(tmp_path / "twice.yaml")], texts)["results"]["local_humaneval"]
    assert_close([results["pass@1,program"], results["pass@2,program"]], [1 / 4, 1 / 2])


@pytest.mark.parametrize(
    ("program", "passes"),
    [
        ("answer = 42", True),
        ("assert False", False),
        ("import os\nos._exit(0)", False),
        ("while True: pass", False),
        ("memory = bytearray(1 << 31)", False),
        ("open('large', 'wb').write(bytes(1 << 26))", False),
        ("input()", False),
        ("import os\nassert os.listdir('.') == [] and 'HF_TOKEN' not in os.environ", True),
    ],
)
def test_a_program_of_the_example_is_limited(
    program: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert programs().passes(program, seconds=1 if "while" in program else 10) is passes


def test_the_solutions_of_humaneval_pass(shared_data: Path) -> None:
    with gzip.open(shared_data / "humaneval" / "HumanEval.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in islice(lines, 20)]
    for row in rows:
        tests = f"{row['test']}\n\ncheck({row['entry_point']})\n"
        assert programs().passes(f"{row['prompt']}{row['canonical_solution']}\n\n{tests}"), row["task_id"]


def test_what_a_program_starts_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import subprocess, sys\nsubprocess.Popen(['sleep', '600', {str(mark)!r}])\nwhile True: pass"
    assert not programs().passes(child, seconds=1)
    wait_until(lambda: not commands_with(str(mark)), "what it started runs on", soon())


def programs() -> Any:
    spec = importlib.util.spec_from_file_location("programs", EXAMPLES / "programs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands_with(text: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if text.encode() in content(path)]


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def test_no_code_runs_unless_it_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"local_humaneval runs the generated programs .*add --allow-code"):
        load_tasks([str(EXAMPLES / "humaneval.yaml")])


def test_a_folder_has_its_tasks_and_a_group_those_it_names(tmp_path: Path) -> None:
    for name in ("arc", "choices"):
        for ending in ("yaml", "jsonl"):
            shutil.copy(EXAMPLES / f"{name}.{ending}", tmp_path)
    (tmp_path / "both.yaml").write_text("group: both\ntask: [local_arc, local_choices]\n")
    (tmp_path / "common.yaml").write_text("output_type: multiple_choice\n")
    [group] = load_tasks([f"{tmp_path}/"])
    assert sorted(task.task_name for task in group.get_all_tasks()) == ["local_arc", "local_choices"]
    (tmp_path / "both.yaml").unlink()
    names = [task.task_name for task in load_tasks([f"{tmp_path}/", str(EXAMPLES / "mmlu.yaml")])]
    assert names == ["local_arc", "local_choices", "local_mmlu"]


def test_what_cannot_be_loaded_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text((EXAMPLES / "arc.yaml").read_text())
    with pytest.raises(
        DataError, match=r"cannot load .*task\.yaml \(FileNotFoundError: .*arc\.jsonl.*correct the"
    ):
        load_tasks([str(path)])
    path.write_text("task: [")
    with pytest.raises(
        DataError, match=r"cannot load .*task\.yaml \(ParserError: .*line 2.*correct the file"
    ):
        load_tasks([str(path)])
    with pytest.raises(DataError, match=r"cannot load nothing \(KeyError: .*name one of `lm_eval ls tasks`"):
        load_tasks(["nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no \.yaml file of a task"):
        load_tasks([f"{tmp_path}/empty"])
