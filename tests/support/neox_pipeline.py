"""A toy GPT-NeoX or Megatron-DeepSpeed model, GPT or Llama, trained and saved by DeepSpeed's own pipeline engine.

Layers, names, cuts over model-parallel ranks and arithmetic are those of the programs' source; nothing of megalite's
model or readers is used. `run_engine` runs on every rank of a gloo group of pipeline x data x model ranks.
"""

import json
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

SEQUENCES, LENGTH = 8, 12
VOCABULARY, PADDED = 100, 104
HIDDEN, HEADS, LAYERS, POSITIONS = 32, 4, 4, 16
ADAM = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}
CLIPPING = 0.5


@dataclass(frozen=True)
class Toy:
    """program: "neox", "neox 1" with the older names of the MLP, or "megatron". gated: "" or the gate's activation."""

    program: str = "neox"
    pipeline: int = 2
    model: int = 1
    data: int = 1
    kv_heads: int = HEADS
    parallel: bool = True
    rotary: float = 0.5
    rms: bool = False
    gated: bool = False
    biases: bool = True
    tied: bool = False
    precision: str = "fp32"
    stage: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.model * self.data

    @property
    def learned(self) -> bool:
        return self.rotary == 0

    @property
    def tanh(self) -> bool:
        """Whether GELU is approximated by tanh, as GPT-2 has it."""
        return self.learned or self.program == "megatron"

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of a GPT-NeoX configuration file."""
        old_gate = (
            {"mlp_type": "llama", "activation": "silu"}
            if self.program == "neox 1"
            else {"activation": "swiglu"}
        )
        return {
            "pipe-parallel-size": self.pipeline,
            "model-parallel-size": self.model,
            "num-layers": LAYERS,
            "hidden-size": HIDDEN,
            "num-attention-heads": HEADS,
            **({"num-kv-heads": self.kv_heads} if self.kv_heads != HEADS else {}),
            "seq-length": LENGTH,
            "max-position-embeddings": POSITIONS,
            "norm": "rmsnorm" if self.rms else "layernorm",
            **({"rms_norm_epsilon": 0.00001} if self.rms else {}),
            "pos-emb": "learned" if self.learned else "rotary",
            **({} if self.learned else {"rotary-pct": self.rotary}),
            "bias-gelu-fusion": self.tanh,
            "gpt-j-residual": self.parallel,
            "no-weight-tying": not self.tied,
            **({"use_bias_in_attn_linear": False, "use_bias_in_mlp": False} if not self.biases else {}),
            **(old_gate if self.gated else {}),
            "attention-config": [[["flash"], LAYERS]],
        }

    @property
    def arguments(self) -> Any:
        """The `args` of its model_states."""
        if self.program != "megatron":
            few = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
            return {**few, "max_position_embeddings": POSITIONS, "padded_vocab_size": PADDED}
        return Namespace(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_key_value_heads=self.kv_heads,
            ffn_hidden_size=2 * HIDDEN,
            max_position_embeddings=POSITIONS,
            padded_vocab_size=PADDED,
            normalization="rmsnorm" if self.rms else "layernorm",
            layernorm_epsilon=1e-5,
            use_rotary_position_embeddings=not self.learned,
            add_position_embedding=self.learned,
            rope_theta=10000,
            rotary_percent=1.0,
            swiglu=self.gated,
            add_bias_linear=self.biases,
            bias_gelu_fusion=self.biases and not self.gated,
            untie_embeddings_and_output_weights=not self.tied,
            num_experts=[1],
            deepspeed_config_dict={"zero_optimization": {"stage": self.stage}},
        )


class _Sum(torch.autograd.Function):
    """forward: sum over model-parallel ranks, or backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any, forward: bool) -> Tensor:
        ctx.group, ctx.forward = group, forward
        return _all_reduced(values, group) if forward else values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] if ctx.forward else _all_reduced(gradients[0], ctx.group), None, None


def _all_reduced(values: Tensor, group: Any) -> Tensor:
    if group is None:
        return values
    values = values.clone()
    dist.all_reduce(values, group=group)
    return values


