"""Every setting that decides how the model computes reaches it."""

from pathlib import Path

import torch

from megalite.model.options import Dropout, ModelOptions, Recompute
from megalite.ops.choice import ALL_COMPILED
from megalite.train.options import model_options
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
    assert model_options(load(tmp_path, changes).config, ALL_COMPILED) == ModelOptions(
        dtype=torch.float32,
        dropout=Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.4),
        dropout_seed=5,
        recompute=Recompute("selective", layers=3),
        label_smoothing=0.1,
        z_loss=1e-4,
        operators=ALL_COMPILED,
        chunked_loss=512,
    )


def test_a_run_that_says_nothing_of_it_is_plain(tmp_path: Path) -> None:
    changes = {"run.seed": 0, "training.precision": "fp32"}
    assert model_options(load(tmp_path, changes).config) == ModelOptions()
