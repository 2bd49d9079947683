"""torch's fully_shard (FSDP2) of each layer and of the whole transformers model."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers import llama
from benchmarks.peers.contender import PeerLayout, Start, Trained
from benchmarks.peers.plain_transformers import step_of


def build(layout: PeerLayout, start: Start) -> Trained:
    torch.set_num_threads(start.threads)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (layout.data,))
    model = llama.model(start.weights)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return step_of(model, dist.get_rank(), layout.data)
