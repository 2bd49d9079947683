"""Findings are read back where nothing changed; the fastest right implementation follows from them."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.errors import ConfigError
from megalite.ops import choice, extension
from megalite.ops.attention_form import AttentionForm
from megalite.ops.choice import ALL_COMPILED, COMPILED, PLAIN_TORCH, SLOTS, Operators
from megalite.selftest import trust
from megalite.selftest.decide import choose_kernels
from megalite.selftest.trust import CaseResult, OperatorChoice

RIGHT = CaseResult("right", "", 1e-7, 1e-6)
TIMED = replace(RIGHT, seconds=0.5, torch_seconds=1.0)
WRONG = CaseResult("wrong", "wrong: error 3.0e-02 over 1.0e-03, at 4x5", 3e-2, 1e-3)
FACTS = {"device": "cuda", "card": "NVIDIA H100 80GB HBM3", "capability": "9.0", "driver": "580.65.06"}
FACTS |= {"torch": "2.13.0", "library": "aaaa bbbb", "packages": ""}
FOUND = {"norm": {"odd": {"megalite": RIGHT}, "own": {"megalite": TIMED}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGALITE_TRUST_FOLDER", str(tmp_path / "trust"))
    return tmp_path / "trust"


def test_findings_come_back_and_later_ones_are_added(folder: Path) -> None:
    assert trust.read(FACTS) == {}
    path = trust.write(FACTS, FOUND)
    assert path.parent == folder and path.name.startswith("nvidia-h100-80gb-hbm3-")
    assert trust.read(FACTS) == FOUND
    trust.write(FACTS, {"norm": {"own": {"liger": WRONG}}, "glu": {"own": {"megalite": WRONG}}})
    both = trust.read(FACTS)
    assert both["norm"] == {"odd": {"megalite": RIGHT}, "own": {"megalite": TIMED, "liger": WRONG}}
    assert both["glu"] == {"own": {"megalite": WRONG}}
    assert [*folder.iterdir()] == [path]


@pytest.mark.parametrize("fact", FACTS)
def test_another_card_driver_torch_or_library_knows_nothing(fact: str) -> None:
    trust.write(FACTS, FOUND)
    assert trust.read(FACTS | {fact: "another"}) == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"right"', '"splendid"'),
        lambda text: text.replace('"verdict"', '"judgement"'),
        lambda text: text.replace("0.5", '"fast"'),
        lambda text: text.replace("580.65.06", "580.65.07"),
        lambda text: text.replace('"odd"', "7").replace("7:", '"odd": 7, "x":'),
        lambda text: "\0" + text,
    ],
)
def test_a_damaged_file_counts_as_none_and_is_made_anew(damage: Callable[[str], str]) -> None:
    path = trust.write(FACTS, FOUND)
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    assert trust.read(FACTS) == {}
    trust.write(FACTS, FOUND)
    assert trust.read(FACTS) == FOUND


def test_a_write_that_fails_leaves_the_earlier_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trust.write(FACTS, FOUND)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        trust.write(FACTS, {"norm": {"own": {"megalite": WRONG}}})
    assert [*folder.iterdir()] == [path] and trust.read(FACTS) == FOUND


def test_the_facts_of_a_cuda_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda of: f"card {of.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: (8, 9))
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:11:01 UTC 2025\n"
    )
    monkeypatch.setattr(trust, "_DRIVER", driver)
    facts = trust.machine(device)
    assert [facts[name] for name in ("card", "capability", "driver")] == ["card 1", "8.9", "580.65.06"]
    assert facts["torch"] == torch.__version__
    monkeypatch.setattr(trust, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    assert trust.driver_version(device) == "CUDA 13000"


def test_another_library_file_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libmegalite.so"
    monkeypatch.setattr(extension, "LIBRARY", library)
    trust.library_digest.cache_clear()
    digests = [trust.library_digest()]
    for content in (b"one", b"two"):
        library.write_bytes(content)
        trust.library_digest.cache_clear()
        digests.append(trust.library_digest())
    trust.library_digest.cache_clear()
    assert digests[0] == "" and len(set(digests)) == 3


def finding(seconds: float) -> dict[str, CaseResult]:
    return {"odd": RIGHT, "own": replace(RIGHT, seconds=seconds, torch_seconds=1.0)}


@pytest.mark.parametrize(
    ("shown", "name", "why"),
    [
        ({"megalite": finding(0.5)}, "megalite", ""),
        ({"megalite": finding(0.5), "liger": finding(0.4)}, "liger", ""),
        ({"megalite": finding(0.5), "liger": {"odd": WRONG, "own": TIMED}}, "megalite", ""),
        ({"megalite": finding(1.04)}, "megalite", ""),
        ({"megalite": finding(1.4)}, "torch", "slower than torch: 1.40 times its time"),
        ({"megalite": {"odd": WRONG, "own": TIMED}}, "torch", f"{WRONG.why} (odd)"),
        ({"megalite": {"odd": RIGHT}}, "torch", trust.UNTESTED),
        ({}, "torch", trust.UNTESTED),
        (
            {"megalite": {each: CaseResult("absent", "no CUDA kernels") for each in ("odd", "own")}},
            "torch",
            "no CUDA kernels",
        ),
        (
            {
                "megalite": {"odd": WRONG, "own": TIMED},
                "liger": {each: CaseResult("absent", "liger is not installed") for each in ("odd", "own")},
            },
            "torch",
            f"{WRONG.why} (odd)",
        ),
        (
            {"megalite": {"odd": WRONG, "own": TIMED}, "liger": finding(2.0)},
            "torch",
            f"megalite: {WRONG.why} (odd); liger: slower than torch: 2.00 times its time",
        ),
    ],
)
def test_the_fastest_right_one_is_chosen(
    shown: dict[str, dict[str, CaseResult]], name: str, why: str
) -> None:
    found = {
        case: {each: cases[case] for each, cases in shown.items() if case in cases} for case in ("odd", "own")
    }
    chosen = trust.choose(["odd", "own"], [*shown] or ["megalite"], found)
    assert (chosen.name, chosen.why) == (name, why)


def test_machines_agree_on_one_or_on_torch() -> None:
    ours, wrong = (
        OperatorChoice("megalite", ratio=0.5),
        OperatorChoice("torch", "wrong", {"megalite": "wrong"}),
    )
    assert trust.agreed([ours, ours]) == ours
    assert trust.agreed([ours, wrong, ours]) == wrong
    assert trust.agreed([ours, OperatorChoice("liger")]) == OperatorChoice(
        "torch", "machines choose liger and megalite"
    )


def test_a_run_is_told_who_computes_what_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "why_not", lambda device_type: "")
    choices = {
        "rotary": OperatorChoice("megalite", ratio=0.5),
        "attention": OperatorChoice("flash_attn"),
        "norm": OperatorChoice("torch", "slower than torch: 1.40 times its time"),
        "add_norm": OperatorChoice("torch", "slower than torch: 1.40 times its time"),
    }
    chosen = choose_kernels("auto", "cuda", choices)
    assert str(chosen) == (
        "mixed (megalite: rotary; flash_attn: attention; "
        "torch: norm, add_norm (slower than torch: 1.40 times its time))"
    )
    assert chosen.operators.uses("rotary") and chosen.operators.of("attention") == "flash_attn"
    assert chosen.operators.of("norm") == chosen.operators.of("glu") == "torch"
    assert choose_kernels("fused", "cuda", choices).operators == chosen.operators
    assert choose_kernels("reference", "cuda", choices).operators == PLAIN_TORCH


def test_until_it_is_tested_an_accelerator_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "why_not", lambda device_type: "")
    untested = {"norm": trust.choose(["odd"], ["megalite"], {})}
    chosen = choose_kernels("auto", "cuda", untested)
    assert (
        str(chosen)
        == "reference (no compiled operators here: not tested on this card yet: run megalite selftest)"
    )
    assert chosen.operators == PLAIN_TORCH
    assert str(choose_kernels("auto", "cuda")) == f"reference (no compiled operators here: {trust.UNTESTED})"
    assert choose_kernels("auto", "cuda", {}).name == "reference"
    assert choose_kernels("auto", "cpu").operators == ALL_COMPILED


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (
            {
                "norm": OperatorChoice("torch", "wrong: x", {"megalite": "wrong: x"}),
                "glu": OperatorChoice("megalite"),
            },
            'model.kernels: "fused": the compiled RMSNorm, LayerNorm (norm) cannot be trusted on this card: wrong: x; '
            'use "auto", which has torch compute it, or "reference"',
        ),
        ({"norm": trust.choose(["odd"], ["megalite"], {})}, trust.UNTESTED),
        ({}, '"fused": no operator is proved on this card'),
    ],
)
def test_fused_refuses_what_failed_or_is_untested(
    monkeypatch: pytest.MonkeyPatch, choices: dict[str, OperatorChoice], said: str
) -> None:
    monkeypatch.setattr(extension, "why_not", lambda device_type: "")
    with pytest.raises(ConfigError) as refused:
        choose_kernels("fused", "cuda", choices)
    assert said in str(refused.value) and len(refused.value.problems) == 1


def test_the_names_of_operators_are_known() -> None:
    assert Operators({"norm": "liger"}).of("norm") == "liger" and not Operators().uses("norm")
    assert all(ALL_COMPILED.of(name) == COMPILED for name in SLOTS)
    with pytest.raises(KeyError):
        PLAIN_TORCH.uses("norms")
    assert pickle.loads(pickle.dumps(ALL_COMPILED)) == ALL_COMPILED


@pytest.mark.parametrize("compiles", [False, True])
def test_the_form_of_attention_decides_who_computes_it(
    monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    monkeypatch.setattr(choice, "causal_attention", lambda *inputs, backend: backend)
    names = [name for name in SLOTS if name.startswith("attention")]
    operators = Operators({name: name for name in names}, compile=compiles)
    form: dict[str, Any] = {}
    called = [operators.attend(*[torch.empty(0)] * 3)]
    for name, value in {"window": 4, "documents": object(), "softcap": 1.0, "mask": object()}.items():
        form[name] = value
        called.append(operators.attend(*[torch.empty(0)] * 3, AttentionForm(**form)))
    forms = [
        "attention",
        "attention_windows",
        "attention_documents",
        "attention_softcap",
        "attention_dropout",
    ]
    assert sorted(names) == sorted(forms) and called == (["torch"] * 5 if compiles else forms)
    assert operators.attend(*[torch.empty(0)] * 3, AttentionForm(**form, prefix=1)) == "torch"
