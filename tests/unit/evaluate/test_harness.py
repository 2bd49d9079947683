"""lm_eval's figures are the same on a checkpoint in place and, by transformers, on its export."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.generation.loaded import load
from tests.support.evaluated import Evaluated, write_evaluated
from tests.support.parity import FLOAT32_RTOL, assert_close

TASKS = {
    "words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name, "aggregation": "weighted_perplexity" if "perp" in name else name}
            for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    },
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
    },
}


@pytest.fixture(autouse=True)
def without_a_list_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval writes torch's report of the machine into its results, which takes seconds."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    return write_evaluated(tmp_path_factory.mktemp("evaluated"))


def write_tasks(folder: Path, documents: list[str]) -> list[str]:
    """Write one task of each kind over local rows; return their names."""
    rows = [
        {
            "text": document,
            "question": document[: 20 + 3 * number],
            "choices": [document[20 : 27 + number], "the weights", "nothing at all"],
            "answer": number % 3,
        }
        for number, document in enumerate(documents)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
        whole = {"task": f"megalite_{name}", "test_split": "test", **data, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))
    return [f"megalite_{name}" for name in TASKS]


def figures(model: Any, names: list[str], folder: Path, **settings: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True, **settings
    )
    return found


@pytest.mark.extended
def test_the_figures_in_place_are_those_on_the_export(evaluated: Evaluated, tmp_path: Path) -> None:
    from megalite.evaluate.harness import MegaliteLM

    names = write_tasks(tmp_path, evaluated.documents())
    ours = figures(MegaliteLM(load(evaluated.run), batch_size=3, max_gen_toks=12), names, tmp_path)
    arguments = f"pretrained={evaluated.export},dtype=float32"
    theirs = figures("hf", names, tmp_path, model_args=arguments, device="cpu", batch_size=3)
    for name in names:
        one, other = ours["results"][name], theirs["results"][name]
        assert one.keys() == other.keys() and len(one) >= 3
        for key, value in other.items():
            if isinstance(value, float):
                assert_close(one[key], value, rtol=FLOAT32_RTOL, what=f"{name} {key}")
    for ours_of, theirs_of in zip(
        *(found["samples"]["megalite_written"] for found in (ours, theirs)), strict=True
    ):
        assert ours_of["resps"] == theirs_of["resps"]
    assert any(each["resps"][0][0] for each in ours["samples"]["megalite_written"])
    for ours_of, theirs_of in zip(
        *(found["samples"]["megalite_choices"] for found in (ours, theirs)), strict=True
    ):
        pairs = [[(float(each[0][0]), each[0][1]) for each in of["resps"]] for of in (ours_of, theirs_of)]
        assert_close([each[0] for each in pairs[0]], [each[0] for each in pairs[1]], rtol=FLOAT32_RTOL)
        assert [each[1] for each in pairs[0]] == [each[1] for each in pairs[1]]


@pytest.mark.extended
@pytest.mark.parametrize("setting", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
def test_a_start_token_is_added_where_hf_adds_it(
    shared_data: Path, tmp_path: Path, setting: dict[str, bool]
) -> None:
    """Perplexities of a model whose tokenizer adds a start token; texts are scored with and without."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from megalite.evaluate.harness import MegaliteLM

    model = shared_data / "stories260K"
    words, *_ = write_tasks(
        tmp_path, ["Once upon a time, there was a little girl.", "<s> Lily saw a big dog."]
    )
    ours = figures(MegaliteLM(load(model), **setting), [words], tmp_path)
    of_hf = {"pretrained": str(model), "dtype": "float32"} | setting
    theirs = figures("hf", [words], tmp_path, model_args=of_hf, device="cpu")
    for key, value in theirs["results"][words].items():
        if isinstance(value, float):
            assert_close(ours["results"][words][key], value, rtol=FLOAT32_RTOL, what=key)


CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message.role + '>' + message.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.mark.extended
@pytest.mark.parametrize("turns", [False, True])
def test_questions_in_a_chat_template_are_those_on_the_export(
    evaluated: Evaluated, tmp_path: Path, turns: bool
) -> None:
    from megalite.evaluate.harness import MegaliteLM

    config = json.loads((evaluated.export / "tokenizer_config.json").read_text()) | {"chat_template": CHAT}
    for folder in (evaluated.export, evaluated.run / "tokenizer"):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    names = write_tasks(tmp_path, evaluated.documents())[1:]
    asked = {"apply_chat_template": True, "num_fewshot": 2, "fewshot_as_multiturn": turns}
    model = MegaliteLM(load(evaluated.run), batch_size=3, max_gen_toks=12)
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure "}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("<assistant>Sure")
    assert model.tokenizer_name.startswith("tokenizer__")
    ours = figures(model, names, tmp_path, **asked)
    arguments = f"pretrained={evaluated.export},dtype=float32"
    theirs = figures("hf", names, tmp_path, model_args=arguments, device="cpu", batch_size=3, **asked)
    for name in names:
        for one, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"] and "<assistant>" in str(one["arguments"])
            if "choices" in name:
                scored = [[float(each[0][0]) for each in of["resps"]] for of in (one, other)]
                assert_close(*scored, rtol=FLOAT32_RTOL)
            else:
                assert one["resps"] == other["resps"]
