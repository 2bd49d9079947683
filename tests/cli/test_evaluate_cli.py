"""megalite evaluate, as a user calls it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import evaluate, main
from tests.support.documents import commands
from tests.support.evaluated import Evaluated, transformers_loss, write_evaluated
from tests.support.jobs import ROOT
from tests.support.parity import FLOAT32_RTOL, assert_close

CHOICES = {"question": "the tensor waits for", "choices": ["its peers", "nothing at all"], "answer": 0}
GSM8K = {"question": "How many?", "answer": "It is\n#### 5"}
CODE = {
    "task_id": "T/0",
    "prompt": "def f():\n",
    "test": "def check(c):\n    assert c() == 1",
    "entry_point": "f",
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return write_evaluated(tmp_path_factory.mktemp("evaluated"))


def written(folder: Path, *rows: Any) -> str:
    path = folder / "task.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_table_and_a_file_of_results(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.json"
    arguments = [str(evaluated.run), "--data", str(evaluated.texts), "--window", "40", "--stride", "13"]
    assert main(["evaluate", *arguments, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    results = json.loads(output.read_text())
    loss, tokens = transformers_loss(evaluated.export, evaluated.documents(), window=40, stride=13)
    assert results["figures"]["tokens"] == tokens
    assert_close(results["figures"]["loss"], loss / tokens, rtol=FLOAT32_RTOL)
    assert results["settings"]["stride"] == 13 and results["model"].endswith("step-000020")
    for name in ("perplexity", "word_perplexity", "byte_perplexity"):
        assert name.replace("_", " ") in said and results["figures"][name] > 1
    assert f"{results['figures']['loss']:.4f}" in said
    joined = ["evaluate", *arguments, "--join", "--dtype", "bfloat16", "--output", str(output)]
    assert main(joined) == 0
    # An end-of-document token after each document.
    figures = json.loads(output.read_text())["figures"]
    assert figures["tokens"] == tokens + len(evaluated.documents()) and figures["documents"] == 7


def test_a_layout_of_processes_has_the_figures_of_one(
    evaluated: Evaluated, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = []
    for layout in ([], ["--tensor", "2", "--data-parallel", "2"]):
        output = tmp_path / "results.json"
        arguments = [
            "evaluate",
            str(evaluated.export),
            "--data",
            str(evaluated.texts),
            "--output",
            str(output),
        ]
        assert main([*arguments, *layout]) == 0
        found.append(json.loads(output.read_text())["figures"])
    assert capfd.readouterr().out.count("word perplexity") == 2
    assert found[0].keys() == found[1].keys()
    assert_close(list(found[1].values()), list(found[0].values()), rtol=FLOAT32_RTOL)


def test_each_kind_of_task(evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(evaluated.run)
    task = [
        "--task",
        written(tmp_path, CHOICES, CHOICES | {"question": "one rank"}),
        "--kind",
        "multiple_choice",
    ]
    assert main(["evaluate", model, *task, "--few-shot", "1", "--few-shot-file", task[1]]) == 0
    said = capsys.readouterr().out
    assert "questions  2" in said and "acc norm" in said and " ± " in said
    task = ["--task", written(tmp_path, GSM8K), "--kind", "exact_match", "--tokens", "4"]
    assert main(["evaluate", model, *task]) == 0
    assert "strict match  0.0000" in capsys.readouterr().out
    task = ["--task", written(tmp_path, CODE), "--kind", "code", "--allow-code"]
    generated = ["--samples", "2", "--k", "1", "2", "--temperature", "1.5", "--tokens", "4"]
    assert main(["evaluate", model, *task, *generated]) == 0
    assert "pass at 2  0.0000" in capsys.readouterr().out
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"task_id": "T/0", "completion": "    return 1\n"}) + "\n")
    assert main(["evaluate", *task, "--samples-file", str(samples)]) == 0
    said = capsys.readouterr().out
    assert "pass at 1  1.0000" in said and "failures   none" in said


def test_no_code_runs_unless_it_is_allowed(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"task_id": "T/0", "completion": f"    open({str(mark)!r}, 'w')"}) + "\n")
    task = ["evaluate", "--task", written(tmp_path, CODE), "--kind", "code"]
    for model in ([str(evaluated.run)], ["--samples-file", str(samples)]):
        assert main([*task, *model]) == 2
        said = capsys.readouterr().err
        assert "pass@k runs the generated programs on this machine; add --allow-code to permit that" in said
    assert not mark.exists()
    assert main([*task, "--samples-file", str(samples), "--allow-code"]) == 0
    assert mark.exists()


WRONG = [
    (
        ["--data", "TEXT", "--window", "65"],
        "--window: 65 tokens are more than the model's 64; use at most 64",
    ),
    (
        ["--data", "TEXT", "--window", "8", "--stride", "9"],
        "--stride: 9 tokens are more than the window of 8",
    ),
    (["--data", "TEXT", "--few-shot", "2"], "--few-shot: has no effect with --data; leave it out"),
    (["--data", "TEXT", "--chat"], "--chat: has no effect with --data; leave it out"),
    (
        ["--task", "TASK", "--kind", "exact_match", "--few-shot-turns"],
        "--few-shot-turns: has no effect without --chat; add --chat, or leave it out",
    ),
    (
        ["--task", "TASK", "--kind", "exact_match", "--chat-template", "chatml"],
        "--chat-template: has no effect without --chat",
    ),
    (["--task", "TASK", "--kind", "exact_match", "--chat"], "has no chat template"),
    (["--data", "TEXT", "--kind", "code"], "--kind: has no effect with --data"),
    ([], "--data: a text or a task is evaluated, one of them; give --data or --task"),
    (["--data", "TEXT", "--task", "TASK"], "give --data or --task"),
    (["--task", "TASK"], "--kind: is missing; use one of multiple_choice, exact_match, code"),
    (
        ["--task", "TASK", "--kind", "multiple_choice", "--tokens", "4"],
        "--tokens: has no effect with --kind multiple_choice",
    ),
    (
        ["--task", "TASK", "--kind", "multiple_choice", "--form", "gsm8k"],
        "--form: gsm8k is no form of multiple_choice; use one of hellaswag, arc, mmlu, choices",
    ),
    (
        ["--task", "TASK", "--kind", "multiple_choice", "--few-shot", "2"],
        "--few-shot: needs --few-shot N and --few-shot-file FILE",
    ),
    (
        ["--task", "TASK", "--kind", "code", "--allow-code", "--k", "5"],
        "--k: pass@5 needs more than 1 samples; use --samples 5",
    ),
    (
        ["--task", "TASK", "--kind", "code", "--allow-code", "--samples", "5"],
        "--samples: 5 greedy samples of a problem are all alike; set --temperature above 0",
    ),
    (["--data", "TEXT", "--tensor", "3"], "--tensor: 3 tensor-parallel ranks cannot share 8 query"),
    (["--data", "TEXT", "--pipeline", "9"], "--pipeline: 9 stages are more than the model's 2 layers"),
    (["--data", "TEXT", "--output", "absent/results.json"], "is no folder that can be written"),
    (
        ["--task", "TASK", "--kind", "exact_match", "--tokens", "64"],
        "64 new tokens leave no room for a prompt",
    ),
]


def test_wrong_files_are_named_before_a_process_starts(
    evaluated: Evaluated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*arguments: object, **settings: object) -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr(evaluate, "on_local_ranks", start)
    model, task = str(evaluated.run), written(tmp_path, CHOICES, CHOICES | {"answer": 7})
    shots = ["--few-shot", "1", "--few-shot-file", task]
    for arguments, message in (
        (["--data", str(tmp_path / "absent")], "absent does not exist"),
        (["--task", task, "--kind", "multiple_choice"], "line 2: column 'answer' 7 is none of the 2 choices"),
        (["--task", task, "--kind", "multiple_choice", "--limit", "1", *shots], "line 2: column 'answer' 7"),
    ):
        assert main(["evaluate", model, *arguments, "--tensor", "2"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(each[0]) for each in WRONG])
def test_wrong_options_are_named_with_the_remedy(
    evaluated: Evaluated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    row = GSM8K if "exact_match" in arguments else CODE
    places = {"TEXT": str(evaluated.texts), "TASK": written(tmp_path, row)}
    assert main(["evaluate", str(evaluated.run), *(places.get(each, each) for each in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_the_commands_of_the_page_run(
    evaluated: Evaluated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "book").symlink_to(evaluated.run)
    (tmp_path / "other.txt").write_text("".join(evaluated.documents()))
    rows = [CHOICES | {"question": f"the tensor waits for {number}"} for number in range(4)]
    for name, lines in {
        "questions": rows[:2],
        "examples": rows,
        "sums": [GSM8K],
        "problems": [CODE],
        "samples": [{"task_id": "T/0", "completion": "    return 1\n"}],
    }.items():
        Path(written(tmp_path, *lines)).rename(tmp_path / f"{name}.jsonl")
    typed = [each for each in commands(ROOT / "docs" / "evaluation.md") if each.words[0] == "megalite"]
    assert len(typed) >= 8
    for command in typed:
        assert main(command.words[1:]) == 0, f"{command.text}\n{capfd.readouterr().err}"


def test_an_adapter_is_evaluated_with_its_base(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(evaluated.export)
    tuned = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    shutil.copy(evaluated.export / "tokenizer.json", tmp_path / "merged")
    shutil.copy(evaluated.export / "tokenizer_config.json", tmp_path / "merged")
    found = []
    for model in ([str(tmp_path / "adapter"), "--base", str(evaluated.export)], [str(tmp_path / "merged")]):
        output = ["--output", str(tmp_path / "results.json")]
        assert main(["evaluate", *model, "--data", str(evaluated.texts), *output]) == 0
        found.append(json.loads((tmp_path / "results.json").read_text())["figures"]["loss"])
    assert_close(found[0], found[1], rtol=FLOAT32_RTOL)
    assert "word perplexity" in capsys.readouterr().out


def test_no_more_answers_are_made_room_for_than_there_are(
    evaluated: Evaluated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks never start: `on_local_ranks` is where a request has passed every check."""
    task = written(tmp_path, *[GSM8K] * 10)
    arguments = ["evaluate", str(evaluated.run), "--task", task, "--kind", "exact_match"]
    monkeypatch.setattr("megalite.generation.memory.has_accelerator", lambda: False)
    monkeypatch.setattr("megalite.generation.memory.total_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(evaluate, "on_local_ranks", lambda *_, **__: 0)
    assert main([*arguments, "--batch-size", "100000000"]) == 0
    monkeypatch.setattr("megalite.generation.memory.total_memory_bytes", lambda: 2**10)
    assert main([*arguments, "--batch-size", "100000000"]) == 2
