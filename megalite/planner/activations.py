"""The tensors that the autograd graphs of a decoder layer and of the head keep for the backward.

Read off model/layer.py, attention.py, mlp.py, head.py and the autograd nodes of ops/ and parallel/: a norm saves its
input, a linear its input if its weight is trained, attention query, key, value and output, a gated activation gate and
up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megalite.config.sections.training_section import RecomputeMode
from megalite.planner.arriving_gradients import product_bytes, table_values
from megalite.planner.planned_run import PlannedRun
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from megalite.topology.parameters import layer_norms, layer_parameters
from megalite.topology.place import RankPlace
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import heads_held
from megalite.topology.stages import balanced_split

QKV, O_PROJ, UP, DOWN = "self_attn.qkv_proj", "self_attn.o_proj", "mlp.up", "mlp.down_proj"
REPEATED = "repeated keys and values"


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro batch in one part of the model.

    kept: from the forward to the backward. deferred: from the input half of a split backward to its weight half.
    forward, backward: beside what is kept, at the highest moment of the two.
    """

    kept: float = 0.0
    deferred: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class _Linear:
    """A linear of a layer: whether its weight is trained, and the rows of its low-rank adapter's A; 0: none."""

    trained: bool
    low_rank: int


@dataclass(frozen=True)
class Widths:
    """The sizes of a layer on the first tensor-parallel rank: values a token of each tensor."""

    hidden: int
    query: int
    key_value: int
    heads: int
    intermediate: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, shape: ModelShape, tensor: int) -> "Widths":
        heads = len(heads_held(shape.num_attention_heads, 0, tensor))
        shared = len(heads_held(shape.num_key_value_heads, 0, tensor))
        intermediate = len(balanced_split(shape.intermediate_size, tensor)[0])
        return cls(shape.hidden_size, heads * shape.head_dim, shared * shape.head_dim, heads, intermediate)

    @property
    def packed(self) -> int:
        """Query, key and value together."""
        return self.query + 2 * self.key_value


def layer_activations(run: PlannedRun, mode: RecomputeMode, layer: int = 0) -> Activations:
    """Return the activations of a decoder layer that is recomputed in this mode."""
    whole = layer_tensors(run, "none", layer)
    kept = sum(layer_tensors(run, mode, layer).values())
    mlp, forward = _mlp_backward(run), _gathered(run)
    if run.chunk_tokens < run.tokens:
        # A chunk's tensors, computed again, beside the input's gradient or the output in chunks, which become one.
        widths, linears = (
            Widths.of(run.shape, run.layout.tensor),
            _linears(run.shape, layer, run.layout.tensor),
        )
        stream = run.positions * widths.hidden * run.weight_bytes
        of_chunk = sum(_mlp_tensors(run, widths, linears, run.chunk_tokens).values())
        mlp, forward = max(mlp + of_chunk + stream, 3 * stream), forward + stream + max(of_chunk, stream)
    working = max(mlp, _attention_backward(run, whole)) + _gathered(run)
    again = sum(whole.values()) - kept if mode != "none" else 0.0
    if mode == "full":
        return Activations(kept, _deferred(run, layer), again, again + working)
    return Activations(kept, _deferred(run, layer), forward, max(again, working))


def layer_tensors(run: PlannedRun, mode: RecomputeMode, layer: int = 0) -> dict[str, float]:
    """Return name -> bytes of what a layer keeps of one micro batch."""
    widths, linears = Widths.of(run.shape, run.layout.tensor), _linears(run.shape, layer, run.layout.tensor)
    size, tokens = run.weight_bytes, run.tokens
    hidden = run.positions * widths.hidden * size
    if mode == "full":
        return {"input": hidden}
    norms, stat = len(layer_norms(run.shape)), run.positions * run.exact_bytes
    of_norm = 2 if run.shape.norm == "layer_norm" else 1
    kept = {
        "inputs of norms": _normed_tensors(run.shape) * hidden,
        "statistics of norms": norms * of_norm * stat,
        "query, key, value": _heads(run, widths) * size,
    }
    if mode == "none":
        kept |= _attention_core(run, widths)
    shared, chunked = run.shape.norm_placement == "parallel_shared", run.chunk_tokens < run.tokens
    for name in (QKV, UP):
        saves = _saves_input(linears[name], run, column=True) or (name == UP and chunked)
        if saves and not (name == UP and shared):
            kept[f"input of {name}"] = hidden
    # Attention saves its output for its own backward too, unless that is recomputed.
    if mode == "none" or _saves_input(linears[O_PROJ], run, column=False):
        kept["output of attention"] = tokens * widths.query * size
    kept["adapters"] = _adapters(run, widths, linears, (QKV, O_PROJ), tokens)
    if run.model.residual_dropout:
        kept["masks of dropout"] = 2.0 * run.positions * widths.hidden
    return kept if chunked else kept | _mlp_tensors(run, widths, linears, tokens)


