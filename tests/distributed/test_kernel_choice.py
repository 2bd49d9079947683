"""Ranks choose the same operators: what one machine does not trust is used on none."""

from unittest import mock

import pytest
import torch

from megalite.config.load import load_run
from megalite.errors import ConfigError, KernelError
from megalite.ops import extension
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest import decide, run, trust
from megalite.selftest.decide import choose_kernels
from megalite.selftest.trust import OperatorChoice
from megalite.topology.axes import Layout

RIGHT, WRONG = (
    OperatorChoice("megalite", ratio=0.5),
    OperatorChoice("torch", "wrong: x", {"megalite": "wrong: x"}),
)
FLAGS = [
    *("--model.vocab_size=101", "--model.hidden_size=32", "--model.intermediate_size=64"),
    *("--model.num_hidden_layers=1", "--model.num_attention_heads=4", "--training.sequence_length=64"),
    *("--training.micro_batch_size=2", "--training.micro_batches=1", "--training.precision=fp32"),
    *("--data.source=text.txt", "--training.steps=1", "--parallel.data=4"),
]


def agree(asked: str, cards: list[str], choices: dict[int, dict[str, OperatorChoice]]) -> tuple[str, str]:
    """Return this rank's choices, or the error; ranks 0 and 2 lead a node each and have tested their cards."""
    mesh = ParallelMesh.over_world(Layout(data=len(cards)))
    config = load_run(
        None, [*FLAGS, f"--model.kernels={asked}", "--launch.collective_seconds=100"], world_size=len(cards)
    ).config
    # The other ranks wait in a collective while one tests.
    assert config.launch.collective_seconds == 100
    tested: list[int] = []

    def proved(workload: object, device: object, seconds: float) -> tuple[dict[str, OperatorChoice], str]:
        assert seconds == 50
        tested.append(mesh.rank)
        return choices[mesh.rank], f"tested by rank {mesh.rank}"

    with (
        mock.patch.object(trust, "needs_proof", lambda device_type: True),
        mock.patch.object(decide, "choose_kernels", _as_on_an_accelerator),
        mock.patch.object(trust, "machine", lambda device: {"card": cards[mesh.rank]}),
        mock.patch.object(decide, "proved_choices", proved),
    ):
        try:
            chosen, note = decide.agreed_kernels(
                config, config.model.shape(101), torch.float32, mesh, leads_node=mesh.rank % 2 == 0
            )
        except ConfigError as error:
            return str(error), ""
    assert tested == ([mesh.rank] if mesh.rank % 2 == 0 else [])
    assert chosen.operators.uses("rotary") == (chosen.name == "mixed")
    return str(chosen), note


def _as_on_an_accelerator(asked, device_type, choices=None):
    with mock.patch.object(extension, "why_not", lambda device_type: ""):
        return choose_kernels(asked, "cuda", choices)


@pytest.mark.parametrize(
    ("asked", "cards", "second", "said"),
    [
        ("auto", ["A"] * 4, {"rotary": RIGHT, "glu": RIGHT}, "mixed (megalite: rotary, glu)"),
        (
            "auto",
            ["A"] * 4,
            {"rotary": RIGHT, "glu": WRONG},
            "mixed (megalite: rotary; torch: glu (wrong: x))",
        ),
        (
            "auto",
            ["A", "A", "B", "B"],
            {"rotary": WRONG, "glu": WRONG},
            "reference (no compiled operators here: wrong: x)",
        ),
        (
            "auto",
            ["A", "A", "A", "B"],
            {"rotary": RIGHT, "glu": RIGHT},
            f"reference (no compiled operators here: {trust.UNTESTED})",
        ),
        ("fused", ["A"] * 4, {"rotary": RIGHT, "glu": WRONG}, "cannot be trusted on this card: wrong: x"),
    ],
    ids=["all trust", "one card is wrong", "other cards are wrong", "a card nobody tested", "fused"],
)
def test_ranks_agree(
    ranks, asked: str, cards: list[str], second: dict[str, OperatorChoice], said: str
) -> None:
    choices = {0: {"rotary": RIGHT, "glu": RIGHT}, 2: second}
    told = ranks.run(agree, world_size=4, asked=asked, cards=cards, choices=choices)
    assert len({each for each, _ in told}) == 1
    assert said in told[0][0]
    assert [note for _, note in told] == (
        ["", "", "", ""] if asked == "fused" else ["tested by rank 0", "", "tested by rank 2", ""]
    )


def test_a_first_run_tests_what_is_not_known_and_the_second_does_not(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands for a card: its compiled operators prove themselves in a worker process."""
    monkeypatch.setenv("MEGALITE_TRUST_FOLDER", str(tmp_path))
    monkeypatch.setattr(trust, "needs_proof", lambda device_type: True)
    monkeypatch.setattr(decide, "choose_kernels", _as_on_an_accelerator)
    if complaint := extension.why_not("cpu"):
        pytest.skip(complaint)
    config = load_run(None, [*FLAGS[:-1], "--parallel.data=1"]).config
    shape, mesh = config.model.shape(101), ParallelMesh.single()
    before = decide.known_kernels(config, shape, torch.float32, torch.device("cpu"))
    assert before.name == "reference" and trust.UNTESTED in before.why
    chosen, note = decide.agreed_kernels(config, shape, torch.float32, mesh, leads_node=True)
    assert note.startswith("tested ") and str(tmp_path) in note
    assert not [operator for operator in ("norm", "rotary", "glu") if f"{operator} (not tested" in chosen.why]
    again, note = decide.agreed_kernels(config, shape, torch.float32, mesh, leads_node=True)
    assert (again, note) == (chosen, "")
    assert decide.known_kernels(config, shape, torch.float32, torch.device("cpu")) == chosen


def test_a_test_that_cannot_start_or_end_leaves_torch(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_TRUST_FOLDER", str(tmp_path))
    config = load_run(None, [*FLAGS[:-1], "--parallel.data=1"]).config
    workload = decide.workload_of(config, config.model.shape(101), torch.float32)
    monkeypatch.setattr(decide, "FIRST_RUN_SECONDS", 0.01)
    choices, note = decide.proved_choices(workload, torch.device("cpu"))
    assert {choice.name for choice in choices.values()} == {"torch"}
    assert "were not reached in 0 s: run megalite selftest" in note
    nowhere = mock.patch.object(run, "prove_all", side_effect=KernelError("no device"))
    with nowhere:
        choices, note = decide.proved_choices(workload, torch.device("cpu"))
    assert {choice.name for choice in choices.values()} == {"torch"}
    assert note == "no device; torch computes what is not tested"
