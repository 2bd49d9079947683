"""transformers' modules run from an export's files, against our forward run from the checkpoint.

One decoder layer of each at a time, so that models larger than the memory are checked too. A wrong permutation of
query and key rows, swapped norms or a wrong rotary base all show here; differences of rounding do not.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from megalite.checkpoint.format import WEIGHT
from megalite.checkpoint.load import load_parameter
from megalite.checkpoint.tensor_file import full_box
from megalite.config.hub import INDEX
from megalite.convert.average import AveragedWeights
from megalite.convert.huggingface.files import SINGLE
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, family_tensors
from megalite.model.context import StepContext
from megalite.model.embedding import embedding_scale
from megalite.model.layer import DecoderLayer
from megalite.model.norms import build_norm
from megalite.model.rope import LayerRotations
from megalite.ops.softcap import soft_capped
from megalite.parallel.mesh import ParallelMesh
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

TOLERANCE = 1e-4
# Below this many parameters the whole model is loaded by AutoModelForCausalLM as well.
_WHOLE_MODEL_PARAMETERS = 100_000_000
_SEQUENCES, _SEQUENCE_LENGTH = 2, 48


@dataclass(frozen=True)
class Comparison:
    """The largest absolute difference of one part, and that relative to the part's largest value."""

    what: str
    absolute: float
    relative: float


