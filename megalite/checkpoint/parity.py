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
from megalite.checkpoint.tensor_file import CheckpointReader, full_box
from megalite.errors import CheckpointError
from megalite.model.norms import RMSNorm
from megalite.model.rope import RotaryEmbedding
from megalite.model.transformer import DecoderLayer
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    canonical_tensors,
    layer_parameters,
    parameter_count,
)

TOLERANCE = 1e-4
# Below this many parameters the whole model is loaded by AutoModelForCausalLM as well.
_WHOLE_MODEL_PARAMETERS = 100_000_000
_SEQUENCES, _SEQUENCE_LENGTH = 2, 48
_VOCABULARY_ROWS = 8192


@dataclass(frozen=True)
class Comparison:
    """The largest absolute difference of one part, and that relative to the part's largest value."""

    what: str
    absolute: float
    relative: float


@torch.no_grad()
def compare_with_transformers(reader: CheckpointReader, folder: Path, dtype: torch.dtype) -> list[Comparison]:
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

    def __init__(self, reader: CheckpointReader, folder: Path, dtype: torch.dtype):
        from transformers import AutoConfig

        self.reader, self.folder, self.dtype = reader, folder, dtype
        self.shape = reader.manifest.model
        self.names = canonical_tensors(self.shape)
        self.config = AutoConfig.from_pretrained(folder)
        # Not the attention that our side uses.
        self.config._attn_implementation = "eager"
        self.files = _ExportedFiles(folder)
        if self.files.where.keys() != self.names.keys():
            differing = sorted(self.files.where.keys() ^ self.names.keys())
            raise CheckpointError(f"the export's files and the model differ in {differing}")
        self.whole_fits = parameter_count(self.shape) < _WHOLE_MODEL_PARAMETERS
        length = min(_SEQUENCE_LENGTH, self.shape.max_position_embeddings)
        generator = torch.Generator().manual_seed(0)
        self.input_ids = torch.randint(self.shape.vocab_size, (_SEQUENCES, length), generator=generator)
        self.position_ids = torch.arange(length).unsqueeze(0)

    def ours(self, name: str) -> Tensor:
        """A full tensor of the checkpoint, rounded as the export is."""
        return self.reader.read(WEIGHT, name, full_box(self.names[name])).to(self.dtype).float()

    def embedding(self) -> tuple[Tensor, Comparison]:
        """The input's hidden states [B, S, H]; every row of the table is compared, not only the rows used."""
        table = self.ours(EMBEDDING)
        pairs = ((table[rows], self.files.rows(EMBEDDING, rows)) for rows in self._vocabulary())
        return F.embedding(self.input_ids, table), _accepted(_compare("embedding", pairs))

    def layers(self, hidden_states: Tensor) -> tuple[Tensor, Comparison]:
        """The decoder layers one after the other, each side given our hidden states; the worst layer is told.

        What is compared is what a layer adds to its input, which would else hide a fault in a deep model.
        """
        rotary = RotaryEmbedding(
            hidden_states.shape[1], self.shape.head_dim, self.shape.rope_theta, dtype=torch.float32
        )
        rotation = rotary(self.position_ids)
        worst = Comparison("decoder layers", 0.0, 0.0)
        for layer in range(self.shape.num_hidden_layers):
            ours = self._our_layer(layer)(hidden_states, rotation)
            theirs = self._their_layer(layer, hidden_states)
            # Rounding of the sum itself grows with the input.
            floor = 0.01 * hidden_states.abs().max().item()
            added = ((ours - hidden_states, theirs - hidden_states),)
            comparison = _accepted(_compare(f"decoder layers (worst: {layer})", added, floor=floor))
            worst = max(worst, comparison, key=lambda found: found.relative)
            hidden_states = ours
        return hidden_states, worst

    def final_norm(self, hidden_states: Tensor) -> tuple[Tensor, Comparison]:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        ours = RMSNorm(self.shape.hidden_size, self.shape.rms_norm_eps, dtype=torch.float32)
        ours.weight.copy_(self.ours(FINAL_NORM))
        theirs = LlamaRMSNorm(self.shape.hidden_size, self.config.rms_norm_eps)
        theirs.weight.copy_(self.files.tensor(FINAL_NORM))
        normed = ours(hidden_states)
        return normed, _accepted(_compare("final norm", ((normed, theirs(hidden_states)),)))

    def head(self, hidden_states: Tensor) -> tuple[Tensor, Comparison]:
        """Logits in pieces of the vocabulary; returns all of ours [B, S, V] for a small model, else nothing."""
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        table = self.ours(EMBEDDING if self.shape.tie_word_embeddings else HEAD)
        kept: list[Tensor] = []

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for rows in self._vocabulary():
                ours = F.linear(hidden_states, table[rows])
                if self.whole_fits:
                    kept.append(ours)
                yield ours, F.linear(hidden_states, self.files.rows(name, rows))

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

    def _their_layer(self, layer: int, hidden_states: Tensor) -> Tensor:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        with torch.device("meta"):
            built = LlamaDecoderLayer(self.config, layer)
        prefix = f"model.layers.{layer}."
        state = {name.removeprefix(prefix): name for name in self.names if name.startswith(prefix)}
        built.load_state_dict({key: self.files.tensor(name) for key, name in state.items()}, assign=True)
        length = hidden_states.shape[1]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        angles = LlamaRotaryEmbedding(self.config)(hidden_states, self.position_ids)
        output: Tensor = built(hidden_states, attention_mask=mask[None, None], position_embeddings=angles)
        return output

    def _vocabulary(self) -> list[slice]:
        size = self.shape.vocab_size
        return [slice(row, min(row + _VOCABULARY_ROWS, size)) for row in range(0, size, _VOCABULARY_ROWS)]


class _ExportedFiles:
    """The safetensors files of an export, read as transformers reads them: by name, through the index."""

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            named = dict.fromkeys(
                safe_open(folder / "model.safetensors", framework="pt").keys(), "model.safetensors"
            )
        self._open: dict[str, Any] = {
            file: safe_open(folder / file, framework="pt") for file in sorted(set(named.values()))
        }
        self.where = {name: file for file, opened in self._open.items() for name in opened.keys()}  # noqa: SIM118
        if self.where != named:
            raise CheckpointError(f"{index} does not tell what is in the files")

    def tensor(self, name: str) -> Tensor:
        values: Tensor = self._open[self.where[name]].get_tensor(name)
        return values.float()

    def rows(self, name: str, rows: slice) -> Tensor:
        values: Tensor = self._open[self.where[name]].get_slice(name)[rows]
        return values.float()


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
