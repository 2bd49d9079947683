"""DeepSpeed's PipelineEngine over transformers' layers; the embedding and the head are one tied layer."""

import itertools

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from benchmarks.peers import llama
from benchmarks.peers.contender import PeerLayout, Start, Trained
from benchmarks.peers.deepspeed_zero import settings
from benchmarks.workload import SHAPE

State = dict[str, Tensor]


def build(layout: PeerLayout, start: Start) -> Trained:
    torch.set_num_threads(start.threads)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    state = load_file(start.weights)
    layers = [
        TiedLayerSpec("embedding", Embedding, state),
        *(LayerSpec(Layer, index, state) for index in range(SHAPE.num_hidden_layers)),
        LayerSpec(Norm, state),
        TiedLayerSpec("embedding", Embedding, state, forward_fn=_logits),
    ]
    module = PipelineModule(layers, num_stages=layout.pipeline, loss_fn=llama.loss_of)
    parameters = llama.groups(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=settings(layout))
    input_ids, labels = llama.batch()
    micro_batches = itertools.cycle(zip(input_ids.split(1), labels.split(1), strict=True))
    return Trained(lambda: float(engine.train_batch(micro_batches)))


class Embedding(nn.Module):
    def __init__(self, state: State):
        super().__init__()
        self.weight = nn.Parameter(state[llama.EMBEDDING])

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(input_ids, self.weight)


def _logits(module: Embedding, hidden_states: Tensor) -> Tensor:
    return nn.functional.linear(hidden_states, module.weight)


class Layer(LlamaDecoderLayer):
    """A layer that makes its own rotary angles: only hidden states travel between layers."""

    def __init__(self, index: int, state: State):
        config = llama.config()
        config._attn_implementation = "sdpa"
        super().__init__(config, index)
        self.load_state_dict(llama.below(state, f"model.layers.{index}."))
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        positions = torch.arange(hidden_states.shape[1]).unsqueeze(0)
        rotations = self.rotary_emb(hidden_states, position_ids=positions)
        return super().forward(hidden_states, position_embeddings=rotations, position_ids=positions)


class Norm(LlamaRMSNorm):
    def __init__(self, state: State):
        super().__init__(SHAPE.hidden_size, SHAPE.rms_norm_eps)
        self.load_state_dict(llama.below(state, "model.norm."))
