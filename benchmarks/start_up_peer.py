"""A peer of benchmarks/start_up.py, as users write one: transformers' Llama under torch's DDP or DeepSpeed's ZeRO 1.

    torchrun --nproc-per-node 8 -m benchmarks.start_up_peer ddp TOKENS.bin

Trains on the token file until it is killed; rank 0 prints a line after each step.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.start_up_model import MODEL, SEQUENCE_LENGTH, SEQUENCES_PER_RANK

LEARNING_RATE = 3e-4


def batches(tokens: Path, rank: int, ranks: int) -> Iterator[Tensor]:
    """This rank's batches, [SEQUENCES_PER_RANK, SEQUENCE_LENGTH] int64."""
    ids = np.memmap(tokens, np.uint16, mode="r")
    size = SEQUENCES_PER_RANK * SEQUENCE_LENGTH
    for place in range(rank, len(ids) // size, ranks):
        yield torch.from_numpy(ids[place * size : (place + 1) * size].astype(np.int64)).view(
            SEQUENCES_PER_RANK, SEQUENCE_LENGTH
        )


def ddp(model: LlamaForCausalLM) -> Callable[[Tensor], None]:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(ids: Tensor) -> None:
        wrapped(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero(model: LlamaForCausalLM) -> Callable[[Tensor], None]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES_PER_RANK,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        # torch's AdamW: DeepSpeed's own would be compiled first.
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: Tensor) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["ddp", "zero"])
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--local_rank", help="added by deepspeed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, use_cache=False)).train()
    step = ddp(model) if arguments.kind == "ddp" else zero(model)
    for number, ids in enumerate(batches(arguments.tokens, dist.get_rank(), dist.get_world_size()), start=1):
        step(ids)
        if os.environ["RANK"] == "0":
            print(f"step {number}", flush=True)


if __name__ == "__main__":
    main()
