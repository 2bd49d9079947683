"""Verifications in a process that has not computed with torch, as `megalite verify` has it: it forks the ranks."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal
from unittest import mock

from megalite.config.flags import as_flags
from megalite.config.load import load_run
from megalite.config.rules import every
from megalite.config.rules.adapter import an_adapter_has_a_model
from megalite.launcher.rank.detect import RankInfo

# A run that hides no mistake once it is small: all sizes differ, heads are grouped, clipping is active.
SETTINGS: dict[str, Any] = {
    "run.seed": 7,
    "model.hidden_size": 48,
    "model.intermediate_size": 76,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4,
    "model.num_hidden_layers": 4,
    "model.max_position_embeddings": 64,
    "training.steps": 4,
    "training.sequence_length": 24,
    "training.global_batch_size": 8,
    "training.micro_batch_size": 1,
    "training.threads": 1,
    "optimizer.learning_rate": 0.01,
    "data.source": "unused",
    "checkpoint.export": False,
}


@contextmanager
def verifier() -> Iterator[ProcessPoolExecutor]:
    """Yield the process in which `verified` is to be called, in its main thread."""
    with ProcessPoolExecutor(1, get_context("spawn"), _silent) as process:
        yield process


def _silent() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def adapters_without_weights() -> Iterator[None]:
    """Let an adapter stand beside drawn weights."""
    rules = tuple(rule for rule in every.RULES if rule is not an_adapter_has_a_model)
    with mock.patch.object(every, "RULES", rules):
        yield


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of the run of SETTINGS and others."""
    return [*as_flags({**SETTINGS, **settings})]


def verified(
    settings: Mapping[str, Any],
    fault: str | None = None,
    *,
    precision: Literal["float64", "run"] = "float64",
    steps: int = 2,
) -> Any:
    """Verify a run with a fault of verify_faults.py planted in its layout's ranks; return the certificate."""
    from megalite.verify.run import VerifyRequest, verify

    with adapters_without_weights():
        config = load_run(None, flags_of(settings)).config
    request = VerifyRequest(steps, precision)
    return verify(config, request, worker=partial(_record_with_fault, fault=fault))


def _record_with_fault(info: RankInfo, job: Any, *, fault: str | None, dying: str = "") -> int:
    from megalite.verify.record import record_rank
    from tests.support.verify_faults import planted_run_fault

    if dying and dying == f"ZeRO {job.config.zero_stage}":
        raise RuntimeError("this rank dies")
    with planted_run_fault(fault):
        return record_rank(info, job)


def verified_matrix(
    settings: Mapping[str, Any],
    ranks: int,
    fault: str | None = None,
    *,
    dying: str = "",
    stopped_after: int = 0,
    precision: Literal["float64", "run"] = "float64",
) -> tuple[Any, list[str]]:
    """Verify all layouts of a run; return the certificate and the lines that were said, the number of layouts first.

    fault: as that of `verified`. dying: layouts with this ZeRO stage end in an error. stopped_after: Ctrl-C comes
    after so many layouts.
    """
    from megalite.verify.matrix import verify_matrix
    from megalite.verify.run import VerifyRequest

    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if stopped_after and len(lines) == stopped_after + 1:
            raise KeyboardInterrupt

    worker = partial(_record_with_fault, fault=fault, dying=dying)
    request = VerifyRequest(precision=precision)
    return verify_matrix(None, flags_of(settings), ranks, request, worker=worker, say=say), lines