class _Gather(torch.autograd.Function):
    """Concatenate the last dim of all model-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.ranks = dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty_like(values) for _ in range(ctx.ranks)]
        dist.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].chunk(ctx.ranks, -1)[ctx.rank].contiguous(), None


@dataclass(frozen=True)
class Ranks:
    """The model-parallel group of this rank; None: there is one rank."""

    group: Any
    rank: int
    size: int

    def linear(self, outputs: int, inputs: int, *, rows: bool, bias: bool) -> nn.Linear:
        """A linear whose rows are cut over the ranks, or its columns."""
        made = nn.Linear(
            inputs // (1 if rows else self.size), outputs // (self.size if rows else 1), bias=bias
        )
        made.weight.model_parallel = self.size > 1  # type: ignore[assignment]
        if bias:
            made.bias.model_parallel = rows and self.size > 1  # type: ignore[assignment]
        return made

    def spread(self, values: Tensor) -> Tensor:
        return _Sum.apply(values, self.group, False)  # type: ignore[no-any-return]

    def sum(self, values: Tensor) -> Tensor:
        return _Sum.apply(values, self.group, True)  # type: ignore[no-any-return]


class _RMSNorm(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.Parameter(torch.ones(HIDDEN)))

    def forward(self, values: Tensor) -> Tensor:
        wide = values.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (getattr(self, self.name) * normed).to(values.dtype)


def _norm(toy: Toy) -> nn.Module:
    if not toy.rms:
        return nn.LayerNorm(HIDDEN, eps=1e-5)
    return _RMSNorm("weight" if toy.program == "megatron" else "scale")


class Embedding(nn.Module):
    def __init__(self, toy: Toy, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.word_embeddings = nn.Embedding(PADDED // ranks.size, HIDDEN)
        self.word_embeddings.weight.model_parallel = ranks.size > 1  # type: ignore[assignment]
        if toy.learned:
            self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.word_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        own = self.word_embeddings.num_embeddings
        local = ids - own * self.ranks.rank
        outside = (local < 0) | (local >= own)
        values = self.word_embeddings(local.masked_fill(outside, 0)).masked_fill(outside[..., None], 0.0)
        values = self.ranks.sum(values)
        if hasattr(self, "position_embeddings"):
            values = values + self.position_embeddings(torch.arange(ids.shape[1]))
        return values


def _rotated(values: Tensor, share: float) -> Tensor:
    """values: [B, S, heads, head]."""
    size = int(values.shape[-1] * share)
    turned, rest = values[..., :size], values[..., size:]
    frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(values.shape[1]).float(), frequencies)
    angles = torch.cat((angles, angles), -1)[:, None].to(torch.float64)
    first, second = turned.chunk(2, -1)
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


class Attention(nn.Module):
    def __init__(self, toy: Toy, ranks: Ranks) -> None:
        super().__init__()
        self.toy, self.ranks = toy, ranks
        rows = HIDDEN + 2 * toy.kv_heads * (HIDDEN // HEADS)
        self.query_key_value = ranks.linear(rows, HIDDEN, rows=True, bias=toy.biases)
        self.dense = ranks.linear(HIDDEN, HIDDEN, rows=False, bias=toy.biases)

    def _split(self, mixed: Tensor) -> list[Tensor]:
        """Query, key and value [B, S, heads, head] of this rank."""
        heads, groups, head = HEADS // self.ranks.size, self.toy.kv_heads // self.ranks.size, HIDDEN // HEADS
        if heads == groups or self.toy.program == "megatron":
            each = heads // groups
            by_group = mixed.unflatten(-1, (groups, each + 2, head))
            parts = by_group.split((each, 1, 1), -2)
        elif self.toy.program == "neox 1":
            part = head * groups // heads
            parts = mixed.unflatten(-1, (heads, -1)).split((head, part, part), -1)
        else:
            parts = mixed.split((heads * head, groups * head, groups * head), -1)
        return [part.reshape(*mixed.shape[:2], -1, head) for part in parts]

    def forward(self, values: Tensor) -> Tensor:
        """Without the bias of `dense`, and before the sum over ranks."""
        query, key, value = self._split(self.query_key_value(self.ranks.spread(values)))
        if not self.toy.learned:
            query, key = _rotated(query, self.toy.rotary), _rotated(key, self.toy.rotary)
        repeats = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(HIDDEN // HEADS)
        future = torch.ones(values.shape[1], values.shape[1], dtype=torch.bool).triu(1)
        shares = scores.float().masked_fill(future, float("-inf")).softmax(-1).to(values.dtype)
        context = torch.einsum("bhqk,bkhd->bqhd", shares, value).flatten(2)
        return functional.linear(context, self.dense.weight)


class MLP(nn.Module):
    def __init__(self, toy: Toy, ranks: Ranks) -> None:
        super().__init__()
        self.toy, self.ranks = toy, ranks
        self.separate = toy.program == "neox 1" and toy.gated
        names = ("linear1", "linear2") if toy.program == "neox" else ("dense_h_to_4h", "dense_4h_to_h")
        wide = 2 * HIDDEN
        self.up, self.down = ("w3", "w2") if self.separate else names
        if self.separate:
            self.w1 = ranks.linear(wide, HIDDEN, rows=True, bias=False)
        fused = toy.gated and not self.separate
        setattr(self, self.up, ranks.linear(2 * wide if fused else wide, HIDDEN, rows=True, bias=toy.biases))
        setattr(self, self.down, ranks.linear(HIDDEN, wide, rows=False, bias=toy.biases))

    def forward(self, values: Tensor) -> Tensor:
        """Without the bias of the second linear, and before the sum over ranks."""
        values = self.ranks.spread(values)
        up = getattr(self, self.up)(values)
        if self.separate:
            up = functional.silu(self.w1(values)) * up
        elif self.toy.gated and self.toy.program == "megatron":
            gate, up = up.chunk(2, -1)
            up = functional.silu(gate) * up
        elif self.toy.gated:
            up, gate = up.chunk(2, -1)
            up = functional.silu(gate) * up
        else:
            up = functional.gelu(up, approximate="tanh" if self.toy.tanh else "none")
        return functional.linear(up, getattr(self, self.down).weight)

    @property
    def output_bias(self) -> Tensor | None:
        return getattr(self, self.down).bias  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    def __init__(self, toy: Toy, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.parallel = ranks, toy.parallel
        self.input_layernorm = _norm(toy)
        self.own = "self_attention" if toy.program == "megatron" else "attention"
        setattr(self, self.own, Attention(toy, ranks))
        self.post_attention_layernorm = _norm(toy)
        self.mlp = MLP(toy, ranks)

    def forward(self, values: Tensor) -> Tensor:
        attention = getattr(self, self.own)
        biases = (attention.dense.bias, self.mlp.output_bias)
        plus = [0.0 if bias is None else bias for bias in biases]
        if self.parallel:
            both = attention(self.input_layernorm(values)) + plus[0]
            both = both + self.mlp(self.post_attention_layernorm(values)) + plus[1]
            return values + self.ranks.sum(both)  # type: ignore[no-any-return]
        values = values + self.ranks.sum(attention(self.input_layernorm(values))) + plus[0]
        return values + self.ranks.sum(self.mlp(self.post_attention_layernorm(values))) + plus[1]  # type: ignore[no-any-return]


class NormPipe(nn.Module):
    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.norm = _norm(toy)

    def forward(self, values: Tensor) -> Tensor:
        return self.norm(values)  # type: ignore[no-any-return]


class Head(nn.Module):
    def __init__(self, toy: Toy, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.name = ranks, "lm_head" if toy.program == "megatron" else "final_linear"
        setattr(self, self.name, ranks.linear(PADDED, HIDDEN, rows=True, bias=False))

    def forward(self, values: Tensor) -> Tensor:
        return _logits(values, getattr(self, self.name).weight, self.ranks)


def _logits(values: Tensor, weight: Tensor, ranks: Ranks) -> Tensor:
    logits = functional.linear(ranks.spread(values), weight)
    return logits if ranks.group is None else _Gather.apply(logits, ranks.group)  # type: ignore[no-any-return]


def _layers(toy: Toy, ranks: Ranks) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    def tied_logits(embedding: Embedding, values: Tensor) -> Tensor:
        return _logits(values, embedding.word_embeddings_weight, ranks)

    def embedding(**more: Any) -> Any:
        if not toy.tied:
            return LayerSpec(Embedding, toy, ranks)
        return TiedLayerSpec(
            "embed", Embedding, toy, ranks, tied_weight_attr="word_embeddings_weight", **more
        )

    blocks = [LayerSpec(TransformerLayer, toy, ranks) for _ in range(LAYERS)]
    head = embedding(forward_fn=tied_logits) if toy.tied else LayerSpec(Head, toy, ranks)
    if toy.program == "megatron":
        return [_unchanged, embedding(), *blocks, _final_norm(toy), head]
    return [embedding(), _unchanged, *blocks, _unchanged, LayerSpec(NormPipe, toy), head]


def _final_norm(toy: Toy) -> Any:
    from deepspeed.pipe import LayerSpec

    return LayerSpec(_RMSNorm, "weight") if toy.rms else LayerSpec(nn.LayerNorm, HIDDEN, eps=1e-5)


def _unchanged(values: Tensor) -> Tensor:
    return values


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def ids_of(step: int) -> Tensor:
    """The tokens [sequences, length + 1] of a step, the same for every program."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)


