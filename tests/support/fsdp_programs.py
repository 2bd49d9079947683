"""FSDP2 programs on two ranks: Hugging Face's Llama in a script's own state dict, and a Llama as torchtitan has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.families.registry import hf_config
from megalite.topology.shape import ModelShape
from tests.support.next_step import token_rows

STEPS, LEARNING_RATE, BETAS, EPS, DECAY, CLIP = 3, 3e-3, (0.9, 0.98), 1e-6, 0.1, 0.5
OPTIMIZER = {
    "optimizer__learning_rate": LEARNING_RATE,
    "optimizer__betas": list(BETAS),
    "optimizer__eps": EPS,
    "optimizer__weight_decay": DECAY,
    "optimizer__gradient_clipping": CLIP,
}


def _rotated_pairs(x: Tensor, base: float) -> Tensor:
    """Rotate neighbouring pairs of [B, S, heads, head_dim], as complex numbers (torchtitan, Meta's Llama)."""
    size, length = x.shape[-1], x.shape[1]
    frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    turned = (
        torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.view_as_real(turned).flatten(-2)


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        inner, outer = shape.hidden_size, shape.head_dim
        self.wq = nn.Linear(inner, shape.num_attention_heads * outer, bias=False)
        self.wk = nn.Linear(inner, shape.num_key_value_heads * outer, bias=False)
        self.wv = nn.Linear(inner, shape.num_key_value_heads * outer, bias=False)
        self.wo = nn.Linear(shape.num_attention_heads * outer, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, self.shape.head_dim)) for each in (self.wq, self.wk, self.wv)
        )
        query, key = (_rotated_pairs(each, self.shape.rope_theta) for each in (query, key))
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.wo(mixed.transpose(1, 2).flatten(-2)))


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.w1 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.w2 = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.w3 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.silu(self.w1(x)) * self.w3(x)))


class _Block(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.attention, self.feed_forward = _Attention(shape), _FeedForward(shape)
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return cast(Tensor, x + self.feed_forward(self.ffn_norm(x)))


class TitanLlama(nn.Module):
    """A Llama with torchtitan's names, layers and rotary embedding."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleDict({str(layer): _Block(shape) for layer in range(shape.num_hidden_layers)})
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.output = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok_embeddings(input_ids)
        for layer in self.layers.values():
            x = layer(x)
        return cast(Tensor, self.output(self.norm(x)))


class HuggingFaceLlama(nn.Module):
    """A wrapper of a script around transformers' model."""

    def __init__(self, shape: ModelShape):
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        config = hf_config(shape, "float32", {})
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), attn_implementation="sdpa"
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        return cast(Tensor, self.model(input_ids=input_ids).logits)


def _titan_state(model: nn.Module, optimizer: Any, scheduler: Any, step: int) -> dict[str, Any]:
    """torchtitan's components/checkpoint.py: the model without a prefix, the optimizer flattened."""
    from torch.distributed.checkpoint import state_dict as of

    options = of.StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **of.get_model_state_dict(model),
        "optimizer": of.get_optimizer_state_dict(model, optimizer, options=options),
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": torch.tensor(step), "ntokens_seen": torch.tensor(step * 96)},
        "dataloader": {"dp_rank_0": b"not read"},
    }


def _script_state(model: nn.Module, optimizer: Any, scheduler: Any, step: int) -> dict[str, Any]:
    """The tutorial of torch.distributed.checkpoint: an `app` with both state dicts."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"app": {"model": model_state, "optim": optimizer_state, "step": step}}


PROGRAMS: dict[str, tuple[Callable[[ModelShape], nn.Module], Callable[..., dict[str, Any]]]] = {
    "torchtitan": (TitanLlama, _titan_state),
    "hugging face": (HuggingFaceLlama, _script_state),
}


def run_program(program: str, shape: ModelShape, folder: str) -> None:
    """Train on each rank of the current group, save with torch.distributed.checkpoint, and make one more step.

    Beside the folder `step-3` stands truth.pt: the state before and after that step, its loss and gradient norm.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as of
    from torch.distributed.fsdp import fully_shard

    build, state_of = PROGRAMS[program]
    torch.manual_seed(3)
    model = build(shape)
    layers = model.layers.values() if isinstance(model, TitanLlama) else model.model.model.layers  # type: ignore[union-attr]
    for layer in layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    vectors = {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0}
    # torchtitan has one group: norms decay too.
    groups = [*model.parameters()] if isinstance(model, TitanLlama) else [{"params": matrices}, vectors]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    whole = of.StateDictOptions(full_state_dict=True, cpu_offload=True)

    def step(index: int) -> tuple[float, float]:
        tokens = token_rows(shape, index)
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = cast(Any, torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)).full_tensor()
        optimizer.step()
        scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size(), float(norm)

    for index in range(STEPS):
        step(index)
    dcp.save(state_of(model, optimizer, scheduler, STEPS), checkpoint_id=f"{folder}/step-{STEPS}")
    before = of.get_model_state_dict(model, options=whole)
    moments = of.get_optimizer_state_dict(model, optimizer, options=whole).get("state")
    input_ids = token_rows(shape, STEPS)
    with torch.no_grad():
        logits = model(input_ids)
    loss, norm = step(STEPS)
    after = of.get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        output = {"input_ids": input_ids, "logits": logits}
        truth = {**output, "before": before, "moments": moments, "loss": loss, "norm": norm, "after": after}
        torch.save(truth, Path(folder) / "truth.pt")
