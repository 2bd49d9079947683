"""Every setting that decides how the model computes reaches it."""

from pathlib import Path

import torch

from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.ops.choice import ALL_COMPILED
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.stages import pipeline_split
from megalite.train.step.options import model_options
from tests.support.tiny import tiny_shape
from tests.unit.config.runs import load


def test_the_configuration_reaches_the_model(tmp_path: Path) -> None:
    changes = {
        "run.seed": 5,
        "training.precision": "fp32",
        "model.embedding_dropout": 0.1,
        "model.residual_dropout": 0.2,
        "model.mlp_dropout": 0.3,
        "model.attention_dropout": 0.4,
        "training.recompute": "selective",
        "training.recompute_layers": 3,
        "training.compile": False,
        "training.label_smoothing": 0.1,
        "training.z_loss": 1e-4,
        "model.chunked_loss": 512,
    }
    config = load(tmp_path, changes).config
    options = model_options(config, ALL_COMPILED)
    assert (options.model, options.training, options.adapter) == (
        config.model,
        config.training,
        config.adapter,
    )
    assert (options.dtype, options.dropout_seed, options.operators) == (torch.float32, 5, ALL_COMPILED)
    assert [options.recompute_of(layer, 4) for layer in range(4)] == [*["selective"] * 3, "none"]
    stage = build_replica(tiny_shape(), ParallelMesh.single(), pipeline_split(4), options, seed=1).stage
    head = stage.whole.output
    assert (head.loss_terms.label_smoothing, head.loss_terms.z_loss, head.chunked_loss) == (0.1, 1e-4, 512)


def test_a_run_that_says_nothing_of_it_is_plain(tmp_path: Path) -> None:
    changes = {"run.seed": 0, "training.precision": "fp32"}
    options, plain = model_options(load(tmp_path, changes).config), ModelOptions()
    assert (options.dtype, options.dropout_seed, options.operators, options.adapter) == (
        *(plain.dtype, plain.dropout_seed, plain.operators, plain.adapter),
    )
    for section, defaults in ((options.model, plain.model), (options.training, plain.training)):
        assert {name: getattr(section, name) for name in type(defaults).model_fields} == dict(defaults)
