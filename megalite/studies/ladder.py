"""A ladder of small models for a scaling law: widths and depths, numbers of tokens, and the settings of each run."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megalite.config.sections.schema import RunConfig
from megalite.studies.outcomes import RunOutcome
from megalite.studies.study_runs import StudyRun
from megalite.topology.flops import flops_per_token
from megalite.topology.parameters import EMBEDDING, HEAD, HEAD_BIAS, POSITIONS, model_parameters

HEAD_DIM, MULTIPLE = 16, 16
MOST_TOKENS = 2**21
"""Tokens of the held-out run, unless the text has fewer; the ladder has fractions of the same number."""
_FRACTIONS = (16, 8, 4, 2)
RATE_TIMES_WIDTH = 0.128
"""The learning rate is this divided by the width, as for Adam's hidden matrices in Yang et al. 2022, arXiv 2203.03466.

From four rates (0.002 to 0.016) with 262 thousand tokens of WikiText-2 in batches of 1,024: 0.004 was best at width 32,
0.002 at width 64.
"""
WARMUP = 0.05
# Seconds of one core of a server for a token and an operation, and of a start, before any run has shown better ones.
_TOKEN_SECONDS, _FLOP_SECONDS, _START_SECONDS = 2e-5, 1 / 5e10, 5.0
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class Rung:
    """A size of model."""

    width: int
    layers: int

    def __str__(self) -> str:
        return f"{self.width}x{self.layers}"

    def flags(self) -> dict[str, str]:
        """Return the model's settings; the MLP is 4 times as wide as the model."""
        heads = max(1, self.width // HEAD_DIM)
        sizes = {
            "hidden_size": self.width,
            "intermediate_size": 4 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": self.width // heads,
        }
        return {f"model.{key}": str(value) for key, value in sizes.items()}


LADDER = (Rung(32, 2), Rung(48, 2), Rung(64, 3), Rung(96, 3))
HELD_OUT = Rung(128, 4)


@dataclass(frozen=True)
class LadderRun:
    """A run of the ladder.

    parameters: without the embedding and the head. flops: of forward and backward, with the head.
    """

    name: str
    rung: Rung
    tokens: int
    parameters: int
    all_parameters: int
    flops: float


def rung(text: str) -> Rung:
    """Read WIDTHxLAYERS. For argparse: raises ArgumentTypeError for another form."""
    form = re.fullmatch(r"(\d+)x(\d+)", text)
    if form is None or int(form[1]) < MULTIPLE or int(form[1]) % MULTIPLE or int(form[2]) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not WIDTHxLAYERS with a multiple of {MULTIPLE}, as in 64x3"
        )
    return Rung(int(form[1]), int(form[2]))


def token_count(text: str) -> int:
    """Read 300k, 1.5M or a whole number. For argparse: raises ArgumentTypeError for another form."""
    form = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", text.lower())
    if form is None or float(form[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, as in 300k or 1.5M")
    return round(float(form[1]) * _UNITS[form[2]])


def default_tokens(train_tokens: int) -> tuple[list[int], int]:
    """Return (tokens of the ladder's runs, tokens of the held-out run) so that no run sees a token twice."""
    most = min(MOST_TOKENS, train_tokens)
    return [most // fraction for fraction in _FRACTIONS], most


def run_settings(size: Rung, tokens: int, base: RunConfig, rate: float) -> dict[str, str]:
    """Return the settings of a run: its size, its steps, and a learning rate that decays within them."""
    batch = base.batch.global_batch_size * base.training.sequence_length
    steps = max(1, round(tokens / batch))
    return {
        **size.flags(),
        "training.steps": str(steps),
        "training.epochs": "unset",
        "optimizer.learning_rate": f"{rate / size.width:.4g}",
        "optimizer.schedule": "cosine",
        "optimizer.decay_steps": "unset",
        "optimizer.warmup_steps": str(round(WARMUP * steps)),
        "optimizer.warmup_ratio": "unset",
        "validation.every": "unset",
        "validation.patience": "unset",
        "checkpoint.every": "unset",
        "checkpoint.export": "false",
        "monitor.every": str(max(1, steps // 10)),
    }


def run_name(size: Rung, tokens: int) -> str:
    return f"{size}-{tokens}"


def ladder_run(run: StudyRun, size: Rung, vocab_size: int) -> LadderRun:
    """Return the numbers of a run, whose tokens are those of its whole steps."""
    config = run.config
    shape = config.shape(vocab_size)
    counts = {parameter.name: parameter.numel for parameter in model_parameters(shape)}
    tables = sum(counts.get(name, 0) for name in (EMBEDDING, HEAD, HEAD_BIAS, POSITIONS))
    tokens = (config.training.steps or 0) * config.batch.global_batch_size * config.training.sequence_length
    total = sum(counts.values())
    flops = float(flops_per_token(shape, config.training.sequence_length)) * tokens
    return LadderRun(run.name, size, tokens, total - tables, total, flops)


def processor_seconds(run: LadderRun) -> float:
    """Return the estimate of a run's time on one core."""
    return _START_SECONDS + run.tokens * _TOKEN_SECONDS + run.flops * _FLOP_SECONDS


def seconds_left(runs: Sequence[LadderRun], outcomes: Mapping[str, RunOutcome]) -> tuple[float, bool]:
    """Return (processor time of the runs that are not finished, whether finished ones have corrected the estimate)."""
    finished = [run for run in runs if outcomes[run.name].state == "finished"]
    known = [
        outcomes[run.name].processor_seconds / processor_seconds(run)
        for run in finished
        if outcomes[run.name].processor_seconds
    ]
    factor = median(known) if known else 1.0
    left = sum(processor_seconds(run) for run in runs if outcomes[run.name].state != "finished")
    return factor * left, bool(known)
