"""Beam search over one model of any layout: the most likely continuation that a few hypotheses at a time find.

A search has a cache of its own, a slot for each hypothesis; it shares no forward with other requests.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.generation.beams import Beams, BeamSettings, Candidate, Hypothesis, check_beams
from megalite.generation.request import Request, check_request
from megalite.generation.token_engine import PREFILL_CHUNK
from megalite.model.decode import empty_cache, last_hidden_states
from megalite.model.kv_cache import CachedStep, PromptSegment, Room
from megalite.model.replica import Replica
from megalite.parallel.decode import start_from_last_chunk


@torch.inference_mode()
def beam_search(
    model: Replica, request: Request, settings: BeamSettings, *, prefill_chunk: int = PREFILL_CHUNK
) -> Hypothesis:
    """Return the best hypothesis; its last token may be an end token. Collective over the model's mesh.

    prefill_chunk: the most tokens of the prompt in one forward. Raises ConfigError: see `check_request`, `check_beams`.
    """
    check_beams(settings, request, model.shape)
    check_request(request, model.shape, model.shape.longest_sequence)
    prompt = request.prompt_ids
    cache = empty_cache(model, Room(settings.beams, len(prompt) + request.max_tokens))
    beams = Beams(settings, request)
    hidden: Tensor | None = None
    for start in range(0, len(prompt), prefill_chunk):
        piece = prompt[start : start + prefill_chunk]
        step = CachedStep(cache, segments=(PromptSegment(0, start, len(piece), len(prompt)),))
        hidden = _hidden_states(model, step, piece)
    rows = beams.advance(_candidates(model, hidden, beams))
    held = len(prompt)
    cache.reorder(rows, 0, held)
    while not beams.done:
        step = CachedStep(cache, (held,) * len(beams.running))
        hidden = _hidden_states(model, step, [each.tokens[-1] for each in beams.running])
        rows = beams.advance(_candidates(model, hidden, beams))
        held += 1
        # All slots hold the same prompt.
        cache.reorder(rows, len(prompt), held)
    return beams.best


def most_likely(logits: Tensor, scores: Sequence[float], count: int) -> Tensor:
    """Return the `count` most likely candidates, best first: float64 [count, 3] of score, row and token.

    logits: [R, V]. scores: the log probability of each of the R hypotheses so far.
    """
    so_far = torch.tensor(scores, dtype=logits.dtype, device=logits.device)
    logs = logits.log_softmax(dim=-1) + so_far[:, None]
    best, places = logs.flatten().topk(count)
    rows, tokens = places // logs.shape[1], places % logs.shape[1]
    return torch.stack((best.double(), rows.double(), tokens.double()), dim=1)


def _hidden_states(model: Replica, step: CachedStep, ids: Sequence[int]) -> Tensor | None:
    """Run the stages over the tokens of a step: hidden states [1, T, H] on the last stage, None on the others."""
    device = model.mesh.device
    position_ids = torch.tensor([step.position_ids], device=device)
    return last_hidden_states(model, torch.tensor([ids], device=device), position_ids, cache=step)


def _candidates(model: Replica, hidden: Tensor | None, beams: Beams) -> list[Candidate]:
    """Return the next candidates on every rank; the last stage chooses them from the last tokens' hidden states."""
    if hidden is None:
        values = torch.empty(beams.candidates, 3, dtype=torch.float64, device=model.mesh.device)
    else:
        logits = model.stage.chunks[-1].logits(hidden[:, -len(beams.running) :])[0]
        values = most_likely(logits, [each.score for each in beams.running], beams.candidates)
    found = start_from_last_chunk(values, model.split, model.mesh)().tolist()
    return [Candidate(score, int(row), int(token)) for score, row, token in found]
