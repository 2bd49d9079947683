"""torch's DistributedDataParallel around a transformers model."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import llama
from benchmarks.peers.contender import PeerLayout, Start, Trained
from benchmarks.peers.plain_transformers import step_of


def build(layout: PeerLayout, start: Start) -> Trained:
    torch.set_num_threads(start.threads)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(llama.model(start.weights), gradient_as_bucket_view=True)
    return step_of(model, dist.get_rank(), layout.data)
