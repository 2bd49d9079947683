"""Scores windows of tokens with a model, over the ranks of any layout."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megalite.evaluate.windows import Window
from megalite.generation.loaded import LoadedModel
from megalite.model.context import StepContext
from megalite.model.decode import last_hidden_states
from megalite.model.replica import Replica
from megalite.monitor.work import working
from megalite.parallel.collectives import all_reduce
from megalite.parallel.context import ContextRows
from megalite.parallel.log_probs import vocab_parallel_log_probs
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.context import zig_zag

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
        if scored is not None and model.mesh.counts_samples:
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
            if scored is None or not model.mesh.counts_samples:
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

    None on pipeline stages without the head. Collective over the ranks of one copy of the model, whose
    context-parallel ranks share each window.
    """
    mesh = model.mesh
    lengths = [len(window.inputs) for window in batch]
    # Padding stands behind the tokens, where causal attention does not see it.
    ids = np.zeros((len(batch), _padded_length(max(lengths), mesh.cp.size)), dtype=np.int64)
    for row, window in zip(ids, batch, strict=True):
        row[: len(window.inputs)] = window.inputs
    input_ids = torch.from_numpy(ids).to(mesh.device)
    position_ids = torch.arange(ids.shape[1], device=mesh.device).unsqueeze(0)
    tokens_of_rows = torch.tensor(lengths, device=mesh.device).unsqueeze(1)
    rows = None
    if mesh.cp.size > 1:
        rows = ContextRows.of(*ids.shape, mesh)
        input_ids = input_ids.gather(1, rows.positions)
        # The model may have no position for padding.
        position_ids = rows.positions.clamp(max=max(lengths) - 1)
    context = StepContext(rows=rows)
    hidden_states = last_hidden_states(
        model, input_ids, position_ids, context=context, lengths=tokens_of_rows
    )
    if hidden_states is None:
        return None
    # The last m positions of a window predict its m targets.
    of_rows = zip(batch, lengths, strict=True)
    places = [np.arange(length - len(window.targets), length) for window, length in of_rows]
    wanted = torch.from_numpy(np.concatenate([row * ids.shape[1] + own for row, own in enumerate(places)]))
    targets = torch.from_numpy(np.concatenate([window.targets for window in batch]).astype(np.int64))
    if rows is None:
        return _in_blocks(model, hidden_states.flatten(0, 1)[wanted.to(mesh.device)], targets.to(mesh.device))
    return _over_context(model, hidden_states, wanted, targets, rows)


def _padded_length(tokens: int, ranks: int) -> int:
    """Return the length to which rows of so many tokens are padded, to be cut into the blocks of `zig_zag`."""
    blocks = sum(map(len, zig_zag(ranks)))
    return -(-tokens // blocks) * blocks


def _over_context(
    model: Replica, hidden_states: Tensor, wanted: Tensor, targets: Tensor, rows: ContextRows
) -> tuple[Tensor, Tensor]:
    """Score the wanted places of whole rows end to end [T], each on the rank that has it; all ranks get all scores.

    hidden_states: of this rank's tokens, [B, S / c, H].
    """
    numbers = torch.arange(len(rows.table), device=hidden_states.device).unsqueeze(1)
    have = torch.full((len(rows.table) * rows.length,), -1, device=hidden_states.device)
    have[(numbers * rows.length + rows.positions).flatten()] = torch.arange(
        rows.positions.numel(), device=have.device
    )
    found = have[wanted.to(have.device)]
    own = (found >= 0).nonzero().squeeze(1)
    scored = _in_blocks(model, hidden_states.flatten(0, 1)[found[own]], targets.to(have.device)[own])
    # Every place is scored by one rank, and the others add zero.
    summed = torch.zeros(2, len(wanted), dtype=torch.float64, device=have.device)
    summed[:, own] = torch.stack([each.double() for each in scored])
    log_probs, greedy = all_reduce(summed, rows.ranks)
    return log_probs, greedy > 0


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
