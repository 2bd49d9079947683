"""megalite evaluate, as a user calls it."""

import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from megalite.cli import evaluate, main
from tests.support.documents import commands
from tests.support.evaluated import Evaluated, transformers_loss, write_evaluated
from tests.support.jobs import ROOT
from tests.support.parity import FLOAT32_RTOL, assert_close

EXAMPLES = ROOT / "examples" / "evaluate"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return write_evaluated(tmp_path_factory.mktemp("evaluated"))


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
    for layout in ([], ["--tensor", "2", "--context", "2", "--data-parallel", "2"]):
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


@pytest.mark.extended
def test_tasks_have_the_same_figures_in_each_layout(
    evaluated: Evaluated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
    tasks = ",".join(str(EXAMPLES / f"{name}.yaml") for name in ("choices", "answers"))
    output = tmp_path / "results.json"
    asked = ["evaluate", str(evaluated.run), "--tasks", tasks, "--num-fewshot", "1", "--output", str(output)]
    found = []
    for layout in ([], ["--tensor", "2", "--data-parallel", "2"], ["--pipeline", "2"]):
        assert main([*asked, *layout, "--limit", "2", "--gen-kwargs", "max_gen_toks=8"]) == 0
        found.append(json.loads(output.read_text()))
    said = capfd.readouterr().out
    assert said.count("|local_choices|") == 3 and "acc_norm" in said and "first-line" in said
    for results in found:
        assert results["results"] == found[0]["results"]
        assert results["n-samples"]["local_answers"] == {"original": 3, "effective": 2}
        assert results["n-shot"] == {"local_answers": 1, "local_choices": 1}
        assert results["settings"]["limit"] == 2 and results["model"].endswith("step-000020")


@pytest.mark.extended
def test_generated_programs_run_only_with_the_flag(
    evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
    asked = ["evaluate", str(evaluated.run), "--tasks", str(EXAMPLES / "humaneval.yaml"), "--limit", "1"]
    assert main(asked) == 2
    assert "runs the generated programs on this machine; add --allow-code" in capsys.readouterr().err
    assert main([*asked, "--allow-code"]) == 2
    said = capsys.readouterr().err
    assert "max_gen_toks: 256 new tokens leave no room for a prompt in 64; use at most 32" in said
    assert main([*asked, "--allow-code", "--gen-kwargs", "max_gen_toks=8"]) == 0
    assert "pass@1" in capsys.readouterr().out


def test_without_lm_eval_the_error_says_how_to_install_it(
    evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "on_local_ranks", a_process_is_started)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["evaluate", str(evaluated.run), "--tasks", "hellaswag"]) == 1
    said = capsys.readouterr().err
    assert said == "error: --tasks needs lm_eval; install it: pip install 'megalite[evaluate]'\n"


def a_process_is_started(*arguments: object, **settings: object) -> int:
    raise AssertionError("a process was started")


WRONG = [
    (
        ["--data", "TEXT", "--window", "65"],
        "--window: 65 tokens are more than the model's 64; use at most 64",
    ),
    (
        ["--data", "TEXT", "--window", "8", "--stride", "9"],
        "--stride: 9 tokens are more than the window of 8",
    ),
    (["--data", "TEXT", "--num-fewshot", "2"], "--num-fewshot: has no effect with --data; leave it out"),
    (["--data", "TEXT", "--chat"], "--chat: has no effect with --data; leave it out"),
    (["--tasks", "arc_easy", "--stride", "2"], "--stride: has no effect with --tasks; leave it out"),
    (
        ["--tasks", "arc_easy", "--chat-template", "chatml"],
        "--chat-template: has no effect without --chat; add --chat, or leave it out",
    ),
    ([], "--data: texts or tasks are evaluated, one of them; give --data or --tasks"),
    (["--data", "TEXT", "--tasks", "arc_easy"], "give --data or --tasks"),
    (
        ["--tasks", "arc_easy,absent.yaml"],
        "--tasks: absent.yaml does not exist; name a .yaml file, a folder,",
    ),
    (["--data", "absent"], "absent does not exist"),
    (["--data", "TEXT", "--tensor", "3"], "--tensor: 3 tensor-parallel ranks cannot share 8 query"),
    (["--data", "TEXT", "--pipeline", "9"], "--pipeline: 9 stages are more than the model's 2 layers"),
    (
        ["--data", "TEXT", "--context", "9"],
        "--context: 9 ranks cannot share a sequence of the model's 64 tokens; use at",
    ),
    (["--data", "TEXT", "--output", "absent/results.json"], "is no folder that can be written"),
]


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
    monkeypatch.setattr(evaluate, "on_local_ranks", a_process_is_started)
    words = [str(evaluated.texts) if word == "TEXT" else word for word in arguments]
    assert main(["evaluate", str(evaluated.run), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_chat_template_is_needed_for_a_chat(
    evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "on_local_ranks", a_process_is_started)
    harness = ModuleType("lm_eval")
    harness.__spec__ = ModuleSpec("lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    assert main(["evaluate", str(evaluated.run), "--tasks", "arc_easy", "--chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["--data", pytest.param("--tasks", marks=pytest.mark.extended)])
def test_the_commands_of_the_page_run(
    evaluated: Evaluated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    if kind == "--tasks":
        pytest.importorskip("lm_eval", reason="lm_eval is not installed")
        monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "book").symlink_to(evaluated.run)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "other.txt").write_text("".join(evaluated.documents()))
    typed = [command for command in commands(ROOT / "docs" / "evaluation.md") if kind in command.words]
    # The Hub is not reached from tests.
    typed = [command for command in typed if "hellaswag,arc_easy" not in command.words]
    assert len(typed) >= 3
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
