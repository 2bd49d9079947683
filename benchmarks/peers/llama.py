"""The model, batch, optimizer and clipping of every peer: those of benchmarks/workload.py, in transformers' form."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from benchmarks.workload import SEQUENCE_LENGTH, SEQUENCES, SETTINGS, SHAPE, token_ids
from megalite.convert.huggingface.export import as_family_tensor
from megalite.families.registry import family_tensors, hf_config
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split

LEARNING_RATE = 3e-4
EMBEDDING = "model.embed_tokens.weight"


def write_initial_weights(path: Path, shape: ModelShape = SHAPE) -> None:
    """Write megalite's initial weights for transformers."""
    replica = build_replica(shape, ParallelMesh.single(), pipeline_split(shape.num_hidden_layers, 1), seed=0)
    ours: dict[str, Tensor] = {}
    for parameter in replica.parameters:
        parts = replica.mesh.parts_of(parameter, replica.tensors[parameter.name].detach())
        ours |= {part.name: values for part, _, values in parts}
    theirs = {
        tensor.name: as_family_tensor(tensor, [ours[part] for part in tensor.parts]).contiguous()
        for tensor in family_tensors(shape)
    }
    save_file({name: tensor.clone() for name, tensor in theirs.items()}, path)


def config() -> LlamaConfig:
    return LlamaConfig(**{**hf_config(SHAPE, "float32", {}), "use_cache": False})


def model(weights: Path) -> LlamaForCausalLM:
    """All of it, ready to train."""
    built = LlamaForCausalLM(config())
    lacking = built.load_state_dict(load_file(weights), strict=False)
    assert not lacking.unexpected_keys and lacking.missing_keys in ([], ["lm_head.weight"]), lacking
    assert built.lm_head.weight is built.model.embed_tokens.weight
    return built.train()


def batch(
    rank: int = 0, ranks: int = 1, sequences: int = SEQUENCES, length: int = SEQUENCE_LENGTH
) -> tuple[Tensor, Tensor]:
    """This rank's share of the token ids, and of the labels, which are megalite's: the row rolled by one."""
    input_ids = token_ids(sequences, length).chunk(ranks)[rank].contiguous()
    return input_ids, input_ids.roll(-1, dims=1)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, object]]:
    """Weight decay on matrices only, as megalite has it."""
    known = list(parameters)
    return [
        {
            "params": [each for each in known if each.dim() > 1],
            "weight_decay": SETTINGS.optimizer.weight_decay,
        },
        {"params": [each for each in known if each.dim() == 1], "weight_decay": 0.0},
    ]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups(parameters), lr=LEARNING_RATE, betas=SETTINGS.optimizer.betas, eps=SETTINGS.optimizer.eps
    )


def clip(parameters: Iterable[nn.Parameter], square_of_norm: Tensor) -> None:
    """Clip by the norm of the whole model."""
    torch.nn.utils.clip_grads_with_norm_(
        parameters, SETTINGS.optimizer.gradient_clipping, square_of_norm.sqrt()
    )


def square_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]) ** 2


class Part(nn.Module):
    """Some consecutive layers, with the embedding before them or the norm and the head behind them."""

    def __init__(self, layers: range, state: Mapping[str, Tensor]):
        super().__init__()
        made = config()
        made._attn_implementation = "sdpa"
        first, last = layers.start == 0, layers.stop == SHAPE.num_hidden_layers
        size = (SHAPE.vocab_size, SHAPE.hidden_size)
        self.embed_tokens = nn.Embedding(*size) if first else None
        self.layers = nn.ModuleList(LlamaDecoderLayer(made, layer) for layer in layers)
        self.rotary_emb = LlamaRotaryEmbedding(made)
        self.norm = LlamaRMSNorm(SHAPE.hidden_size, SHAPE.rms_norm_eps) if last else None
        self.lm_head = nn.Linear(*reversed(size), bias=False) if last else None
        for index, layer in zip(layers, self.layers, strict=True):
            layer.load_state_dict(below(state, f"model.layers.{index}."))
        if self.embed_tokens is not None:
            self.embed_tokens.load_state_dict({"weight": state[EMBEDDING]})
        if self.norm is not None and self.lm_head is not None:
            self.norm.load_state_dict(below(state, "model.norm."))
            self.lm_head.load_state_dict({"weight": state[EMBEDDING]})

    def forward(self, inputs: Tensor) -> Tensor:
        hidden_states = inputs if self.embed_tokens is None else self.embed_tokens(inputs)
        positions = torch.arange(hidden_states.shape[1]).unsqueeze(0)
        rotations = self.rotary_emb(hidden_states, position_ids=positions)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=rotations, position_ids=positions)
        if self.norm is not None and self.lm_head is not None:
            return self.lm_head(self.norm(hidden_states))
        return hidden_states


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
