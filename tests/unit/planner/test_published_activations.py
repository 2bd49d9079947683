"""Korthikanti et al. 2022: the sums over tensors are the paper's equations, and give its published percentages."""

import pytest

from megalite.planner.published_activations import (
    PublishedModel,
    published_first_stage_bytes,
    published_layer_bytes,
)
from tests.support.parity import about

# Table 3 of the paper, with the micro batch of each.
MODELS = {
    "22B": (PublishedModel(64, 6144, 48, 2048, 51200, 4), 8, 1, 1),
    "175B": (PublishedModel(96, 12288, 96, 2048, 51200, 1), 8, 8, 3),
    "530B": (PublishedModel(128, 20480, 105, 2048, 51200, 1), 8, 35, 3),
    "1T": (PublishedModel(160, 25600, 128, 2048, 51200, 1), 8, 64, 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_the_bytes_of_the_paper_s_equations(name: str) -> None:
    model, t, *_ = MODELS[name]
    a, h, s, b = model.heads, model.hidden, model.sequence, model.micro_batch
    sbh = s * b * h
    assert published_layer_bytes(model, "none") == about(sbh * (34 + 5 * a * s / h))
    assert published_layer_bytes(model, "none", tensor=t) == about(sbh * (10 + 24 / t + 5 * a * s / (h * t)))
    parallel = published_layer_bytes(model, "none", tensor=t, sequence_parallel=True)
    assert parallel == about(sbh / t * (34 + 5 * a * s / h))
    assert published_layer_bytes(model, "selective", tensor=t) == about(sbh * (10 + 24 / t))
    selective = published_layer_bytes(model, "selective", tensor=t, sequence_parallel=True)
    assert selective == about(34 * sbh / t)
    assert published_layer_bytes(model, "full", tensor=t) == 2 * sbh


@pytest.mark.parametrize("name", MODELS)
def test_the_first_stage_has_the_bytes_of_the_paper_s_equation(name: str) -> None:
    model, t, p, m = MODELS[name]
    a, h, s, b = model.heads, model.hidden, model.sequence, model.micro_batch
    v, layers = model.vocabulary, model.layers
    ends = p / layers + (p == 1) * 4 / layers * (1 + v / h) if p == 1 else p / layers
    interleaved = 1 + (p - 1) / (p * m) if m > 1 else 1
    expected = s * b * h * layers / t * ((34 + 5 * a * s / h) * interleaved + ends)
    options = {"tensor": t, "pipeline": p, "chunks": m}
    assert published_first_stage_bytes(model, "none", sequence_parallel=True, **options) == about(expected)


def test_selective_recompute_saves_what_the_paper_says() -> None:
    """Section 5: 70 % of the activations of GPT-3 and 65 % of those of the 530B model."""
    for name, share in (("175B", 0.70), ("530B", 0.65)):
        model, t, *_ = MODELS[name]
        whole, selective = (
            published_layer_bytes(model, mode, tensor=t, sequence_parallel=True)
            for mode in ("none", "selective")
        )
        assert round(1 - selective / whole, 2) == share
