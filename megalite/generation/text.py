"""Load a model and continue a text with it: `megalite.load`, `megalite.generate` and the command."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.convert.huggingface.load import load_huggingface
from megalite.convert.peft.load import load_beside, load_merged
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.errors import ConfigError
from megalite.generation.engine import build_model, generate_ids, load_model
from megalite.generation.request import Sampling, sampling_problems
from megalite.generation.source import ModelSource, find_source
from megalite.model.replica import Replica
from megalite.model.transformer import Stage
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, ready to generate.

    replica: this rank's share of the model; the whole model if loaded by `load`. source: where it was read from.
    """

    replica: Replica
    tokenizer: Tokenizer
    source: ModelSource

    @property
    def model(self) -> Stage:
        """The torch module, with parameters under Llama's Hugging Face names."""
        return self.replica.stage

    @property
    def config(self) -> ModelShape:
        """The sizes and the family of the model."""
        return self.replica.shape

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Return logits [B, S, V] for input_ids [B, S]; one process that holds the whole model."""
        positions = torch.arange(input_ids.shape[1], device=self.replica.mesh.device).unsqueeze(0)
        chunk = self.model.whole
        return chunk.logits(chunk.decode(input_ids.to(self.replica.mesh.device), positions))


@dataclass(frozen=True)
class Continuation:
    """The prompt with the new tokens behind it, as text, and the number of new tokens."""

    text: str
    new_tokens: int


def load(
    path: Path | str,
    *,
    step: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | str | None = None,
    base: Path | str | None = None,
) -> LoadedModel:
    """Load a model to generate from, whole, into this process.

    path: a run folder, a checkpoint, a Hugging Face folder, an adapter in PEFT's format, or org/name of the Hugging
        Face Hub. An adapter is merged into its base.
    step: the checkpoint of this step instead of the latest one of a run folder.
    device: None: the accelerator if there is one, else the CPU. dtype: of the weights and the computation.
    tokenizer: a Hugging Face folder or a tokenizer.json, instead of the model's own.
    base: the folder of the weights beside an adapter, where they have moved.
    Raises CheckpointError if there is no model, or it is damaged or has no tokenizer; ConfigError for a config.json
    whose model is not built; DataError for the tokenizer.
    """
    source = find_source(
        path,
        step=step,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        base=None if base is None else Path(base),
    )
    return load_source(source, ParallelMesh.single(device or local_device(0, 1)), dtype)


def generate(
    loaded: LoadedModel,
    prompt: str,
    *,
    tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Return the prompt and its continuation, the text that `megalite generate` prints.

    tokens: the maximum number of new tokens; an end-of-document token ends the text before. temperature: 0 takes the
    most likely token. top_k: sample from the k most likely tokens. top_p: sample from the fewest tokens with that
    total probability. seed: equal seeds give equal texts.
    Raises ConfigError for a wrong value, with all of them, and if prompt and new tokens exceed the model's positions.
    """
    sampling = Sampling(temperature, top_k or 0, 1.0 if top_p is None else top_p, seed)
    if problems := list(sampling_problems(tokens, temperature, top_k, top_p)):
        raise ConfigError(problems, "the request")
    return continue_text(loaded, prompt, tokens, sampling).text


def load_source(source: ModelSource, mesh: ParallelMesh, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load this rank's part of a model. Collective over the mesh. Raises CheckpointError, DataError."""
    tokenizer = load_tokenizer(source.tokenizer, end_of_document=source.end_of_document)
    if source.base is not None and source.shape.prefix_tokens:
        replica = build_model(source.shape, mesh, dtype)
        load_beside(source.folder, source.base, replica, is_peft=source.is_huggingface)
    elif source.base is not None:
        replica = build_model(source.shape.base, mesh, dtype)
        load_merged(source.folder, source.shape, source.base, replica, is_peft=source.is_huggingface)
    elif source.is_huggingface:
        replica = build_model(source.shape, mesh, dtype)
        load_huggingface(source.folder, replica)
    else:
        replica = load_model(source.folder, mesh, dtype)
    return LoadedModel(replica, tokenizer, source)


def continue_text(loaded: LoadedModel, prompt: str, tokens: int, sampling: Sampling) -> Continuation:
    """Generate on every rank of the model's mesh alike. Raises ConfigError."""
    tokenizer = loaded.tokenizer
    prompt_ids = _prompt_ids(tokenizer, prompt)
    new_ids = list(
        generate_ids(
            loaded.replica,
            prompt_ids,
            new_tokens=tokens,
            sampling=sampling,
            stop_ids={tokenizer.end_of_document_id},
        )
    )
    return Continuation(prompt + _continuation(tokenizer, prompt_ids, new_ids), len(new_ids))


def _prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode the prompt as transformers does: with the tokenizer's start token, without its end token."""
    ids: list[int] = tokenizer.backend.encode(prompt).ids
    return ids[:-1] if ids[-1:] == [tokenizer.end_of_document_id] else ids


def _continuation(tokenizer: Tokenizer, prompt_ids: list[int], new_ids: list[int]) -> str:
    """Decode the new tokens after the prompt: decoded alone, many tokenizers drop the leading space."""
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt_ids, *new_ids], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(new_ids, skip_special_tokens=True)  # the prompt ended inside a UTF-8 character
