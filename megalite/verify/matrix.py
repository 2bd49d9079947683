"""`megalite verify RUN.toml --matrix N`: every legal layout of up to N ranks, each compared with one process.

All layouts train one small run, so that its text is made, and the one process is trained, once.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, lcm
from pathlib import Path
from typing import Any

from megalite.config.rules.every import layout_problems
from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, MegaliteError, Problem, counted
from megalite.launcher.local import Worker
from megalite.planner.search import checked_run
from megalite.topology.sharding import divisors
from megalite.verify.certificate import (
    Certificate,
    config_sha256,
    versions,
    write_certificate,
)
from megalite.verify.findings import INITIAL, Worst
from megalite.verify.layouts import LayoutMatrix, LegalLayout, UnusableLayout, layout_matrix, shortest_flags
from megalite.verify.run import Verifier, VerifyRequest
from megalite.verify.scratch import ScratchError, scratch_explained
from megalite.verify.shrink import Shrunk, shrunk

_NAME_WIDTH = 64


@dataclass(frozen=True)
class LayoutVerdict:
    """The verdict on one layout. flags: those that lead to it from the run file. departure: why it does not hold.

    quantity, error, bound: the quantity whose largest relative error is nearest to, or farthest beyond, its bound.
    """

    layout: str
    ranks: int
    flags: Sequence[str] = ()
    departure: str = ""
    quantity: str = ""
    error: float = 0.0
    bound: float = 0.0
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.departure

    @property
    def line(self) -> str:
        verdict = "holds" if self.holds else "DEPARTS"
        worst = f"{self.error:.1e} of {self.bound:.0e}, {self.quantity}" if self.quantity else "not compared"
        return f"{self.layout:<{_NAME_WIDTH}} {verdict:<8}{self.seconds:>6.1f} s  {worst}"


@dataclass(frozen=True)
class MatrixCertificate:
    """The findings of the verification of many layouts, and all that they are bound to.

    refused: setting that a rule or this machine refuses -> number of layouts, the first and its problem. left: legal
    layouts that were not verified, because the user stopped before. changed, unchecked: as those of a Certificate.
    """

    config_sha256: str
    most_ranks: int
    layouts: Sequence[LayoutVerdict]
    refused: Mapping[str, Mapping[str, Any]]
    left: Sequence[str]
    changed: Sequence[str]
    unchecked: Sequence[str]
    kernels: str
    device: str
    versions: Mapping[str, str] = field(default_factory=versions)
    seconds: float = 0.0

    @property
    def failed(self) -> list[LayoutVerdict]:
        return [verdict for verdict in self.layouts if not verdict.holds]

    @property
    def holds(self) -> bool:
        return not self.failed and not self.left

    def as_dict(self) -> dict[str, Any]:
        return {"holds": self.holds, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the certificate for people."""
        yield from (verdict.line for verdict in self.layouts)
        yield from self.summary()

    def summary(self) -> Iterator[str]:
        """Yield the certificate without the line of each layout."""
        for verdict in self.failed:
            yield ""
            yield f"{verdict.layout} departs: {verdict.departure}"
            yield f"  alone: megalite verify RUN.toml {' '.join(verdict.flags)}"
        yield ""
        done, failed = len(self.layouts), len(self.failed)
        yield f"{counted(done, 'layout')} of up to {counted(self.most_ranks, 'rank')}: " + (
            f"{failed} {'departs' if failed == 1 else 'depart'}" if failed else "all hold"
        )
        if self.left:
            yield f"not verified, because it was stopped: {len(self.left)}, from {self.left[0]} on"
        for reason in self.refused.values():
            yield f"refused: {counted(reason['layouts'], 'layout')}, the first {reason['first']}: {reason['problem']}"
        if self.changed:
            yield "changed for this verification:"
            yield from (f"  {line}" for line in self.changed)
        yield "not checked:"
        yield from (f"  {line}" for line in self.unchecked)

    def write(self, path: Path) -> Path:
        """Write the JSON, and the text beside it; return the text's path. ConfigError where that cannot be done."""
        return write_certificate(path, self.as_dict(), self.lines())


