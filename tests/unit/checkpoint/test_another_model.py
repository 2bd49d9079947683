"""A checkpoint of another model is refused with each setting that differs, by the key that a user can set."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalite.checkpoint.load import check_fits
from megalite.checkpoint.manifest import Manifest
from megalite.errors import CheckpointError
from megalite.topology.adapter import Lora, Prefix
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape, RopeScaling
from tests.support.tiny import MIXTURE_SHAPES, tiny_shape

LORA = Lora(4, 8.0, ("q_proj", "v_proj"))
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=16)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "rank": (
        {"adapter": LORA},
        {"adapter": replace(LORA, rank=8)},
        ["adapter.rank: 8 here, 4 in the checkpoint"],
    ),
    "several": (
        {"adapter": LORA},
        {"adapter": replace(LORA, alpha=2.0, targets=("q_proj",), bias="all", rslora=True, dora=True)},
        [
            "adapter.alpha: 2.0 here, 8.0 in the checkpoint",
            'adapter.targets: ["q_proj"] here, ["q_proj", "v_proj"] in the checkpoint',
            'adapter.bias: "all" here, "none" in the checkpoint',
            "adapter.rslora: true here, false in the checkpoint",
            "adapter.dora: true here, false in the checkpoint",
        ],
    ),
    "no adapter": ({"adapter": LORA}, {}, ['adapter.kind: "none" here, "lora" in the checkpoint']),
    "another adapter": (
        {"adapter": Prefix(4, None)},
        {"adapter": LORA},
        ['adapter.kind: "lora" here, "prefix" in the checkpoint'],
    ),
    "prefix": (
        {"adapter": Prefix(4, None)},
        {"adapter": Prefix(4, 16)},
        ["adapter.projection: 16 here, not set in the checkpoint"],
    ),
    "scaling": (
        {},
        {"rope_scaling": YARN},
        ['model.rope_type: "yarn" here, "default" in the checkpoint'],
    ),
    "scaling's numbers": (
        {"rope_scaling": YARN},
        {"rope_scaling": replace(YARN, factor=8.0, attention_factor=1.5)},
        [
            "model.rope_factor: 8.0 here, 4.0 in the checkpoint",
            "model.rope_attention_factor: 1.5 here, not set in the checkpoint",
        ],
    ),
    "width": (
        {},
        {"hidden_size": 64, "sliding_window": 5},
        [
            "model.hidden_size: 64 here, 48 in the checkpoint",
            "model.sliding_window: 5 here, not set in the checkpoint",
        ],
    ),
}


def fits(written: ModelShape, shape: ModelShape) -> None:
    check_fits(cast(Manifest, SimpleNamespace(model=written)), shape, Path("step-000002"))


@pytest.mark.parametrize("name", CASES)
def test_each_setting_that_differs_is_named_by_its_key(name: str) -> None:
    before, now, lines = CASES[name]
    written = replace(tiny_shape(), **before)
    fits(written, written)
    with pytest.raises(CheckpointError) as refused:
        fits(written, replace(tiny_shape(), **now))
    first, *rest = str(refused.value).splitlines()
    assert first == "step-000002 is a checkpoint of another model; use the settings of its model"
    assert [line.strip() for line in rest] == lines


def test_experts_that_differ_are_named_by_their_settings() -> None:
    shape = MIXTURE_SHAPES["qwen3_moe"]
    assert isinstance(shape, MixtureShape) and shape.experts is not None
    fits(shape, shape)
    dense = replace(
        tiny_shape(), **{name: getattr(shape, name) for name in ("family", "qk_norm", "head_dim")}
    )
    wider = replace(shape, experts=replace(shape.experts, moe_intermediate_size=24, correction_bias=True))
    for written, here, lines in (
        (dense, shape, ["model.num_experts: 5 here, 0 in the checkpoint"]),
        (shape, dense, ["model.num_experts: 0 here, 5 in the checkpoint"]),
        (
            shape,
            wider,
            [
                "model.moe_intermediate_size: 24 here, 20 in the checkpoint",
                "model.router_correction_bias: true here, false in the checkpoint",
            ],
        ),
    ):
        with pytest.raises(CheckpointError) as refused:
            fits(written, here)
        assert [line.strip() for line in str(refused.value).splitlines()[1:]] == lines
