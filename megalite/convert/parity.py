"""Compare transformers' modules, loaded from an export's files, with megalite's forward from the checkpoint.

One decoder layer at a time, so that models larger than memory can be checked. A wrong permutation of query and key
rows, swapped norms or a wrong rotary base exceed the tolerance; rounding does not.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.region_reader import RegionReader
from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.weights import targets
from megalite.config.sources.hub import INDEX
from megalite.convert.average import AveragedWeights
from megalite.convert.huggingface.files import headers, weight_map
from megalite.convert.peft.merged import MergedCheckpoints
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, family_tensors, model_tensors
from megalite.model.context import StepContext
from megalite.model.embedding import embedding_scale
from megalite.model.layer import DecoderLayer
from megalite.model.norms import build_norm
from megalite.model.rope import LayerRotations
from megalite.ops.activations import soft_capped
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import CORRECTION_BIAS
from megalite.topology.parameters import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_BIAS,
    POSITIONS,
    canonical_tensors,
    layer_parameters,
    parameter_count,
)
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

WholeWeights = AveragedWeights | MergedCheckpoints
"""Readers of all weights of a model from its checkpoints."""

TOLERANCE = 1e-4
# Models with fewer parameters are also loaded whole, with AutoModelForCausalLM.
_WHOLE_MODEL_PARAMETERS = 100_000_000
_SEQUENCES, _SEQUENCE_LENGTH = 2, 48


@dataclass(frozen=True)
class PartDifference:
    """The largest absolute difference of one part, and the same relative to the part's largest value."""

    what: str
    absolute: float
    relative: float