def _mlp_tensors(
    run: PlannedRun, widths: Widths, linears: Mapping[str, _Linear], tokens: int
) -> dict[str, float]:
    """Return name -> bytes of what the MLP keeps of so many tokens behind its input. Masks take one byte a value."""
    inner = tokens * widths.intermediate
    kept = {"input of the activation": float(_activation(run, widths) * tokens * run.weight_bytes)}
    if _saves_input(linears[DOWN], run, column=False):
        kept[f"input of {DOWN}"] = inner * run.weight_bytes
    kept["adapters of the MLP"] = _adapters(run, widths, linears, (UP, DOWN), tokens)
    if run.model.mlp_dropout:
        kept["mask of the MLP"] = inner
    return kept


def head_activations(run: PlannedRun, *, trained: bool) -> tuple[Activations, Activations]:
    """Return the activations of the final norm and of logits and loss. trained: whether the head's weight is."""
    size, exact, tokens = run.weight_bytes, run.exact_bytes, run.tokens
    rows = table_values(run) // run.shape.hidden_size
    hidden = run.positions * run.shape.hidden_size * size
    gradient = tokens * run.shape.hidden_size * size
    at_once = min(tokens, run.model.chunked_loss or tokens)
    # Plain torch computes the loss of low-precision logits in a float32 copy.
    copied = size < exact and run.plain_torch
    of_logits = exact if copied else size
    changed = (run.shape.final_logit_softcapping is not None) + (run.shape.logits_scaling != 1)
    logits, low = at_once * rows * of_logits, at_once * rows * size * (copied + changed)
    if run.model.chunked_loss:
        kept = gradient + (rows * run.shape.hidden_size * exact if trained else 0)
        product = rows * run.shape.hidden_size * size * (trained and size < exact)
        return Activations(hidden, 0, 0, 0), Activations(kept, kept, logits + max(low, product), gradient)
    softcap = at_once * rows * size * (run.shape.final_logit_softcapping is not None)
    norm = hidden + (hidden if trained or run.layout.tensor > 1 else 0)
    # The logits' gradient overwrites them; a deferred product of the head's weight keeps it.
    deferred = hidden + at_once * rows * size if trained else 0.0
    backward = max(gradient, at_once * rows * size * copied) + _gathered(run)
    return Activations(norm, 0, 0, 0), Activations(logits + softcap, deferred, low + _gathered(run), backward)


def _normed_tensors(shape: ModelShape) -> int:
    """Return how many different tensors the norms of a layer read; the two of "parallel" read the same."""
    return 1 if shape.norm_placement == "parallel" else len(layer_norms(shape))


def _heads(run: PlannedRun, widths: Widths) -> float:
    """Return the values of query, key and value that attention keeps, with those of a prefix and of their norms."""
    # Keys and values behind those of a prefix are copies; query stays a view of the whole product.
    copied = bool(run.shape.prefix_tokens) * run.tokens
    prefix = (run.shape.prefix_tokens * run.micro_batch_size + copied) * 2 * widths.key_value
    values = run.tokens * widths.packed + prefix
    if run.shape.qk_norm:
        # The copies that their norms read; value stays a view of the whole product, beside the rotated heads.
        values += 2 * run.tokens * (widths.query + widths.key_value)
    return values


def _attention_core(run: PlannedRun, widths: Widths) -> dict[str, float]:
    """Return what attention keeps beside query, key, value and output."""
    size, rows = run.weight_bytes, run.tokens * widths.heads
    core = {"statistics of attention": float(rows * run.exact_bytes)}
    if widths.query > widths.key_value and (run.plain_torch if size >= 4 else run.on_cpu):
        # torch's kernels in float32, and all of them on the host, take one key-value head a query head.
        core[REPEATED] = 2.0 * run.tokens * widths.query * size
    if run.model.attention_dropout and run.plain_torch:
        keys = run.sequence_length + run.shape.prefix_tokens
        core["probabilities of attention"] = float(rows * keys * (1 + 2 * size))
    return core


def _activation(run: PlannedRun, widths: Widths) -> float:
    """Return the values a token that the MLP's activation keeps; plain torch's GEGLU keeps the activated gate too."""
    if not run.shape.gated_mlp:
        return widths.intermediate
    plain_geglu = run.plain_torch and run.shape.hidden_act != "silu"
    return (3 if plain_geglu else 2) * widths.intermediate


def _adapters(
    run: PlannedRun,
    widths: Widths,
    linears: Mapping[str, _Linear],
    names: Sequence[str],
    tokens: int,
) -> float:
    """Return the bytes of the products of these linears with A, and of what DoRA scales."""
    values = sum(linears[name].low_rank for name in names)
    adapter = run.shape.adapter
    if isinstance(adapter, Lora) and adapter.dora:
        up = widths.intermediate * (2 if run.shape.gated_mlp else 1)
        outputs = {QKV: widths.packed, O_PROJ: widths.hidden, UP: up, DOWN: widths.hidden}
        values += sum(outputs[name] for name in names if linears[name].low_rank)
    return float(values * tokens * run.weight_bytes)


