"""The training step that all benchmarks share: a 17M Llama, batch 4 x 256, float32, AdamW with clipping."""

import time
from collections.abc import Callable

import torch

from megalite.model.stages import build_stage
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import PipelineShapes, StepBatch, pipeline_runner
from megalite.topology.layout import pipeline_split
from megalite.topology.parameters import ModelShape, stage_parameters
from megalite.train.optimizer import OptimizerSettings, TorchOptimizer

SEQUENCES, SEQUENCE_LENGTH = 4, 256
TOKENS = SEQUENCES * SEQUENCE_LENGTH
SHAPE = ModelShape(
    vocab_size=16384,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=6,
    head_dim=64,
    max_position_embeddings=SEQUENCE_LENGTH,
    tie_word_embeddings=True,
)
SETTINGS = OptimizerSettings("adamw", (0.9, 0.95), 1e-8, 0.1, 0.0, 1.0)
WARM_UP_STEPS, TIMED_STEPS = 3, 8


def token_ids() -> torch.Tensor:
    return torch.randint(
        SHAPE.vocab_size, (SEQUENCES, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(0)
    )


def megalite_step(mesh: ParallelMesh, *, micro_batches: int = 1) -> Callable[[], float]:
    """One training step of this rank's share of the batch on the torch optimizer path; returns the loss."""
    split = pipeline_split(SHAPE.num_hidden_layers, mesh.layout.pipeline)
    stage = build_stage(SHAPE, mesh, split, seed=0)
    optimizer = TorchOptimizer(stage, list(stage_parameters(SHAPE, split, mesh.at.pp)), mesh, SETTINGS)
    mine = SEQUENCES // mesh.dp.size
    shapes = PipelineShapes(micro_batches, SHAPE.hidden_size, torch.float32, torch.float32)
    runner = pipeline_runner(stage.chunks, split, mesh, shapes, schedule="1f1b", forward=optimizer.forward)
    input_ids = token_ids()[mesh.dp.rank * mine : (mesh.dp.rank + 1) * mine]
    positions = torch.arange(SEQUENCE_LENGTH).repeat(mine, 1)
    labels, mask = input_ids.roll(-1, dims=1), torch.ones(input_ids.shape)
    batch = StepBatch(
        input_ids, positions, labels, mask, torch.arange(SEQUENCES)[mesh.dp.rank * mine :][:mine]
    )

    def step() -> float:
        with optimizer.accumulating():
            loss = runner.forward_backward(batch)
        optimizer.step(3e-4)
        return loss

    return step


def transformers_step() -> Callable[[], float]:
    """The same step as its users write it: the model's own loss, torch's clipping and AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE.vocab_size,
            hidden_size=SHAPE.hidden_size,
            intermediate_size=SHAPE.intermediate_size,
            num_hidden_layers=SHAPE.num_hidden_layers,
            num_attention_heads=SHAPE.num_attention_heads,
            num_key_value_heads=SHAPE.num_key_value_heads,
            max_position_embeddings=SEQUENCE_LENGTH,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    input_ids = token_ids()

    def step() -> float:
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def step_seconds(step: Callable[[], float]) -> list[float]:
    """Seconds of each timed step, after the warm-up."""
    seconds = []
    for index in range(WARM_UP_STEPS + TIMED_STEPS):
        started = time.perf_counter()
        step()
        if index >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - started)
    return seconds
