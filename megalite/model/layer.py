"""One decoder layer: attention and feed-forward with their norms, residual sums and dropout."""

import atexit
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from megalite.config.sections.training_section import RecomputeMode
from megalite.model.attention import SelfAttention
from megalite.model.context import StepContext
from megalite.model.dropout import NO_MASKS, DropoutSites, LayerMasks
from megalite.model.latent_attention import LatentSelfAttention
from megalite.model.lora import add_lora
from megalite.model.mlp import build_mlp
from megalite.model.moe import Mixture
from megalite.model.norms import Norm, build_norm
from megalite.model.options import PLAIN, ModelOptions
from megalite.model.recompute import recomputed
from megalite.ops.dropout import CountedMask, dropout
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora
from megalite.topology.experts import MixtureShape
from megalite.topology.parameters import layer_norms
from megalite.topology.shape import ModelShape


class DecoderLayer(nn.Module):
    """Attention and feed-forward blocks around a residual stream, arranged as ModelShape.norm_placement says.

    A block adds its output to the stream: normalised in "sandwich" and "output", after dropout, times
    residual_multiplier. Sums are written into the block's output, which no backward needs.
    """

    input_layernorm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        mesh: ParallelMesh,
        options: ModelOptions = PLAIN,
        *,
        recompute: RecomputeMode = "none",
    ):
        super().__init__()
        self.recompute, self.compile_layer = recompute, options.training.compile
        self.mesh, self.mlp_tokens = mesh, options.training.sequence_chunk
        self.arranged = _ARRANGEMENTS[shape.norm_placement]
        self.normalises_outputs = shape.norm_placement in ("sandwich", "output")
        self.residual_multiplier = shape.residual_multiplier
        # Registered in the order of use, as topology.parameters lists them.
        norms = {name: build_norm(shape, options) for name in layer_norms(shape)}
        if "input_layernorm" in norms:
            self.input_layernorm = norms.pop("input_layernorm")
        latent = isinstance(shape, MixtureShape) and shape.latent is not None
        attention = LatentSelfAttention if latent else SelfAttention
        self.self_attn = attention(shape, layer, mesh, options, recompute=recompute == "selective")
        for name, norm in norms.items():
            self.add_module(name, norm)
        dense = shape.dense_layer(layer)
        self.mlp: nn.Module
        if isinstance(shape, MixtureShape) and shape.has_experts(layer):
            self.mlp = Mixture(shape, layer, mesh, options)
        else:
            self.mlp = build_mlp(dense, mesh, options)
        if isinstance(shape.adapter, Lora):
            add_lora(self, shape, shape.adapter, layer, mesh, options)
        self.sites = DropoutSites(dense, f"layers.{layer}", mesh, options)

    def forward(self, hidden_states: Tensor, context: StepContext) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        run = partial(self._draw_and_run, context)
        return recomputed(run, hidden_states) if self.recompute == "full" else run(hidden_states)

    def _draw_and_run(self, context: StepContext, hidden_states: Tensor) -> Tensor:
        """Draw the dropout masks, then run the layer. One compiled function serves all layers: masks are its inputs."""
        masks, dropped = NO_MASKS, context.dropout
        if dropped is not None:
            masks = self.sites.layer_masks(dropped, with_mlp=not self.mlp_tokens)
        if not self.compile_layer:
            return self.arranged(self, hidden_states, context, masks)
        if isinstance(masks.attention, CountedMask) and context.dropout is not None:
            length = context.dropout.sequence_length
            drawn = masks.attention.draw(length, context.prefix_tokens + length)
            masks = masks._replace(attention=drawn)
        return _compiled()(self, hidden_states, context, masks)

    def attention(self, inputs: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
        """Return the output of attention for the residual stream: [B, S, H] -> [B, S, H]."""
        output: Tensor = self.self_attn(inputs, context, masks)
        if self.normalises_outputs:
            output = self.post_attention_layernorm(output)
        return self._scaled(dropout(output, masks.attention_residual))

    def feed_forward(self, inputs: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
        """Return the output of the MLP for the residual stream: [B, S, H] -> [B, S, H]."""
        chunked = self.mlp_tokens and context.cache is None
        output = self._mlp_in_chunks(inputs, context) if chunked else self.mlp(inputs, context, masks)
        if self.normalises_outputs:
            output = self.post_feedforward_layernorm(output)
        return self._scaled(dropout(output, masks.mlp_residual))

    def _mlp_in_chunks(self, inputs: Tensor, context: StepContext) -> Tensor:
        """Return mlp(inputs), of which backward computes one chunk of the sequences at a time again.

        "Tiled compute" of Bekman et al., "Arctic long sequence training", 2025, section 3.1.
        """
        gathered = self.mesh.tp.size if self.mesh.splits_sequence else 1
        size = max(1, self.mlp_tokens // (len(inputs) * gathered))

        def run(first: int, chunk: Tensor) -> Tensor:
            # Drawn here: the masks of all tokens would take a byte for each of their activations.
            held = slice(first, first + chunk.shape[1])
            masks = NO_MASKS if context.dropout is None else self.sites.mlp_masks(context.dropout, held)
            output: Tensor = self.mlp(chunk, context, masks)
            return output

        if size >= inputs.shape[1]:
            return run(0, inputs)
        outputs = [
            recomputed(partial(run, number * size), chunk)
            for number, chunk in enumerate(inputs.split(size, dim=1))
        ]
        return torch.cat(outputs, dim=1)

    def _scaled(self, output: Tensor) -> Tensor:
        return output if self.residual_multiplier == 1 else output * self.residual_multiplier


Arrangement = Callable[[DecoderLayer, Tensor, StepContext, LayerMasks], Tensor]


def _pre(layer: DecoderLayer, hidden: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
    """A norm before each block (Touvron et al., "LLaMA", 2023)."""
    attended = layer.attention(layer.input_layernorm(hidden), context, masks)
    hidden, normed = layer.post_attention_layernorm(attended, hidden)
    return layer.feed_forward(normed, context, masks).add_(hidden)


def _sandwich(layer: DecoderLayer, hidden: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
    """A norm before each block and on its output (Gemma team, "Gemma 2", 2024)."""
    attended = layer.attention(layer.input_layernorm(hidden), context, masks)
    hidden, normed = layer.pre_feedforward_layernorm(attended, hidden)
    return layer.feed_forward(normed, context, masks).add_(hidden)


def _output(layer: DecoderLayer, hidden: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
    """A norm on each block's output (OLMo team, "2 OLMo 2 Furious", 2024)."""
    hidden = layer.attention(hidden, context, masks).add_(hidden)
    return layer.feed_forward(hidden, context, masks).add_(hidden)


def _post(layer: DecoderLayer, hidden: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
    """A norm of each residual sum (Vaswani et al. 2017)."""
    _, hidden = layer.input_layernorm(layer.attention(hidden, context, masks), hidden)
    normed: Tensor = layer.post_attention_layernorm(layer.feed_forward(hidden, context, masks), hidden)[1]
    return normed


def _parallel(layer: DecoderLayer, hidden: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
    """Both blocks read the same residual stream (Black et al., "GPT-NeoX-20B", 2022)."""
    attended = layer.attention(layer.input_layernorm(hidden), context, masks)
    return (
        layer.feed_forward(layer.post_attention_layernorm(hidden), context, masks).add_(attended).add_(hidden)
    )


def _parallel_shared(layer: DecoderLayer, hidden: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
    """Both blocks read the same norm of the residual stream (Wang and Komatsuzaki, "GPT-J-6B", 2021)."""
    normed = layer.input_layernorm(hidden)
    attended = layer.attention(normed, context, masks)
    return layer.feed_forward(normed, context, masks).add_(attended).add_(hidden)


_ARRANGEMENTS: dict[str, Arrangement] = {
    "pre": _pre,
    "sandwich": _sandwich,
    "output": _output,
    "post": _post,
    "parallel": _parallel,
    "parallel_shared": _parallel_shared,
}


def _arranged(layer: DecoderLayer, hidden: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
    return layer.arranged(layer, hidden, context, masks)


@cache
def _compiled() -> Arrangement:
    """Return the compiled function that all layers of a process share; a graph break is an error."""
    name_libraries_without_spaces()
    compiled: Arrangement = torch.compile(_arranged, fullgraph=True)
    return compiled


def name_libraries_without_spaces() -> None:
    """Reach torch's libraries by a link: torch 2.13 does not quote their folder in the command of the linker."""
    from torch.utils import cpp_extension  # seconds to import

    if re.search(r"\s", cpp_extension.TORCH_LIB_PATH):
        folder = Path(tempfile.mkdtemp(prefix="megalite-torch-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / "lib").symlink_to(cpp_extension.TORCH_LIB_PATH)
        cpp_extension.TORCH_LIB_PATH = str(folder / "lib")
