"""Settings of a mixture of experts: the shape that they give, how they are written, and a run's first lines."""

from pathlib import Path

import pytest

from megalite.config.load import load_run
from megalite.config.output.summary import parameters_line, shape_line
from megalite.config.output.write import write_resolved
from megalite.topology.experts import ExpertShape, MixtureShape
from tests.unit.config.expert_cases import MIXTURE
from tests.unit.config.runs import load, problems

DEEPSEEK = {
    "model.n_group": 3,
    "model.topk_group": 2,
    "model.router_scores": "sigmoid",
    "model.router_correction_bias": True,
    "model.routed_scaling_factor": 2.5,
    "model.norm_topk_prob": True,
    "model.shared_intermediate_size": 10,
    "model.first_k_dense_replace": 1,
    "model.mlp_only_layers": [2],
    "training.router_bias_rate": 0.001,
    "checkpoint.export": False,
}


def test_settings_of_experts_give_a_mixture(tmp_path: Path) -> None:
    config = load(tmp_path, MIXTURE | DEEPSEEK).config
    shape = config.model.shape(300)
    assert isinstance(shape, MixtureShape) and shape.family == "qwen3_moe" and shape.qk_norm == "head"
    assert shape.experts == ExpertShape(
        6,
        2,
        20,
        shared_intermediate_size=10,
        router_scores="sigmoid",
        routed_scaling_factor=2.5,
        n_group=3,
        topk_group=2,
        correction_bias=True,
        first_k_dense_replace=1,
        mlp_only_layers=(2,),
    )
    assert [shape.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert "6 experts (2 a token)" in shape_line(config) and " active)" in parameters_line(config)
    write_resolved(config, tmp_path / "written.toml")
    assert load_run(tmp_path / "written.toml", []).config.model.shape(300) == shape


def test_weights_of_a_tokens_experts_follow_the_family(tmp_path: Path) -> None:
    for family, divided in (("mixtral", True), ("qwen3_moe", True), ("olmoe", False)):
        width = {"model.intermediate_size": 20, "model.num_key_value_heads": 8}
        shape = load(tmp_path, MIXTURE | width | {"model.family": family}).config.model.shape(300)
        assert isinstance(shape, MixtureShape) and shape.experts is not None
        assert shape.experts.norm_topk_prob is divided, family


def test_a_model_without_experts_is_dense(tmp_path: Path) -> None:
    config = load(tmp_path).config
    assert not isinstance(config.model.shape(300), MixtureShape)
    assert "experts" not in shape_line(config) and "active" not in parameters_line(config)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_experts", -1, "should be greater than or equal to 0"),
        ("num_experts", 5000, "should be less than 4097"),
        ("num_experts_per_tok", 0, "should be greater than or equal to 1"),
        ("router_scores", "tanh", 'should be "softmax" or "sigmoid"'),
        ("mlp_only_layers", [-1], "should be a list whose item 1 is greater than or equal to 0"),
    ],
)
def test_a_value_that_no_mixture_has_is_refused(key: str, value: object, said: str, tmp_path: Path) -> None:
    assert any(
        problem.key == f"model.{key}" and said in problem.message
        for problem in problems(tmp_path, MIXTURE | {f"model.{key}": value})
    )


def test_a_router_that_nothing_balances_is_noted(tmp_path: Path) -> None:
    [note] = load(tmp_path, MIXTURE).notes
    assert note.startswith("model.num_experts = 6 without training.router_balance")
    assert not load(tmp_path, MIXTURE | {"training.router_balance": 0.01}).notes
    assert not load(tmp_path, MIXTURE | DEEPSEEK).notes
