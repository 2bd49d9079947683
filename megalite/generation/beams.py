"""Beam search apart from the model: its settings, the rules over them, and the hypotheses of a request. No torch.

Hypotheses are ranked as by transformers' generate(num_beams=..., do_sample=False, early_stopping=False).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megalite.errors import ConfigError, Problem
from megalite.generation.request import Request, Sampling
from megalite.topology.shape import ModelShape

# Powers of long lengths beyond it overflow, and no published search uses them.
_LARGEST_LENGTH_PENALTY = 5


@dataclass(frozen=True)
class BeamSettings:
    """How many hypotheses go on at a time, and how ended ones are ranked.

    length_penalty: an ended hypothesis is ranked by its log probability divided by its number of new tokens to this
    power. 0: by the log probability, which favours short texts; 1: by the mean per token; more favours long texts.
    """

    beams: int
    length_penalty: float = 1.0

    @classmethod
    def of(cls, beams: int, length_penalty: float | None) -> "BeamSettings":
        """Return the settings of values that a user gave; None: not given."""
        return cls(beams) if length_penalty is None else cls(beams, length_penalty)


@dataclass(frozen=True)
class Hypothesis:
    """New tokens of a request. score: their log probability; with the length penalty once the hypothesis has ended."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Candidate:
    """A token that may follow a running hypothesis. score: the log probability of all its tokens with this one."""

    score: float
    row: int
    token: int


class Beams:
    """The hypotheses of one request: those that go on, most likely first, and the best that have ended."""

    def __init__(self, settings: BeamSettings, request: Request):
        self._settings, self._request = settings, request
        self.running: tuple[Hypothesis, ...] = (Hypothesis((), 0.0),)
        self._ended: tuple[Hypothesis, ...] = ()

    @property
    def candidates(self) -> int:
        """The number of candidates that `advance` needs, so that enough of them are no end tokens."""
        return candidates_needed(self._settings, self._request)

    @property
    def done(self) -> bool:
        """True if nothing goes on, or all places of ended hypotheses hold better ones than what goes on is now.

        A running hypothesis that would become better with more tokens, as it may under a length penalty, ends too.
        """
        if not self.running:
            return True
        best = self._penalised(self.running[0])
        return len(self._ended) == self._settings.beams and best.score <= self._ended[-1].score

    @property
    def best(self) -> Hypothesis:
        """The best hypothesis that has ended."""
        return self._ended[0]

    def advance(self, candidates: Sequence[Candidate]) -> list[int]:
        """Extend the hypotheses by one token; return the earlier row of each one that goes on.

        candidates: the most likely ones of all rows, best first. Only the first `beams` of them may end.
        """
        going: list[Hypothesis] = []
        rows: list[int] = []
        ended = list(self._ended)
        for place, candidate in enumerate(candidates):
            tokens = (*self.running[candidate.row].tokens, candidate.token)
            hypothesis = Hypothesis(tokens, candidate.score)
            if candidate.token in self._request.stop_ids or len(tokens) == self._request.max_tokens:
                if place < self._settings.beams:
                    ended.append(self._penalised(hypothesis))
            elif len(going) < self._settings.beams:
                going.append(hypothesis)
                rows.append(candidate.row)
        ended.sort(key=lambda each: each.score, reverse=True)
        self.running, self._ended = tuple(going), tuple(ended[: self._settings.beams])
        return rows

    def _penalised(self, hypothesis: Hypothesis) -> Hypothesis:
        divisor = len(hypothesis.tokens) ** self._settings.length_penalty
        return Hypothesis(hypothesis.tokens, hypothesis.score / divisor)


def candidates_needed(settings: BeamSettings, request: Request) -> int:
    """Return the number of candidates of a step: each beam may end by any end token, and another token goes on."""
    return max(2, 1 + len(request.stop_ids)) * settings.beams


def beam_problems(
    beams: int,
    length_penalty: float | None,
    sampling: Sampling,
    name: Callable[[str], str] = str,
    *,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
) -> Iterator[Problem]:
    """Yield the problems of beam search's settings, and of other settings beside it; beams: 1: no beam search.

    name: how the caller writes a setting, such as `--length-penalty` for length_penalty.
    """
    if beams < 1:
        yield Problem(name("beams"), f"{beams} is no number of beams", "use 2 or more; 1 is no beam search")
        return
    if length_penalty is not None and not abs(length_penalty) <= _LARGEST_LENGTH_PENALTY:
        yield Problem(
            name("length_penalty"),
            f"{length_penalty:g} is not a length penalty",
            f"use -{_LARGEST_LENGTH_PENALTY} to {_LARGEST_LENGTH_PENALTY}; 0 is none",
        )
    if beams == 1:
        if length_penalty is not None:
            remedy = f"set {name('beams')} to 2 or more, or leave it out"
            yield Problem(name("length_penalty"), "has no effect without beam search", remedy)
        return
    for setting, given in (
        ("temperature", sampling.temperature != 0),
        ("repetition_penalty", sampling.repetition_penalty != 1),
        ("presence_penalty", sampling.presence_penalty != 0),
        ("frequency_penalty", sampling.frequency_penalty != 0),
        ("stop", bool(stop)),
        ("logprobs", logprobs is not None),
    ):
        if given:
            yield Problem(
                name(setting), "is not for beam search", f"leave it out, or leave out {name('beams')}"
            )


def check_beams(settings: BeamSettings, request: Request, shape: ModelShape) -> None:
    """Raise ConfigError if a request cannot be searched: wrong settings, or more candidates than the vocabulary."""
    problems = list(
        beam_problems(
            settings.beams,
            None if settings.beams == 1 else settings.length_penalty,
            request.sampling,
            stop=request.stop,
            logprobs=request.logprobs,
        )
    )
    if request.adapter is not None:
        problems.append(Problem("adapter", "is not for beam search", "leave it out, or leave out beams"))
    needed, vocabulary = candidates_needed(settings, request), shape.vocab_size
    if needed > vocabulary:
        problems.append(
            Problem(
                "beams",
                f"{settings.beams} beams need {needed} candidates, and the model's vocabulary has {vocabulary} tokens",
                f"use at most {vocabulary * settings.beams // needed}",
            )
        )
    if problems:
        raise ConfigError(problems, "the request")
