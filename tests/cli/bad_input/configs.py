"""Wrong run files and flags of megalite train."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.bad_input.case import Case, train, write


def setting(*flags: str, **changes: object) -> Callable[[Path], list[str]]:
    """A run with `section__key` changed, and flags behind it."""
    return lambda world: [*train(world, **changes), *flags]


def run_file(content: bytes | str) -> Callable[[Path], list[str]]:
    return lambda world: ["train", str(world / write(world, "given.toml", content))]


def deepspeed_file(content: object, **changes: object) -> Callable[[Path], list[str]]:
    def make(world: Path) -> list[str]:
        write(world, "ds.json", content if isinstance(content, str) else json.dumps(content))
        return train(world, deepspeed__config="ds.json", **changes)

    return make


def folder_that_is_a_file(world: Path) -> list[str]:
    return train(world, run__folder=str(world / "text.txt"))


PIPELINE = {"parallel__pipeline": 2, "model__num_hidden_layers": 4}

CASES = [
    Case("a run file that is not there", lambda world: ["train", str(world / "no.toml")], ("no.toml",)),
    Case("a run file that is a folder", lambda world: ["train", str(world / "tok")], ("tok",)),
    Case(
        "a run file in another encoding", run_file(b"[run]\nfolder = '\xff\xfe'\n"), ("given.toml", "UTF-8")
    ),
    Case("a run file that is no TOML", run_file("[run\nfolder = 3"), ("given.toml", "line 1")),
    Case("a misspelt key", setting("--training.setps", "5"), ("training.setps", "training.steps")),
    Case("a misspelt section", run_file("[trainig]\nsteps = 3\n"), ("trainig", "training")),
    Case("a word for a number", setting(training__steps="ten"), ("training.steps",)),
    Case("a flag without a value", setting("--training.steps"), ("--training.steps",)),
    Case("no tensor-parallel ranks", setting(parallel__tensor=0), ("parallel.tensor",)),
    Case("heads that do not divide", setting(parallel__tensor=3), ("parallel.tensor", "num_attention_heads")),
    Case("more stages than layers", setting(parallel__pipeline=2), ("parallel.pipeline", "layers")),
    Case(
        "a batch that does not divide",
        setting(training__global_batch_size=7),
        ("training.global_batch_size", "micro_batch_size"),
    ),
    Case(
        "fewer micro batches than stages",
        setting(**PIPELINE, training__micro_batch_size=8),
        ("parallel.schedule", "micro batch"),
    ),
    Case("a schedule of no such name", setting(parallel__schedule="1f2b"), ("parallel.schedule", "1f1b")),
    Case(
        "a V of three chunks",
        setting(**PIPELINE, parallel__schedule="zbv", parallel__virtual_stages=3),
        ("parallel.virtual_stages", "2"),
    ),
    Case(
        "layers of stages that do not add up",
        setting(**PIPELINE, parallel__layers_per_stage=[1, 2]),
        ("parallel.layers_per_stage", "4"),
    ),
    Case(
        "a sequence that ranks cannot split",
        setting(parallel__tensor=2, parallel__sequence=True, training__sequence_length=15),
        ("parallel.sequence", "sequence_length"),
    ),
    Case(
        "a sequence longer than the model's positions",
        setting(model__max_position_embeddings=8),
        ("training.sequence_length", "max_position_embeddings"),
    ),
    Case(
        "a compiled layer under a schedule that splits the backward",
        setting(**PIPELINE, parallel__schedule="zbv", training__compile=True),
        ("training.compile", "schedule"),
    ),
    Case("a family that nobody knows", setting(model__family="llamma"), ("model.family", "llama")),
    Case("a model's folder that is not there", setting(model__hf_config="nowhere"), ("model.hf_config",)),
    Case("an impossible beta", setting(optimizer__betas=[0.9, 1.5]), ("optimizer.betas",)),
    Case("a learning rate below zero", setting(optimizer__learning_rate=-1.0), ("optimizer.learning_rate",)),
    Case("dropout of everything", setting(model__residual_dropout=1.0), ("model.residual_dropout",)),
    Case(
        "a DeepSpeed file that is not there",
        setting(deepspeed__config="no.json"),
        ("deepspeed.config", "no.json"),
    ),
    Case("a DeepSpeed file that is no JSON", deepspeed_file("{'stage': 1}"), ("ds.json",)),
    Case("a DeepSpeed file that is a list", deepspeed_file([1]), ("ds.json",)),
    Case(
        "a ZeRO stage that there is not",
        deepspeed_file({"zero_optimization": {"stage": 4}}),
        ("zero_optimization.stage",),
    ),
    Case(
        "ZeRO 2 under a pipeline",
        deepspeed_file({"zero_optimization": {"stage": 2}}, **PIPELINE),
        ("zero_optimization.stage", "use 1, or parallel.pipeline 1"),
    ),
    Case(
        "two sizes of one batch",
        deepspeed_file({"train_batch_size": 64, "zero_optimization": {"stage": 1}}),
        ("train_batch_size", "64"),
    ),
    Case("a run folder that is a file", folder_that_is_a_file, ("run.folder", "text.txt")),
    Case("a checkpoint to resume that is not there", setting(checkpoint__resume="no/step-1"), ("no/step-1",)),
]
