"""Train a Hugging Face model with DeepSpeed's engine, from a universal checkpoint and to a checkpoint of the engine.

From the repository's root: .venv/bin/deepspeed --num_gpus 2 examples/deepspeed/train.py --help
(without a GPU: torchrun --nproc-per-node 2 in place of deepspeed --num_gpus 2)
"""

import argparse
from pathlib import Path

import deepspeed
import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megalite.data.files.token_file import token_dtype

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
    },
    "steps_per_print": 1_000_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the model's config.json, or its folder")
    parser.add_argument(
        "--tokens", type=Path, required=True, help="the .bin of a token file that megalite prepared"
    )
    parser.add_argument("--steps", type=int, default=20, help="number of steps to train")
    parser.add_argument("--load", help="universal checkpoint to load")
    parser.add_argument("--save", help="folder to save the engine's checkpoint to")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
    config = {**CONFIG, "checkpoint": {"load_universal": options.load is not None}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if options.load:
        engine.load_checkpoint(options.load)
        if engine.zero_optimization_stage() == 3:
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = torch.tensor(float(state["step"]))

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows, length = CONFIG["train_micro_batch_size_per_gpu"], model.config.max_position_embeddings
    tokens = numpy.memmap(options.tokens, dtype=token_dtype(model.config.vocab_size), mode="r")
    last = engine.global_steps + options.steps
    for step in range(engine.global_steps, last):
        start = (step * world + rank) * rows * length % (len(tokens) - rows * length)
        batch = torch.from_numpy(tokens[start : start + rows * length].astype(numpy.int64))
        batch = batch.view(rows, length).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step + 1 == last or step % 5 == 0):
            print(f"step {step + 1}  loss {loss.item():.3f}", flush=True)
    if options.save:
        engine.save_checkpoint(options.save)


if __name__ == "__main__":
    main()
