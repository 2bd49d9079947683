"""DeepSpeed's ZeRO around a transformers model, with the operators that DeepSpeed builds on first use."""

from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from benchmarks.peers import llama
from benchmarks.peers.contender import PeerLayout, Start, Trained
from benchmarks.workload import SETTINGS


def build(layout: PeerLayout, start: Start) -> Trained:
    torch.set_num_threads(start.threads)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = llama.model(start.weights)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=llama.groups(model.parameters()), config=settings(layout)
    )
    input_ids, labels = llama.batch(dist.get_rank(), layout.data)

    def step() -> float:
        loss = engine(input_ids=input_ids, labels=labels, shift_labels=labels).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    def save(folder: Path) -> None:
        engine.save_checkpoint(str(folder))

    def load(folder: Path) -> None:
        engine.load_checkpoint(str(folder))

    return Trained(step, save, load)


def settings(layout: PeerLayout) -> dict[str, object]:
    """DeepSpeed's JSON."""
    adamw = {"lr": llama.LEARNING_RATE, "betas": SETTINGS.optimizer.betas, "eps": SETTINGS.optimizer.eps}
    return {
        "train_micro_batch_size_per_gpu": 4 // (layout.data * layout.micro_batches),
        "gradient_accumulation_steps": layout.micro_batches,
        "gradient_clipping": SETTINGS.optimizer.gradient_clipping,
        "zero_optimization": {"stage": layout.zero},
        "optimizer": {"type": "AdamW", "params": adamw},
        "steps_per_print": 1_000_000,
    }
