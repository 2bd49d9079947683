"""torch's parallelize_module by transformers' own plan; the tied embedding and the head are cut by vocabulary."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers import llama
from benchmarks.peers.contender import PeerLayout, Start, Trained

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def build(layout: PeerLayout, start: Start) -> Trained:
    torch.set_num_threads(start.threads)
    dist.init_process_group("gloo")
    model = llama.model(start.weights)
    plan = {f"model.{name}": STYLES[style]() for name, style in model.config.base_model_tp_plan.items()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, init_device_mesh("cpu", (layout.tensor,)), plan)
    model.lm_head.weight = model.model.embed_tokens.weight
    parameters = list(model.parameters())
    cut = [each for each in parameters if isinstance(each, DTensor)]
    whole = [each for each in parameters if not isinstance(each, DTensor)]
    optimizer = llama.adamw(parameters)
    input_ids, labels = llama.batch()

    def step() -> float:
        with loss_parallel():
            loss = llama.loss_of(model(input_ids=input_ids).logits, labels)
            loss.backward()
        square = llama.square_norm(cut).full_tensor() + llama.square_norm(whole)
        llama.clip(cut, DTensor.from_local(square, cut[0].device_mesh, [Replicate()]))
        llama.clip(whole, square)
        optimizer.step()
        optimizer.zero_grad()
        return float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach())

    return Trained(step)