@torch.no_grad()
def compare_with_transformers(reader: AveragedWeights, folder: Path, dtype: torch.dtype) -> list[Comparison]:
    """Compare part by part, in float32, with weights rounded to `dtype` on both sides.

    Raises CheckpointError when a part differs by more than TOLERANCE relative, or when the files do not hold
    exactly the model's tensors.
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
    """Both sides of the comparison: `ours` reads the checkpoint, `theirs` the export's files."""

    def __init__(self, reader: AveragedWeights, folder: Path, dtype: torch.dtype):
        self.reader, self.folder, self.dtype = reader, folder, dtype
        self.shape = reader.manifest.model
        self.names = canonical_tensors(self.shape)
        self.files = _ExportedFiles(folder)
        tensors = family_tensors(self.shape)
        # How each canonical tensor outside the layers is called there, which is never stacked nor transposed.
        self.theirs = {tensor.parts[0]: tensor.name for tensor in tensors}
        expected = {tensor.name for tensor in tensors}
        if self.files.where.keys() != expected:
            differing = sorted(self.files.where.keys() ^ expected)
            raise CheckpointError(f"the export's files and the model differ in {differing}")
        self.modules = _TheirModules(folder, self.files, self.shape.family)
        self.whole_fits = parameter_count(self.shape) < _WHOLE_MODEL_PARAMETERS
        length = min(_SEQUENCE_LENGTH, self.shape.max_position_embeddings)
        generator = torch.Generator().manual_seed(0)
        self.input_ids = torch.randint(self.shape.vocab_size, (_SEQUENCES, length), generator=generator)
        self.position_ids = torch.arange(length).unsqueeze(0)

    def ours(self, name: str) -> Tensor:
        """A full tensor of the checkpoint, rounded as the export is."""
        return self.reader.read(WEIGHT, name, full_box(self.names[name])).to(self.dtype).float()

    def rows_of_ours(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """A tensor of the checkpoint, rounded as the export is, some rows at a time."""
        first = 0
        for block in self.reader.blocks(WEIGHT, name):
            rows = slice(first, first + block.shape[0])
            yield rows, block.to(self.dtype).float()
            first = rows.stop

    def embedding(self) -> tuple[Tensor, Comparison]:
        """The input's hidden states [B, S, H]; every row of the tables is compared, not only the rows used."""
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

    def layers(self, hidden_states: Tensor) -> tuple[Tensor, Comparison]:
        """The decoder layers one after the other, each side given our hidden states; the worst layer is told.

        What is compared is what a layer adds to its input, which would else hide a fault in a deep model.
        """
        rotations = None
        if self.shape.position_embedding == "rope":
            rotations = LayerRotations(self.shape)(self.position_ids)
        worst = Comparison("decoder layers", 0.0, 0.0)
        for layer in range(self.shape.num_hidden_layers):
            window = self.shape.window_of(layer)
            ours = self._our_layer(layer)(hidden_states, StepContext(rotations))
            mask = self._mask(window)
            theirs = self.modules.layer(layer, hidden_states, self.position_ids, mask)
            # Rounding of the sum itself grows with the input.
            floor = 0.01 * hidden_states.abs().max().item()
            added = ((ours - hidden_states, theirs - hidden_states),)
            comparison = _accepted(_compare(f"decoder layers (worst: {layer})", added, floor=floor))
            worst = max(worst, comparison, key=lambda found: found.relative)
            hidden_states = ours
        return hidden_states, worst

    def final_norm(self, hidden_states: Tensor) -> tuple[Tensor, Comparison]:
        ours = build_norm(self.shape)
        prefix = FINAL_NORM.removesuffix("weight")
        for name, tensor in ours.named_parameters():
            tensor.copy_(self.ours(prefix + name))
        normed = ours(hidden_states)
        theirs = self.modules.final_norm(hidden_states)
        return normed, _accepted(_compare("final norm", ((normed, theirs),)))

    def head(self, hidden_states: Tensor) -> tuple[Tensor, Comparison]:
        """Logits in pieces of the vocabulary; returns all of ours [B, S, V] for a small model, else nothing."""
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

    def whole_model(self, logits: Tensor) -> Comparison:
        """The folder as a user loads it, from ids to logits."""
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import (
            disable_progress_bar,
            enable_progress_bar,
            is_progress_bar_enabled,
        )

        shown = is_progress_bar_enabled()
        # A second bar would be drawn into the job's own.
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
            load_parameter(self.reader, parameter, tensor, mesh)
            tensor.copy_(tensor.to(self.dtype))
        return built

    def _mask(self, window: int | None) -> Tensor:
        """What eager attention adds to its scores: causal, and no further back than the window."""
        length = self.input_ids.shape[1]
        seen = torch.ones(length, length).tril().bool()
        if window is not None:
            seen &= torch.ones(length, length).triu(1 - window).bool()
        return torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


class _TheirModules:
    """transformers' own modules, one at a time in memory, filled from the export's files."""

    def __init__(self, folder: Path, files: "_ExportedFiles", family: str):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.config = AutoConfig.from_pretrained(folder)
        # Not the attention that our side uses.
        self.config._attn_implementation = "eager"
        self._files, self._names = files, FAMILIES[family].names
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(self.config)

    def layer(self, layer: int, hidden_states: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        base = self._model.base_model
        block = self._filled(f"{self._names.layers}.{layer}")
        angles = {}
        if hasattr(base, "rotary_emb"):
            # Gemma 3's has angles of its own for each kind of layer.
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
        names = [each for each in self._files.where if each.startswith(prefix)]
        state = {each.removeprefix(prefix): self._files.tensor(each) for each in names}
        module.load_state_dict(state, assign=True)
        return module.eval()


class _ExportedFiles:
    """The safetensors files of an export, read as transformers reads them: by name, through the index.

    A file is open only while a tensor is taken from it: what is mapped of it counts as this process's memory.
    """

    def __init__(self, folder: Path):
        self.folder, index = folder, folder / INDEX
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            named = dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)
        held = {file: self._opened(file).keys() for file in sorted(set(named.values()))}
        self.where = {name: file for file, names in held.items() for name in names}
        if self.where != named:
            raise CheckpointError(f"{index} does not tell what is in the files")

    def tensor(self, name: str) -> Tensor:
        values: Tensor = self._opened(self.where[name]).get_tensor(name)
        return values.float()

    def rows(self, name: str, rows: slice) -> Tensor:
        values: Tensor = self._opened(self.where[name]).get_slice(name)[rows]
        return values.float()

    def _opened(self, file: str) -> Any:
        return safe_open(self.folder / file, framework="pt")


def _compare(
    what: str,
    pairs: Iterator[tuple[Tensor, Tensor]] | tuple[tuple[Tensor, Tensor], ...],
    *,
    floor: float = 0.0,
) -> Comparison:
    """The largest difference over all pairs, relative to the largest value (at least `floor`) of the second ones."""
    absolute, largest = 0.0, floor
    for ours, theirs in pairs:
        difference = (ours - theirs).abs().max().item()
        # A nan anywhere must not be lost to a comparison.
        absolute = difference if not difference <= absolute else absolute
        largest = max(largest, theirs.abs().max().item())
    return Comparison(what, absolute, absolute / largest if largest else absolute)


def _accepted(comparison: Comparison) -> Comparison:
    if not comparison.relative <= TOLERANCE:
        raise CheckpointError(
            f"{comparison.what}: transformers differs from the model that was trained by"
            f" {comparison.relative:.1e} relative ({comparison.absolute:.1e} absolute), more than {TOLERANCE:g};"
            " nothing was exported"
        )
    return comparison
