"""Scores windows of tokens with a model, over its tensor-, pipeline- and data-parallel ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megalite.evaluate.windows import Window
from megalite.generation.loaded import LoadedModel
from megalite.model.decode import last_hidden_states
from megalite.model.replica import Replica
from megalite.monitor.work import working
from megalite.parallel.log_probs import vocab_parallel_log_probs
from megalite.parallel.mesh import ParallelMesh

# The logits that exist at once on a rank.
_MOST_LOGITS = 1 << 25
# Windows are sorted by length within this number of batches, so that batches have little padding.
_SORTED_BATCHES = 16


Advance = Callable[[int], None]


@dataclass(frozen=True)
class Score:
    """The log-likelihood of a window's counted targets, and whether greedy decoding would choose all of them."""

    log_likelihood: float
    is_greedy: bool


def total_log_likelihood(
    model: Replica, windows: Iterable[Window], batch_size: int, advance: Advance
) -> tuple[float, int]:
    """Return the log-likelihood of all counted targets and their number, on every rank.

    Each data-parallel rank scores every n-th window. advance: called with the number of windows that are done.
    Collective over the world: all ranks give the same windows.
    """
    log_likelihood, tokens = 0.0, 0
    for batch in _own_batches(windows, model.mesh, batch_size):
        scored = score_batch(model, [window for _, window in batch])
        if scored is not None and model.mesh.counts_loss:
            counted = torch.from_numpy(np.concatenate([_counted(window) for _, window in batch]))
            log_likelihood += scored[0].cpu().double()[counted].sum().item()
            tokens += int(counted.sum())
        advance(len(batch) * model.mesh.batch.size)
    total, count = model.mesh.sum_over_world([log_likelihood, float(tokens)])
    return total, int(count)


def scores(loaded: LoadedModel, windows: Sequence[Window], batch_size: int) -> list[Score]:
    """Return the score of each window, in order, on every rank; rank 0 shows the progress. Collective, as above."""
    model, own = loaded.replica, list[tuple[int, Score]]()
    with working("scoring", unit="windows", total=len(windows), shown=model.mesh.rank == 0) as work:
        for batch in _own_batches(windows, model.mesh, batch_size):
            scored = score_batch(model, [window for _, window in batch])
            work.advance(len(batch) * model.mesh.batch.size)
            if scored is None or not model.mesh.counts_loss:
                continue
            lengths = [len(window.targets) for _, window in batch]
            parts = zip(*(values.cpu().split(lengths) for values in scored), strict=True)
            for (index, window), (log_probs, greedy) in zip(batch, parts, strict=True):
                counted = torch.from_numpy(_counted(window))
                score = Score(log_probs.double()[counted].sum().item(), bool(greedy[counted].all()))
                own.append((index, score))
    gathered = model.mesh.gather_objects(own)
    by_index = dict(numbered for part in gathered or [] for numbered in part)
    return cast(list[Score], model.mesh.broadcast_object([by_index[index] for index in sorted(by_index)]))


@torch.inference_mode()
def score_batch(model: Replica, batch: Sequence[Window]) -> tuple[Tensor, Tensor] | None:
    """Return the log-probability of each target of all windows, end to end [T], and whether argmax would choose it [T].

    None on pipeline stages without the head. Collective over the ranks of one copy of the model.
    """
    mesh = model.mesh
    lengths = [len(window.inputs) for window in batch]
    # Padding stands behind the tokens, where causal attention does not see it.
    ids = np.zeros((len(batch), max(lengths)), dtype=np.int64)
    for row, window in zip(ids, batch, strict=True):
        row[: len(window.inputs)] = window.inputs
    input_ids = torch.from_numpy(ids).to(mesh.device)
    position_ids = torch.arange(ids.shape[1], device=mesh.device).unsqueeze(0)
    tokens_of_rows = torch.tensor(lengths, device=mesh.device).unsqueeze(1)
    hidden_states = last_hidden_states(model, input_ids, position_ids, lengths=tokens_of_rows)
    if hidden_states is None:
        return None
    # The last m positions of a window predict its m targets.
    places = [
        row * ids.shape[1] + np.arange(length - len(window.targets), length)
        for row, (window, length) in enumerate(zip(batch, lengths, strict=True))
    ]
    picked = hidden_states.flatten(0, 1)[torch.from_numpy(np.concatenate(places)).to(mesh.device)]
    targets = np.concatenate([window.targets for window in batch]).astype(np.int64)
    return _in_blocks(model, picked, torch.from_numpy(targets).to(mesh.device))


def _in_blocks(model: Replica, hidden_states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Score hidden states [T, H], so many at a time that their logits fit; returns [T] and [T]."""
    output, tp = model.stage.chunks[-1].output, model.mesh.tp
    rows = output.vocabulary[tp.rank]
    # The same on all tensor-parallel ranks, whose shares of the vocabulary may differ by one.
    block = max(1, _MOST_LOGITS // len(output.vocabulary[0]))
    parts = [
        vocab_parallel_log_probs(output.local_logits(states.unsqueeze(0))[0], labels, rows, tp)
        for states, labels in zip(hidden_states.split(block), targets.split(block), strict=True)
    ]
    log_probs, greedy = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(greedy)


def _own_batches(
    windows: Iterable[Window], mesh: ParallelMesh, batch_size: int
) -> Iterator[list[tuple[int, Window]]]:
    """Yield the batches of this data-parallel rank, each window with its number."""
    own = islice(enumerate(windows), mesh.batch.rank, None, mesh.batch.size)
    while buffer := list(islice(own, batch_size * _SORTED_BATCHES)):
        buffer.sort(key=lambda numbered: -len(numbered[1].inputs))
        for start in range(0, len(buffer), batch_size):
            yield buffer[start : start + batch_size]


def _counted(window: Window) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    return np.ones(len(window.targets), dtype=bool) if window.counted is None else window.counted