def _micro_batches(step: int, toy: Toy, data_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    for ids in ids_of(step).chunk(toy.data)[data_rank].split(2):
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class EngineRun:
    """The result of one rank: loss and gradient norm of every step; the rest as of the saved step.

    states: name in the pipeline module -> master, exp_avg, exp_avg_sq of this model rank, whole. logits: of the first
    two sequences of the next step [2, length, padded vocabulary], on the last stage.
    """

    stage: int
    model_rank: int
    steps: list[tuple[float, float]]
    states: dict[str, tuple[Tensor, Tensor, Tensor]]
    logits: Tensor | None


def run_engine(toy: Toy, folder: str, saved: int, end: int) -> EngineRun:
    """Train from step 0 to `end` and save after `saved`."""
    import deepspeed

    # It would be compiled here, and gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, place = _engine(toy)
    run = EngineRun(place.pipe, place.model, [], {}, None)
    for step in range(end):
        loss = engine.train_batch(_micro_batches(step, toy, place.data))
        norm = engine.get_global_grad_norm()
        run.steps.append((float(loss), math.nan if norm is None else float(norm)))
        if step + 1 == saved:
            engine.save_checkpoint(folder, tag=f"global_step{saved}", client_state=_client_state(toy, saved))
            run.states.update(_states(engine))
            # It returns those of the last micro batch.
            first = next(_micro_batches(saved, toy, 0))
            _, logits = engine.eval_batch(repeat(first), return_logits=True)
            run = replace(run, logits=None if logits is None else logits.float())
            if dist.get_rank() == 0:
                write_configs(toy, Path(folder) / f"global_step{saved}")
            dist.barrier()
    return run


def _engine(toy: Toy) -> tuple[Any, Any]:
    """The engine, and the coordinates of this rank."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=toy.pipeline, num_mp=toy.model, num_dp=toy.data)
    own = None
    for members in topology.get_axis_comm_lists("model") if toy.model > 1 else []:
        group = dist.new_group(members)
        own = group if dist.get_rank() in members else own
    place = topology.get_coord(dist.get_rank())
    ranks = Ranks(own, place.model, toy.model)
    module = PipelineModule(_layers(toy, ranks), topology=topology, loss_fn=_loss, partition_method="uniform")
    _start(module, ranks, toy, place.pipe)
    decayed = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": SEQUENCES // 2 // toy.data,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": toy.stage},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "steps_per_print": 1_000_000,
        **({toy.precision: {"enabled": True}} if toy.precision != "fp32" else {}),
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=[group for group in groups if group["params"]], config=config
    )
    return engine, place


def _states(engine: Any) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer, names = engine.optimizer, {each: name for name, each in engine.module.named_parameters()}
    if not hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # ZeRO 0
        groups = getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", [])
        pairs = list(zip(*map(chain.from_iterable, groups), strict=True)) or [(each, each) for each in names]
        state = getattr(optimizer, "optimizer", optimizer).state
        inner = [(names[parameter], master, state[master]) for parameter, master in pairs]
        return {
            name: (master.detach().clone(), values["exp_avg"].clone(), values["exp_avg_sq"].clone())
            for name, master, values in inner
        }
    # It links all groups after the first group's first step, when the others have no state.
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: (
            safe_get_full_fp32_param(parameter).clone(),
            safe_get_full_optimizer_state(parameter, "exp_avg").clone(),
            safe_get_full_optimizer_state(parameter, "exp_avg_sq").clone(),
        )
        for parameter, name in names.items()
    }


def _client_state(toy: Toy, step: int) -> dict[str, Any]:
    more = {"checkpoint_version": 3.0} if toy.program == "megatron" else {}
    return {"iteration": step, "args": toy.arguments, **more}


def write_configs(toy: Toy, step_folder: Path) -> None:
    """Write GPT-NeoX's configuration files, one of them as JSON."""
    if toy.program == "megatron":
        return
    (step_folder / "configs").mkdir()
    (step_folder / "configs" / "model.yml").write_text(json.dumps(toy.settings, indent=1))
    (step_folder / "configs" / "local.yml").write_text("# not of the model\ndata-path: text\nwarmup: 0.01\n")


@torch.no_grad()
def _start(module: nn.Module, ranks: Ranks, toy: Toy, stage: int) -> None:
    """Random weights and biases: alike on all model-parallel ranks where these hold copies."""
    for index, (name, parameter) in enumerate(module.named_parameters()):
        terms = toy.parallel and name.endswith(("attention.dense.bias", "2.bias", "4h_to_h.bias"))
        own = getattr(parameter, "model_parallel", False) or terms
        # Tied weights are alike on all stages too.
        key = 0 if name.startswith("tied_modules") else 1000 * stage + index
        generator = torch.Generator().manual_seed(10_000 * key + (ranks.rank if own else 0))
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.copy_(noise + (1.0 if "norm" in name and not name.endswith("bias") else 0.0))


def cut(toy: Toy, tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A model rank's tensors from whole canonical ones, by their names in the layers' files: "2.mlp.linear1.weight"."""
    cutter = _Cutter(toy, tensors, rank)
    first, last = (1, LAYERS + 2) if toy.program == "megatron" else (0, LAYERS + 3)
    norm, head = ("", "lm_head") if toy.program == "megatron" else ("norm.", "final_linear")
    made = {f"{first}.word_embeddings.weight": cutter.rows("model.embed_tokens.weight")}
    if toy.learned:
        made[f"{first}.position_embeddings.weight"] = tensors["model.embed_positions.weight"]
    made[f"{last}.{norm}{cutter.norm_weight}"] = tensors["model.norm.weight"]
    if not toy.rms:
        made[f"{last}.{norm}bias"] = tensors["model.norm.bias"]
    if not toy.tied:
        made[f"{last + 1}.{head}.weight"] = cutter.rows("lm_head.weight")
    for layer in range(LAYERS):
        made |= {f"{layer + 2}.{name}": values for name, values in cutter.layer(f"model.layers.{layer}")}
    return made


@dataclass(frozen=True)
class _Cutter:
    toy: Toy
    tensors: dict[str, Tensor]
    rank: int

    @property
    def norm_weight(self) -> str:
        return "scale" if self.toy.rms and self.toy.program != "megatron" else "weight"

    def rows(self, name: str) -> Tensor:
        return self.tensors[name].chunk(self.toy.model)[self.rank]

    def layer(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        toy = self.toy
        own = "self_attention" if toy.program == "megatron" else "attention"
        up, down = ("linear1", "linear2") if toy.program == "neox" else ("dense_h_to_4h", "dense_4h_to_h")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{norm}.{self.norm_weight}", self.tensors[f"{layer}.{norm}.weight"]
            if not toy.rms:
                yield f"{norm}.bias", self.tensors[f"{layer}.{norm}.bias"]
        if toy.program == "neox 1" and toy.gated:
            up, down = "w3", "w2"
            yield "mlp.w1.weight", self.rows(f"{layer}.mlp.gate_proj.weight")
        for kind in ("weight", "bias") if toy.biases else ("weight",):
            yield f"{own}.query_key_value.{kind}", self._query_key_value(f"{layer}.self_attn", kind)
            yield f"mlp.{up}.{kind}", self._up(f"{layer}.mlp", kind, fused=toy.gated and up != "w3")
            for theirs, ours in ((f"{own}.dense", "self_attn.o_proj"), (f"mlp.{down}", "mlp.down_proj")):
                whole = self.tensors[f"{layer}.{ours}.{kind}"]
                yield f"{theirs}.{kind}", whole if kind == "bias" else whole.chunk(toy.model, 1)[self.rank]

    def _up(self, module: str, kind: str, *, fused: bool) -> Tensor:
        up = self.rows(f"{module}.up_proj.{kind}")
        if not fused:
            return up
        gate = self.rows(f"{module}.gate_proj.{kind}")
        return torch.cat((gate, up) if self.toy.program == "megatron" else (up, gate))

    def _query_key_value(self, module: str, kind: str) -> Tensor:
        toy, head = self.toy, HIDDEN // HEADS
        parts = [self.rows(f"{module}.{name}_proj.{kind}") for name in "qkv"]
        if toy.kv_heads == HEADS or toy.program == "megatron":
            pieces = [part.unflatten(0, (toy.kv_heads // toy.model, -1)) for part in parts]
        elif toy.program == "neox 1":
            fraction = head * toy.kv_heads // HEADS
            pieces = [
                part.unflatten(0, (-1, size))
                for part, size in zip(parts, (head, fraction, fraction), strict=True)
            ]
        else:
            return torch.cat(parts)
        return torch.cat(pieces, 1).flatten(0, 1)


def described(toy: Toy) -> str:
    """The fields that are not the default's, for the name of a test."""
    plain = asdict(Toy())
    return (
        ", ".join(f"{name} {value}" for name, value in asdict(toy).items() if value != plain[name]) or "plain"
    )
