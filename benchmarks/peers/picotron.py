"""picotron (github.com/huggingface/picotron) on a CPU, from a checkout: its model and its four ways to be parallel.

It has no tied embedding and no clipping; both are added as its user would write them, so that all do the same work.
Its attention is torch's scaled_dot_product_attention, with context parallelism its own ring over consecutive parts of a
sequence; flash_attn, which its model imports, is never called.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.peers import llama
from benchmarks.peers.contender import PeerLayout, Start, Trained
from benchmarks.peers.torch_pipeline import clip_over_stages
from benchmarks.workload import SEQUENCE_LENGTH, SHAPE

ON_A_CPU = {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32"}
FLASH_ATTENTION = {
    "flash_attn.flash_attn_interface": "flash_attn_func",
    "flash_attn.layers.rotary": "apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
}
CUT_BY_ROWS = ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "embedding", "final_proj")


def build(layout: PeerLayout, start: Start) -> Trained:
    torch.set_num_threads(start.threads)
    dist.init_process_group("gloo")
    assert start.picotron is not None
    _make_importable(start.picotron)
    from picotron.model import Llama
    from picotron.process_group_manager import setup_process_group_manager

    setup_process_group_manager(layout.tensor, layout.context, layout.pipeline, layout.data)
    os.environ["CONTEXT_PARALLEL"] = "1" if layout.context > 1 else "0"
    model = Llama(_config(layout.length))
    state = _renamed(load_file(start.weights))
    if layout.tensor > 1:
        return _tensor(model, state)
    model.load_state_dict(state)
    return _pipeline(model, layout) if layout.pipeline > 1 else _data(model, layout)


def _make_importable(folder: Path) -> None:
    os.environ.update(ON_A_CPU)
    sys.path.insert(0, str(folder))
    for name, function in FLASH_ATTENTION.items():
        module = ModuleType(name)
        setattr(module, function, None)
        sys.modules[name] = module
    torch.cuda.synchronize = lambda *_: None  # it calls this after each transfer between ranks


def _config(length: int) -> SimpleNamespace:
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "rms_norm_eps", "rope_theta")
    sizes = {name: getattr(SHAPE, name) for name in fields + more}
    return SimpleNamespace(**sizes, max_position_embeddings=length)


def _renamed(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' names in picotron's words."""
    words = {
        "model.layers.": "decoder_layers.",
        "self_attn.o_proj": "attention.out_proj",
        "self_attn.": "attention.",
        "model.norm.": "final_norm.",
        "model.embed_tokens.": "embedding.",
    }
    state = {}
    for name, tensor in theirs.items():
        for old, new in words.items():
            name = name.replace(old, new)
        state[name] = tensor
    state["final_proj.weight"] = state["embedding.weight"]
    return state


def _data(model: Any, layout: PeerLayout) -> Trained:
    from picotron.data_parallel.data_parallel import DataParallelBucket

    model.final_proj.weight = model.embedding.weight
    wrapped = DataParallelBucket(model)
    optimizer = llama.adamw(wrapped.parameters())
    if layout.context > 1:
        whole = llama.batch(sequences=layout.sequences, length=layout.length)
        input_ids, labels = (
            each.chunk(layout.context, dim=1)[dist.get_rank()].contiguous() for each in whole
        )
    else:
        input_ids, labels = llama.batch(dist.get_rank(), layout.data)

    def step() -> float:
        optimizer.zero_grad()
        loss = llama.loss_of(wrapped(input_ids=input_ids), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        wrapped.reset()
        return float(loss.detach())

    return Trained(step)


def _tensor(model: Any, state: dict[str, Tensor]) -> Trained:
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

    model = apply_tensor_parallel(model)
    rank, size = dist.get_rank(), dist.get_world_size()

    def mine(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return tensor
        return tensor.chunk(size, dim=0 if name.split(".")[-2] in CUT_BY_ROWS else 1)[rank]

    model.load_state_dict({name: mine(name, tensor) for name, tensor in state.items()})
    model.final_proj.weight = model.embedding.weight
    parameters = list(model.parameters())
    optimizer = llama.adamw(parameters)
    input_ids, labels = llama.batch()

    def step() -> float:
        optimizer.zero_grad()
        loss = llama.loss_of(model(input_ids=input_ids), labels)
        loss.backward()
        square = llama.square_norm(each for each in parameters if each.dim() > 1)
        dist.all_reduce(square)
        llama.clip(parameters, square + llama.square_norm(each for each in parameters if each.dim() == 1))
        optimizer.step()
        return float(loss.detach())

    return Trained(step)


def _pipeline(model: Any, layout: PeerLayout) -> Trained:
    from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b

    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stage = PipelineParallel(model, model.model_config)  # draws its weights anew
    stage.load_state_dict({name: kept[name] for name in stage.state_dict()})
    optimizer = llama.adamw(stage.parameters())
    batches = _MicroBatches(layout.micro_batches)
    shapes = (1, SEQUENCE_LENGTH, SHAPE.hidden_size)
    first = dist.get_rank() == 0
    tied: nn.Parameter = (stage.embedding if first else stage.final_proj).weight

    def step() -> float | None:
        optimizer.zero_grad()
        loss = train_step_pipeline_1f1b(stage, batches, shapes, torch.device("cpu"), torch.float32)
        clip_over_stages(stage, tied)
        optimizer.step()
        return None if first else float(loss)

    return Trained(step)


class _MicroBatches:
    """picotron's data loader: one sequence at a time."""

    def __init__(self, count: int):
        self.grad_acc_steps = count
        input_ids, labels = llama.batch()
        self._pairs = itertools.cycle(zip(input_ids.split(1), labels.split(1), strict=True))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        input_ids, target_ids = next(self._pairs)
        positions = torch.arange(SEQUENCE_LENGTH).expand_as(input_ids)
        return {"input_ids": input_ids, "target_ids": target_ids, "position_ids": positions}