def exported_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor in an export of `dtype`; biases of routers stay float32, as in transformers."""
    return torch.float32 if name.endswith(CORRECTION_BIAS) else dtype


@torch.no_grad()
def compare_with_transformers(reader: WholeWeights, folder: Path, dtype: torch.dtype) -> list[PartDifference]:
    """Compare embedding, layers, final norm and head in float32, with weights rounded to `dtype` on both sides.

    Raises CheckpointError if a part differs by more than TOLERANCE relative, or if the files do not hold exactly the
    model's tensors.
    """
    parity = _Parity(reader, folder, dtype)
    hidden_states, embedding = parity.embedding()
    hidden_states, layers = parity.layers(hidden_states)
    hidden_states, final_norm = parity.final_norm(hidden_states)
    logits, head = parity.head(hidden_states)
    comparisons = [embedding, layers, final_norm, head]
    if parity.whole_fits:
        comparisons.append(parity.whole_model(logits))
    return comparisons


class _Parity:
    """Both sides of the comparison: `ours` is read from the checkpoint, `theirs` from the export's files."""

    def __init__(self, reader: WholeWeights, folder: Path, dtype: torch.dtype):
        self.reader, self.folder, self.dtype = reader, folder, dtype
        self.shape = reader.manifest.model
        self.names = canonical_tensors(self.shape)
        self.files = _ExportedFiles(folder)
        tensors = family_tensors(self.shape)
        # Canonical name -> exported name; used only outside the layers, where no tensor is fused or transposed.
        self.theirs = {tensor.parts[0]: tensor.name for tensor in tensors}
        expected = {tensor.name for tensor in tensors}
        if self.files.where.keys() != expected:
            differing = sorted(self.files.where.keys() ^ expected)
            raise CheckpointError(f"the export's files and the model differ in {differing}")
        self.modules = _TheirModules(folder, self.files, self.shape)
        self.whole_fits = parameter_count(self.shape) < _WHOLE_MODEL_PARAMETERS
        length = min(_SEQUENCE_LENGTH, self.shape.max_position_embeddings)
        generator = torch.Generator().manual_seed(0)
        self.input_ids = torch.randint(self.shape.vocab_size, (_SEQUENCES, length), generator=generator)
        self.position_ids = torch.arange(length).unsqueeze(0)

    def ours(self, name: str) -> Tensor:
        """Return a full tensor of the checkpoint, rounded like the export."""
        return self.reader.read(WEIGHT, name, full_slice(self.names[name])).to(self.dtype).float()

    def rows_of_ours(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows of a checkpoint's tensor, rounded like the export."""
        first = 0
        for block in self.reader.blocks(WEIGHT, name):
            rows = slice(first, first + block.shape[0])
            yield rows, block.to(self.dtype).float()
            first = rows.stop

    def embedding(self) -> tuple[Tensor, PartDifference]:
        """Return the input's hidden states [B, S, H], and the comparison of all rows of the embedding tables."""
        hidden_states = torch.zeros(*self.input_ids.shape, self.shape.hidden_size)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for rows, table in self.rows_of_ours(EMBEDDING):
                here = (self.input_ids >= rows.start) & (self.input_ids < rows.stop)
                hidden_states[here] = table[self.input_ids[here] - rows.start]
                yield table, self.files.rows(self.theirs[EMBEDDING], rows)
            hidden_states.mul_(embedding_scale(self.shape, torch.float32))
            if POSITIONS in self.names:
                positions = self.ours(POSITIONS)
                hidden_states.add_(F.embedding(self.position_ids, positions))
                yield positions, self.files.tensor(self.theirs[POSITIONS])

        comparison = _accepted(_compare("embedding", pairs()))
        return hidden_states, comparison

    def layers(self, hidden_states: Tensor) -> tuple[Tensor, PartDifference]:
        """Run each decoder layer of both sides on our hidden states; return ours and the worst layer's comparison.

        The change that a layer makes to its input is compared: in a deep model the input itself would hide a fault.
        """
        rotations = None
        if self.shape.position_embedding == "rope":
            rotations = LayerRotations(self.shape)(self.position_ids)
        worst = PartDifference("decoder layers", 0.0, 0.0)
        for layer in range(self.shape.num_hidden_layers):
            window = self.shape.window_of(layer)
            ours = self._our_layer(layer)(hidden_states, StepContext(rotations))
            mask = self._mask(window)
            theirs = self.modules.layer(layer, hidden_states, self.position_ids, mask)
            # The rounding error of the residual sum grows with the input.
            floor = 0.01 * hidden_states.abs().max().item()
            added = ((ours - hidden_states, theirs - hidden_states),)
            comparison = _accepted(_compare(f"decoder layers (worst: {layer})", added, floor=floor))
            worst = max(worst, comparison, key=lambda difference: difference.relative)
            hidden_states = ours
        return hidden_states, worst

    def final_norm(self, hidden_states: Tensor) -> tuple[Tensor, PartDifference]:
        ours = build_norm(self.shape)
        prefix = FINAL_NORM.removesuffix("weight")
        for name, tensor in ours.named_parameters():
            tensor.copy_(self.ours(prefix + name))
        normed = ours(hidden_states)
        theirs = self.modules.final_norm(hidden_states)
        return normed, _accepted(_compare("final norm", ((normed, theirs),)))

    def head(self, hidden_states: Tensor) -> tuple[Tensor, PartDifference]:
        """Compare logits in blocks of the vocabulary; return ours [B, S, V] for a small model, else an empty tensor."""
        bias = self.ours(HEAD_BIAS) if HEAD_BIAS in self.names else None
        their_bias = self.files.tensor(self.theirs[HEAD_BIAS]) if HEAD_BIAS in self.names else None
        name = self.theirs[EMBEDDING if self.modules.config.tie_word_embeddings else HEAD]
        our_name = EMBEDDING if self.shape.tie_word_embeddings else HEAD
        kept: list[Tensor] = []

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for rows, table in self.rows_of_ours(our_name):
                ours = F.linear(hidden_states, table, None if bias is None else bias[rows])
                if self.whole_fits:
                    cap, scaled = self.shape.final_logit_softcapping, ours / self.shape.logits_scaling
                    kept.append(scaled if cap is None else soft_capped(scaled, cap))
                their_rows = None if their_bias is None else their_bias[rows]
                yield ours, F.linear(hidden_states, self.files.rows(name, rows), their_rows)

        comparison = _accepted(_compare("head", pairs()))
        return torch.cat(kept or [hidden_states.new_empty(0)], dim=-1), comparison

    def whole_model(self, logits: Tensor) -> PartDifference:
        """Compare our logits with those of the whole model, loaded as a user loads the folder."""
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import (
            disable_progress_bar,
            enable_progress_bar,
            is_progress_bar_enabled,
        )

        shown = is_progress_bar_enabled()
        # A second progress bar would overlap the job's own.
        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        if shown:
            enable_progress_bar()
        theirs = model(input_ids=self.input_ids).logits
        return _accepted(_compare("whole model, logits", ((logits, theirs),)))

    def _our_layer(self, layer: int) -> DecoderLayer:
        mesh = ParallelMesh.single()
        built = DecoderLayer(self.shape, layer, mesh)
        tensors = dict(built.named_parameters())
        for parameter in layer_parameters(self.shape, layer):
            tensor = tensors[parameter.name.removeprefix(f"model.layers.{layer}.")]
            self.reader.fill_all(targets(parameter, tensor, mesh))
            tensor.copy_(tensor.to(exported_dtype(parameter.name, self.dtype)))
        return built

    def _mask(self, window: int | None) -> Tensor:
        """Return the additive causal mask of eager attention [1, 1, S, S], limited to the sliding window."""
        length = self.input_ids.shape[1]
        seen = torch.ones(length, length).tril().bool()
        if window is not None:
            seen &= torch.ones(length, length).triu(1 - window).bool()
        return torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


class _TheirModules:
    """transformers' modules with weights from the export's files, one in memory at a time."""

    def __init__(self, folder: Path, files: "_ExportedFiles", shape: ModelShape):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.config = AutoConfig.from_pretrained(folder)
        # Independent of the attention that our side uses.
        self.config._attn_implementation = "eager"
        self.config._experts_implementation = "eager"
        self._files, self._names = files, FAMILIES[shape.family].names
        # A mixture holds the experts of a layer in two tensors, and its files each expert's alone or under other names.
        self._tensors = {tensor.name: tensor for tensor in model_tensors(shape)}
        self._stored = {part: tensor.name for tensor in family_tensors(shape) for part in tensor.parts}
        # Module -> its tensors.
        self._within: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._tensors:
            for outer in accumulate(name.split(".")[:-1], "{}.{}".format):
                self._within[outer].append(name)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(self.config)

    def layer(self, layer: int, hidden_states: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        base = self._model.base_model
        block = self._filled(f"{self._names.layers}.{layer}")
        angles = {}
        if hasattr(base, "rotary_emb"):
            # Gemma 3 has separate rotary angles for layers with and without a window.
            kind = (
                (self.config.layer_types[layer],) if "full_attention" in self.config.rope_parameters else ()
            )
            rotary = type(base.rotary_emb)(self.config)(hidden_states, position_ids, *kind)
            angles["position_embeddings"] = rotary
        output = block(hidden_states, attention_mask=mask, **angles)
        block.to("meta")
        values: Tensor = output[0] if isinstance(output, tuple) else output
        return values

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        name = self._names.of(FINAL_NORM).removesuffix(".weight")
        normed: Tensor = self._filled(name)(hidden_states)
        return normed

    def _filled(self, name: str) -> torch.nn.Module:
        module, prefix = self._model.get_submodule(name), f"{name}."
        state = {each.removeprefix(prefix): self._tensor(each) for each in self._within[name]}
        module.load_state_dict(state, assign=True)
        return module.eval()

    def _tensor(self, name: str) -> Tensor:
        if name in self._files.where:
            return self._files.tensor(name)
        tensor = self._tensors[name]
        stored = dict.fromkeys(self._stored[part] for part in tensor.parts)
        return torch.cat([*map(self._files.tensor, stored)]).reshape(tensor.shape)


class _ExportedFiles:
    """The tensors of an export's safetensors files, read as float32."""

    def __init__(self, folder: Path):
        self._folder, self._headers = folder, headers(folder)
        self.where = {name: file for file, header in self._headers.items() for name in header}
        if (folder / INDEX).is_file() and self.where != weight_map(folder):
            raise CheckpointError(f"{folder / INDEX} does not list the tensors of the files")

    def rows(self, name: str, rows: slice) -> Tensor:
        shape = self._headers[self.where[name]][name].shape
        first = (rows.start, *(0 for _ in shape[1:]))
        return self.tensor(name, TensorSlice(first, (rows.stop - rows.start, *shape[1:])))

    def tensor(self, name: str, region: TensorSlice | None = None) -> Tensor:
        file = self.where[name]
        with closing(RegionReader(self._folder / file, self._headers[file])) as opened:
            return opened.read(name, region).float()


def _compare(
    what: str,
    pairs: Iterator[tuple[Tensor, Tensor]] | tuple[tuple[Tensor, Tensor], ...],
    *,
    floor: float = 0.0,
) -> PartDifference:
    """Return the largest difference over all pairs, and relative to the largest value (at least `floor`) of theirs."""
    absolute, largest = 0.0, floor
    for ours, theirs in pairs:
        difference = (ours - theirs).abs().max().item()
        # Written so that a nan is kept: comparisons with nan are false.
        absolute = difference if not difference <= absolute else absolute
        largest = max(largest, theirs.abs().max().item())
    return PartDifference(what, absolute, absolute / largest if largest else absolute)


def _accepted(comparison: PartDifference) -> PartDifference:
    if not comparison.relative <= TOLERANCE:
        raise CheckpointError(
            f"{comparison.what}: transformers differs from the trained model by {comparison.relative:.1e} relative"
            f" ({comparison.absolute:.1e} absolute), more than the allowed {TOLERANCE:g}; nothing was exported, please"
            " report this"
        )
    return comparison