def _deferred(run: PlannedRun, layer: int) -> float:
    """Return the bytes from I to W: input and output gradient of each linear whose weight is trained."""
    widths, linears = Widths.of(run.shape, run.layout.tensor), _linears(run.shape, layer, run.layout.tensor)
    up = widths.intermediate * (2 if run.shape.gated_mlp else 1)
    whole, shared = run.tokens, run.positions
    sizes = {
        QKV: shared * widths.hidden + whole * widths.packed,
        O_PROJ: whole * (widths.query + widths.hidden),
        UP: shared * widths.hidden + whole * up,
        DOWN: whole * (widths.intermediate + widths.hidden),
    }
    trained = sum(size for name, size in sizes.items() if linears[name].trained)
    low = sum(linear.low_rank for linear in linears.values()) * 2 * whole
    return (trained + low) * run.weight_bytes


def _mlp_backward(run: PlannedRun) -> float:
    """Return the bytes of gradients at the highest moment of the MLP's backward, less what it has freed by then.

    That moment is the backward of the MLP's activation: gradients of its output, of its input and of the residual
    stream, while the output itself is freed. Plain torch has one more tensor of the intermediate size.
    """
    widths = Widths.of(run.shape, run.layout.tensor)
    ups = 2 if run.shape.gated_mlp else 1
    stream = run.positions * widths.hidden
    tokens = run.chunk_tokens
    highest = (tokens * (ups + run.plain_torch) * widths.intermediate + stream) * run.weight_bytes
    if run.shape.adapter is None:
        # The products of a weight's gradient are further moments: of "down" before that one, of "up" behind it.
        weights = widths.intermediate * widths.hidden
        down = tokens * widths.intermediate + stream
        up = stream * (1 + tokens / run.tokens) - tokens * widths.intermediate
        down_bytes = down * run.weight_bytes + product_bytes(run, weights)
        up_bytes = up * run.weight_bytes + product_bytes(run, ups * weights)
        highest = max(highest, down_bytes, up_bytes)
    return highest


def _attention_backward(run: PlannedRun, tensors: Mapping[str, float]) -> float:
    """Return the bytes of gradients in attention's backward, less those of a layer's `tensors` that are freed by then.

    Gradients of the output, of query, key and value, and of the residual stream; freed is what the MLP has kept, its
    input, and the inputs of the norms behind attention.
    """
    widths = Widths.of(run.shape, run.layout.tensor)
    stream = run.positions * widths.hidden
    of_mlp = _mlp_tensors(run, widths, _linears(run.shape, 0, run.layout.tensor), run.tokens)
    freed = sum(tensors.get(name, 0.0) for name in (f"input of {UP}", *of_mlp))
    freed += _normed_tensors(run.shape) // 2 * stream * run.weight_bytes
    heads = 3 * widths.query if REPEATED in tensors else widths.packed
    gradients = (run.tokens * (widths.query + heads) + stream) * run.weight_bytes
    return gradients + _attention_workspace(run, widths) - freed


def _attention_workspace(run: PlannedRun, widths: Widths) -> float:
    """Return the bytes of the compiled attention's backward on the host, beside the tensors that it takes and returns.

    Each thread has one key-value head of one sequence: its keys in two orders, its values, and both gradients, in
    float32 at least (`BackwardWorkspace` of csrc/cpu/attention.cpp). Without a window or dropout torch computes bf16.
    """
    shape = run.shape
    of_torch = run.weight_bytes < 4 and shape.sliding_window is None and not run.model.attention_dropout
    if not run.on_cpu or run.plain_torch or of_torch or shape.attn_logit_softcapping is not None:
        return 0.0
    cut = run.layout.context if run.context_method == "ring" else 1
    keys = run.sequence_length // cut + shape.prefix_tokens
    threads = min(run.threads, run.micro_batch_size * widths.key_value // shape.head_dim)
    return 5.0 * threads * keys * shape.head_dim * run.exact_bytes


def _gathered(run: PlannedRun) -> float:
    """Return the bytes of the positions that sequence parallelism gathers: all of them, and the copy in rank order."""
    if not run.sequence_parallel or run.layout.tensor == 1:
        return 0.0
    return 2 * run.tokens * run.shape.hidden_size * run.weight_bytes


def _saves_input(linear: _Linear, run: PlannedRun, *, column: bool) -> bool:
    """Return whether a linear's input is kept: for its weight, its adapter, or by the column-parallel node always."""
    return linear.trained or bool(linear.low_rank) or (column and run.layout.tensor > 1)


@lru_cache(maxsize=4096)
def _linears(shape: ModelShape, layer: int, tensor: int) -> Mapping[str, _Linear]:
    place, linears = RankPlace(Layout(tensor=tensor), 0), {}
    parameters = {parameter.name: parameter for parameter in layer_parameters(shape, layer)}
    up = "mlp.gate_up_proj" if shape.gated_mlp else "mlp.up_proj"
    for name, module in {QKV: QKV, O_PROJ: O_PROJ, UP: up, DOWN: DOWN}.items():
        path = f"model.layers.{layer}.{module}"
        low = parameters.get(f"{path}.lora.A")
        rows = 0 if low is None else place.local_shape(low)[0]
        linears[name] = _Linear(parameters[f"{path}.weight"].trained, rows)
    return linears