def verify_matrix(
    path: Path | str | None,
    flags: Sequence[str],
    ranks: int,
    request: VerifyRequest,
    *,
    worker: Worker | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> MatrixCertificate:
    """Verify all legal layouts of 1 to `ranks` ranks of a run file, as `layout_matrix` lists them.

    say: called with the number of layouts, then with a line for each once its verdict is known. A layout whose training
    fails departs, and the others go on. After Ctrl-C the certificate has what was done, and the names of what is left.
    worker: as that of `verify`. Raises ConfigError if the run itself is wrong, or if this machine cannot train it, or
    none of the layouts.
    """
    started, matrix = time.monotonic(), layout_matrix(path, flags, ranks)
    run = matrix.run
    small = shrunk(run, full_size=True) if request.full_size else _small(run, matrix.legal, ranks)
    verdicts: list[LayoutVerdict] = []
    certificates: list[Certificate] = []
    refused, todo = [*matrix.refused], [*matrix.legal]
    say(f"{counted(len(todo), 'layout')} of up to {counted(ranks, 'rank')}")
    with scratch_explained(), tempfile.TemporaryDirectory(prefix="megalite-verify-") as scratch:
        verifier = Verifier(request, Path(scratch), lambda _: None)
        try:
            while todo:
                layout = todo[0]
                config = _laid_out(small.config, layout.config, full_size=request.full_size)
                if (problem := _problem(config)) is not None:
                    refused.append(UnusableLayout(layout.name, problem))
                    todo.pop(0)
                    continue
                try:
                    verdict, certificate = _verdict(verifier, layout, Shrunk(config, small.changes), worker)
                except ConfigError as error:
                    # This machine refuses, as DeepSpeed does fp16 without a GPU.
                    if _is_own(layout.config, run) or (len(todo) == 1 and not verdicts):
                        raise
                    refused.append(UnusableLayout(layout.name, error.problems[0]))
                    todo.pop(0)
                    continue
                verdicts.append(replace(verdict, flags=[*flags, *shortest_flags(path, flags, layout)]))
                certificates += [] if certificate is None else [certificate]
                todo.pop(0)
                say(verdict.line)
        except KeyboardInterrupt:
            say("stopped")
    reasons = LayoutMatrix(run, matrix.legal, refused).reasons
    last = certificates[-1] if certificates else None
    return MatrixCertificate(
        config_sha256=config_sha256(run),
        most_ranks=ranks,
        layouts=verdicts,
        refused={
            key: {"layouts": number, "first": first.name, "problem": str(first.problem)}
            for key, (number, first) in reasons.items()
        },
        left=[layout.name for layout in todo],
        changed=list(dict.fromkeys(line for each in certificates for line in each.changed)) or small.changes,
        unchecked=list(dict.fromkeys(line for each in certificates for line in each.unchecked)),
        kernels="" if last is None else last.kernels,
        device="" if last is None else last.device,
        seconds=time.monotonic() - started,
    )


def _verdict(
    verifier: Verifier, layout: LegalLayout, small: Shrunk, worker: Worker | None
) -> tuple[LayoutVerdict, Certificate | None]:
    began = time.monotonic()
    verdict = LayoutVerdict(layout.name, layout.config.layout.world_size)
    try:
        certificate = verifier.certified(layout.config, small, worker)
    except (ConfigError, ScratchError):
        raise
    except MegaliteError as failure:
        # The report that is named is gone with the folder of this verification.
        text = "\n".join(line for line in str(failure).splitlines() if "full report: " not in line)
        return replace(verdict, departure=text, seconds=time.monotonic() - began), None
    if certificate.departures:
        first = certificate.departures[0]
        quantity, error, bound = first.quantity, first.error, first.bound
    else:
        # Initial weights are drawn, and only rounded.
        compared = [each for each in certificate.worst.items() if each[0] != INITIAL]
        quantity, worst = max(compared, key=lambda each: Worst(**each[1]).share)
        error, bound = worst["error"], worst["allowed"]
    done = replace(
        verdict,
        departure=certificate.departure,
        quantity=quantity,
        error=error,
        bound=bound,
        seconds=time.monotonic() - began,
    )
    return done, certificate


def _is_own(config: RunConfig, run: RunConfig) -> bool:
    return config.parallel == run.parallel and config.zero_stage == run.zero_stage


def _small(run: RunConfig, layouts: Sequence[LegalLayout], ranks: int) -> Shrunk:
    """Return one small run for all layouts: ranks divide its sizes as those of the run, with the same remainders."""
    configs = [layout.config for layout in layouts]

    def common(axis: str) -> int:
        return lcm(*(getattr(config.layout, axis) for config in configs))

    chunks = max(len(config.split.layers) for config in configs)
    covering = {
        **{"tensor": common("tensor"), "context": common("context"), "sequence": True},
        # Two layers a chunk of these, one a chunk of the longest pipeline.
        **{"pipeline": ceil(chunks / 2), "virtual_stages": 1, "layers_per_stage": None, "schedule": "1f1b"},
    }
    small = shrunk(run.model_copy(update={"parallel": run.parallel.model_copy(update=covering)}))
    rows, size = (
        run.batch.global_batch_size,
        min(run.batch.micro_batch_size, small.config.batch.micro_batch_size),
    )
    unit = size * common("data")
    batch = {
        # Two micro batches for each stage, or as many as the run has.
        "global_batch_size": min(rows, unit * ceil(2 * ranks * size / unit)),
        "micro_batch_size": size,
    }
    changes = [line for line in small.changes if not line.startswith(("parallel.", "training.micro_batches"))]
    changes = [line for line in changes if not line.startswith("training.global_batch_size")]
    if batch["global_batch_size"] != rows:
        changes.append(f"training.global_batch_size: {rows} -> {batch['global_batch_size']}")
    training = small.config.training.model_copy(update=batch)
    return Shrunk(small.config.model_copy(update={"training": training}), tuple(changes))


def _laid_out(small: RunConfig, layout: RunConfig, *, full_size: bool) -> RunConfig:
    """Return the small run in a layout of the whole one, or that layout of the whole one itself."""
    if full_size:
        return shrunk(layout, full_size=True).config
    total, size = small.training.global_batch_size, small.training.micro_batch_size
    assert isinstance(total, int) and isinstance(size, int)
    rows = max(1, total // layout.layout.data)
    size = max(micro for micro in divisors(rows) if micro <= size)
    training = small.training.model_copy(update={"micro_batch_size": size, "micro_batches": rows // size})
    parallel = layout.parallel.model_copy(update={"layers_per_stage": None})
    return small.model_copy(
        update={"training": training, "parallel": parallel, "deepspeed": layout.deepspeed}
    )


def _problem(config: RunConfig) -> Problem | None:
    """Return why the small run cannot have a layout that the whole one can; mostly None."""
    checked = checked_run(config, config.layout.world_size)
    zero = {"zero_optimization": {"stage": config.zero_stage}} if config.zero_stage else {}
    return next(layout_problems(replace(checked, deepspeed=zero)), None)
