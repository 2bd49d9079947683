"""The layouts of `verify --matrix`: complete, legal, each once, and all with the same model and global batch."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megalite.config.flags import as_flags
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError
from megalite.topology.schedules import SCHEDULES
from megalite.verify.layouts import LayoutMatrix, axes_without_effect, layout_matrix

RUN = """
[model]
preset = "tiny"
vocab_size = 101
num_attention_heads = 4
num_key_value_heads = 2
num_hidden_layers = 4
[training]
steps = 4
sequence_length = 32
micro_batch_size = 2
global_batch_size = 8
[data]
source = "stdlib"
"""
MIXTURE = {
    "model.family": "mixtral",
    "model.num_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 352,
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def matrix(path: Path, ranks: int, **settings: Any) -> LayoutMatrix:
    return layout_matrix(
        path, [*as_flags({key.replace("__", "."): value for key, value in settings.items()})], ranks
    )


def sizes_of(config: RunConfig) -> tuple[int, ...]:
    layout = config.layout
    return layout.tensor, layout.context, layout.pipeline, layout.data


def test_every_division_that_the_rules_accept_is_there(run_file):
    legal = set()
    for sizes in product(range(1, 5), repeat=4):
        tensor, context, pipeline, data = sizes
        if tensor * context * pipeline * data > 4:
            continue
        flags = as_flags(
            {"parallel": dict(zip(("tensor", "context", "pipeline", "data"), sizes, strict=True))}
        )
        try:
            load_run(run_file, [*flags, *as_flags({"training.micro_batch_size": min(2, 8 // data)})])
        except ConfigError:
            continue
        legal.add(sizes)
    layouts = matrix(run_file, 4)
    assert {sizes_of(layout.config) for layout in layouts.legal} == legal and len(legal) > 10
    assert {sizes_of(layout.config) for layout in matrix(run_file, 2).legal} == {
        sizes for sizes in legal if max(sizes) * sorted(sizes)[-2] <= 2
    }


def test_each_is_legal_by_its_flags_and_once_with_the_same_model_and_batch(run_file):
    layouts = matrix(run_file, 4).legal
    configs = [layout.config for layout in layouts]
    assert [load_run(run_file, layout.flags).config for layout in layouts] == configs
    assert all(config not in configs[:place] for place, config in enumerate(configs))
    assert len({layout.name for layout in layouts}) == len(layouts)
    assert {config.batch.global_batch_size for config in configs} == {8}
    assert all(config.model == configs[0].model for config in configs)
    ranks = [config.layout.world_size for config in configs]
    assert ranks == sorted(ranks) and configs[0].layout.world_size == 1


def test_each_way_to_cut_is_tried_wherever_it_is_legal(run_file):
    layouts = matrix(run_file, 4).legal

    def tried(setting: Any, **sizes: int) -> set[Any]:
        return {
            setting(layout.config)
            for layout in layouts
            if all(getattr(layout.config.layout, axis) == size for axis, size in sizes.items())
        }

    assert tried(lambda config: config.parallel.schedule, pipeline=2, data=1) == set(SCHEDULES)
    assert tried(lambda config: config.zero_stage, data=2, pipeline=1) == {0, 1, 2, 3}
    assert tried(lambda config: config.zero_stage, data=2, pipeline=2) == {0, 1}
    assert tried(lambda config: config.zero_stage, data=1, context=1) == {0}
    assert tried(lambda config: config.parallel.context_method, context=2) == {"gather", "ring", "ulysses"}
    assert tried(lambda config: config.parallel.sequence, tensor=2) == {False, True}
    assert tried(lambda config: config.parallel.sequence, tensor=1) == {False}


def test_experts_are_divided_in_every_legal_way(run_file):
    layouts = matrix(run_file, 4, **{key.replace(".", "__"): value for key, value in MIXTURE.items()}).legal
    experts = {
        (config.layout.tensor, config.layout.data, config.layout.expert, config.layout.expert_tensor)
        for config in (layout.config for layout in layouts)
        if config.layout.pipeline == config.layout.context == 1
    }
    # Data ranks divide the experts, and so do tensor ranks that hold each expert whole.
    assert {(1, 4, 1, None), (1, 4, 2, None), (1, 4, 4, None)} <= experts
    assert {(2, 2, 2, None), (2, 2, 2, 1), (2, 2, 4, 1)} <= experts
    assert (2, 2, 4, None) not in experts


def test_the_runs_own_way_is_kept_where_it_is_legal(run_file):
    own = {
        "parallel__pipeline": 2,
        "parallel__data": 2,
        "parallel__schedule": "zbv",
        "training__micro_batch_size": 1,
    }
    layouts = matrix(run_file, 4, **own, deepspeed__zero_optimization__stage=1).legal
    plain = {sizes_of(layout.config): layout.config for layout in reversed(layouts) if "," not in layout.name}
    assert plain[1, 1, 2, 2].parallel.schedule == "zbv" and plain[1, 1, 2, 2].zero_stage == 1
    assert plain[1, 1, 1, 1].parallel.schedule == "1f1b" and plain[1, 1, 1, 1].zero_stage == 0
    assert plain[1, 1, 1, 4].zero_stage == 1


def test_refused_layouts_are_counted_by_rule_with_the_first(run_file):
    layouts = matrix(run_file, 4)
    count, first = layouts.reasons["parallel.tensor"]
    assert first.name == "tensor 3" and "does not divide model.num_attention_heads = 4" in str(first.problem)
    assert sum(number for number, _ in layouts.reasons.values()) == len(layouts.refused) > count


def test_a_run_that_is_wrong_itself_is_refused_at_once(run_file):
    with pytest.raises(ConfigError, match=r"does not divide model\.num_attention_heads"):
        matrix(run_file, 2, parallel__tensor=3)


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (["--parallel.tensor", "2", "--parallel.data=2"], ["parallel.tensor", "parallel.data"]),
        (["--optimizer.learning_rate", "1e-3"], []),
        # A run of two stages has a schedule, and a rank more makes the batch larger.
        (["--parallel.pipeline=2", "--parallel.schedule", "zbv"], []),
        (["--parallel.data", "2", "--training.global_batch_size=unset", "--training.micro_batches=2"], []),
    ],
)
def test_a_size_of_the_runs_own_layout_that_changes_no_layout_is_known(run_file, flags, idle):
    assert axes_without_effect(run_file, flags, 4) == idle
