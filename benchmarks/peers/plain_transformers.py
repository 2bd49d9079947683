"""transformers in one process: the model's own loss, torch's clipping and AdamW."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.peers import llama
from benchmarks.peers.contender import PeerLayout, Start, Trained


def build(layout: PeerLayout, start: Start) -> Trained:
    torch.set_num_threads(start.threads)
    model = llama.model(start.weights)
    return step_of(model, 0, 1)


def step_of(model: torch.nn.Module, rank: int, ranks: int) -> Trained:
    """A step of a transformers model, or of what wraps it; torch.distributed.checkpoint saves it."""
    optimizer = llama.adamw(model.parameters())
    input_ids, labels = llama.batch(rank, ranks)

    def step() -> float:
        loss = model(input_ids=input_ids, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"weights": weights, "optimizer": moments}

    def save(folder: Path) -> None:
        checkpoint.save(state(), checkpoint_id=folder)

    def load(folder: Path) -> None:
        kept = state()
        checkpoint.load(kept, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=kept["weights"], optim_state_dict=kept["optimizer"])

    return Trained(step, save, load)
