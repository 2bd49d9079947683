"""The comparison of a run with the checkpoint that it goes on from: every setting, and the places of its samples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite import load_config
from megalite.config.sections.describe import section_models
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.shape_settings import shape_settings
from megalite.errors import ConfigError
from megalite.train.checkpoints import resume_check
from megalite.train.checkpoints.resume_check import ResumeCheck, change_notes, changed_settings
from megalite.train.checkpoints.resume_table import EFFECTS, Rule, effect_of
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.unit.config.runs import REMOVED
from tests.unit.config.runs import changed as changed_run

STEP, SIZE = 6, 8
SETTINGS = [f"{section}.{key}" for section, model in section_models().items() for key in model.model_fields]
BLEND = [
    {"source": "stdlib", "weight": 1.0, "pattern": "a*.py"},
    {"source": "stdlib", "weight": 3.0, "pattern": "b*.py"},
]
FIRST = {"step": 4, "weights": [1.0, 1.0]}


def loaded(changes: dict[str, Any]) -> RunConfig:
    return load_config(None, **changed_run({"training.global_batch_size": SIZE, **changes}))


def check(
    monkeypatch: pytest.MonkeyPatch, before: RunConfig, now: RunConfig, step: int = STEP
) -> ResumeCheck:
    """The check of a run against a checkpoint of `before`, after `step` steps of SIZE samples."""
    manifest = SimpleNamespace(
        config=before.model_dump(mode="json"),
        trainer_state={"step": step, "samples": step * SIZE},
        step=step,
        stream=None,
        data={},
    )
    monkeypatch.setattr(resume_check, "read_manifest", lambda _: manifest)
    return ResumeCheck(Path("step-000006"), now)


@pytest.mark.parametrize("key", SETTINGS)
def test_the_table_has_every_setting(key: str) -> None:
    assert key in EFFECTS, (
        f"what does a changed {key} do to a resumed run? Say so in train/checkpoints/resume_table.py"
    )
    rule, text = EFFECTS[key].rule, EFFECTS[key].text
    assert bool(text) == (rule not in (Rule.FREE, Rule.CONTENT))


def test_the_table_has_no_other_setting() -> None:
    tables = {"data.blend.weight", "deepspeed.scheduler", "deepspeed"}
    assert EFFECTS.keys() - set(SETTINGS) == tables
    assert {f"model.{name}" for name in shape_settings()} <= EFFECTS.keys()
    with pytest.raises(KeyError):
        effect_of("data.unknown")


def test_every_changed_setting_is_said_by_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting differs in the checkpoint: it is said, refused, compared by content, or free, by the table."""
    now = loaded({})
    written = now.model_dump(mode="json")
    for table in written.values():
        for name in table or {}:
            table[name] = "another value"
    written["deepspeed"] = {"scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 2}}
    found = {change.key: change.effect.rule for change in changed_settings(written, now)}
    expected = {key: EFFECTS[key].rule for key in SETTINGS if EFFECTS[key].rule != Rule.FREE}
    expected.pop("training.precision")  # the run has "auto"
    assert found == {**expected, "deepspeed.scheduler.type": Rule.SAID}
    said = "\n".join(change_notes(written, now))
    assert all((key in said) == bool(EFFECTS[key].text) for key in expected)
    problems = _problems(monkeypatch, SimpleNamespace(model_dump=lambda mode: written), now)
    refused = {key for key, rule in found.items() if rule == Rule.REFUSED}
    assert refused == set(problems) and len(refused) > 4


def _problems(monkeypatch: pytest.MonkeyPatch, before: Any, now: RunConfig) -> list[str]:
    with monkeypatch.context() as patch:
        patch.setattr(ResumeCheck, "_places", lambda _: iter(()))
        with pytest.raises(ConfigError) as caught:
            check(patch, before, now).require_same_samples()
    assert all("checkpoint.resume_changed = true" in problem.remedy for problem in caught.value.problems)
    return [problem.key for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data.shuffle": False},
            "data.shuffle true -> false: the order of the remaining samples changes; samples",
        ),
        (
            {"run.seed": 7},
            "run.seed 1234 -> 7: the order of the remaining samples and all random draws change",
        ),
        (
            {"data.document_mask": True},
            "data.document_mask false -> true: the tokens of the remaining samples",
        ),
        (
            {"training.precision": "bf16"},
            "training.precision fp32 -> bf16: from the next step on numbers are rounded",
        ),
        (
            {"optimizer.groups": [{"pattern": "*", "learning_rate_ratio": 0.5}]},
            "optimizer.groups[1].learning_rate_ratio 0.1 -> 0.5: counts from the next step on",
        ),
        (
            {"optimizer.groups": REMOVED},
            "optimizer.groups[1].learning_rate_ratio 0.1 -> unset, optimizer.groups[1].pattern * -> unset",
        ),
    ],
    ids=["shuffle", "seed", "mask", "precision", "rate of a group", "group"],
)
def test_a_note_names_the_setting_and_its_effect(changes: dict[str, Any], said: str) -> None:
    before = {
        "training.precision": "fp32",
        "optimizer.groups": [{"pattern": "*", "learning_rate_ratio": 0.1}],
    }
    written = loaded(before).model_dump(mode="json")
    [note] = change_notes(written, loaded({**before, **changes}))
    assert note.startswith("settings that differ from the checkpoint's: ") and said in note
    assert list(change_notes(written, loaded(before))) == []


