"""torch's Schedule1F1B over a transformers model that is split in two; both stages hold the tied embedding."""

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers import llama
from benchmarks.peers.contender import PeerLayout, Start, Trained
from benchmarks.workload import SHAPE


def build(layout: PeerLayout, start: Start) -> Trained:
    torch.set_num_threads(start.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    share = SHAPE.num_hidden_layers // layout.pipeline
    part = llama.Part(range(rank * share, (rank + 1) * share), load_file(start.weights))
    stage = PipelineStage(part, rank, layout.pipeline, torch.device("cpu"))
    schedule = Schedule1F1B(stage, layout.micro_batches, loss_fn=llama.loss_of)
    optimizer = llama.adamw(part.parameters())
    input_ids, labels = llama.batch()
    tied = part.lm_head.weight if part.embed_tokens is None else part.embed_tokens.weight

    def step() -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(input_ids, return_outputs=False)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        clip_over_stages(part, tied)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return Trained(step)


def clip_over_stages(part: nn.Module, tied: nn.Parameter) -> None:
    """Add up the two gradients of the tied embedding, and clip by the norm of the whole model."""
    dist.all_reduce(tied.grad)
    counted = [each for each in part.parameters() if dist.get_rank() == 0 or each is not tied]
    square = llama.square_norm(counted)
    dist.all_reduce(square)
    llama.clip(part.parameters(), square)