def test_auto_takes_the_precision_of_the_checkpoint() -> None:
    written = loaded({"training.precision": "fp32"}).model_dump(mode="json")
    assert list(change_notes(written, loaded({}))) == []


@pytest.mark.parametrize("step", [STEP, 0])
def test_other_places_are_refused_unless_they_may_change_or_none_was_seen(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    now = {"data.kind": "instruct", "data.packing": "greedy"}
    before = loaded({"data.kind": "instruct"})
    told = loaded({**now, "checkpoint.resume_changed": True})
    check(monkeypatch, before, told, step).require_same_samples()
    other = check(monkeypatch, before, loaded(now), step)
    if step == 0:
        other.require_same_samples()
        return
    with pytest.raises(
        ConfigError, match=r"data.packing: greedy is not best_fit, that of step-000006.*use best_fit"
    ):
        other.require_same_samples()


@exhibit(
    "Megatron-LM#1002",
    subject="checkpoints",
    there="A run that resumed with another sequence length saw its text shuffled anew.",
    here="another length is refused where it would change the samples, and a stream goes on behind what was read",
    fault=faults.OTHER_SAMPLES_ARE_TAKEN,
)
def test_a_stream_may_have_another_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    stream = {
        "data.streaming": True,
        "data.source": str(tmp_path / "a.jsonl"),
        "tokenizer.vocab_size": REMOVED,
    }
    stream["tokenizer.path"] = str(tmp_path)
    longer = loaded({**stream, "training.sequence_length": 32})
    check(monkeypatch, loaded(stream), longer).require_same_samples()
    [note] = change_notes(loaded(stream).model_dump(mode="json"), longer)
    assert "training.sequence_length 16 -> 32: the text goes on behind what was read" in note
    with pytest.raises(ConfigError, match=r"training.sequence_length: 32 is not 16"):
        check(monkeypatch, loaded({}), loaded({"training.sequence_length": 32})).require_same_samples()


def blended(
    curriculum: list[dict[str, Any]], blend: list[dict[str, Any]] = BLEND, size: int = SIZE
) -> RunConfig:
    return loaded(
        {
            "data.source": REMOVED,
            "data.blend": blend,
            "data.curriculum": curriculum,
            "training.global_batch_size": size,
            "training.steps": 20,
        }
    )


@pytest.mark.parametrize("later", [[], [{"step": 7, "weights": [0.0, 1.0]}]])
def test_weights_of_later_steps_may_change(
    monkeypatch: pytest.MonkeyPatch, later: list[dict[str, Any]]
) -> None:
    check(monkeypatch, blended([FIRST]), blended([FIRST, *later])).require_same_samples()


@pytest.mark.parametrize(
    ("before", "other"),
    [
        (blended([FIRST]), blended([])),
        (blended([FIRST]), blended([{"step": 5, "weights": [1.0, 1.0]}])),
        (blended([FIRST]), blended([FIRST, {"step": 6, "weights": [0.0, 1.0]}])),
        (blended([FIRST]), blended([FIRST], [{**BLEND[0], "weight": 2.0}, BLEND[1]])),
        (blended([]), blended([], [{**BLEND[0], "weight": 2.0}, BLEND[1]])),
    ],
    ids=["removed", "moved", "added in the past", "other weights of the blend", "a blend alone"],
)
def test_weights_of_earlier_steps_may_not(
    monkeypatch: pytest.MonkeyPatch, before: RunConfig, other: RunConfig
) -> None:
    with pytest.raises(
        ConfigError, match=r"up to step 6 are not those of step-000006.*table of step 7 or later"
    ):
        check(monkeypatch, before, other).require_same_samples()


def test_the_size_of_a_step_may_not_with_a_curriculum(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"training.global_batch_size: 16 is not .* 48 sequences.*use 8"):
        check(monkeypatch, blended([FIRST]), blended([FIRST], size=16)).require_same_samples()


def bucketed(buckets: int, size: int = SIZE, length: int = 16) -> RunConfig:
    return loaded(
        {
            "data.kind": "instruct",
            "data.packing": "none",
            "data.length_buckets": buckets,
            "training.global_batch_size": size,
            "training.sequence_length": length,
        }
    )


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (bucketed(0), "data.length_buckets: 0 is not 4, that of step-000006, .*; use 4, or a new run.folder"),
        (bucketed(4, size=4), "training.global_batch_size: 4 is not .* data.length_buckets counts .* use 8"),
        (
            bucketed(4, length=32),
            "training.sequence_length: 32 is not 16, that of .*; use 16, or a new run.folder",
        ),
    ],
    ids=["other buckets", "other size", "other length"],
)
def test_the_buckets_may_not_change(monkeypatch: pytest.MonkeyPatch, now: RunConfig, said: str) -> None:
    before = bucketed(4)
    check(monkeypatch, before, bucketed(4)).require_same_samples()
    with pytest.raises(ConfigError, match=said):
        check(monkeypatch, before, now).require_same_samples()
