"""The prediction that a run is compared with: memory of its fullest rank, and the time of a step on a known card."""

from dataclasses import dataclass

from megalite.config.output.summary import memory_text
from megalite.planner.cluster import FACTS, Cluster
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.planner.step_time import step_time

# A process on the CPU keeps up to 0.1 GiB beside its tensors: threads, heaps, libraries that are loaded late.
_LEAST_CPU_MEMORY = 512 * 2**20


@dataclass(frozen=True)
class RunPrediction:
    """memory: bytes of the fullest rank, without the process's own. seconds: of a step; None: the card is not known.

    tokens: of a step over all replicas. basis: the assumptions of the time, for people.
    """

    memory: float
    seconds: float | None
    tokens: int
    basis: str
    on_cpu: bool

    @property
    def line(self) -> str:
        """The line at the start of a run; "" where no time is known."""
        if self.seconds is None:
            return ""
        speed = self.tokens / self.seconds
        return f"predicted: {self.seconds:.3g} s a step, {speed:,.0f} tokens/s ({self.basis})"

    def compared(self, memory: float | None, seconds: float | None) -> str:
        """Return the line at the end of a run, "" if nothing is measured: what was predicted, measured, and the error.

        memory: bytes of the fullest rank. seconds: the median of the steps. None: not measured. On a CPU the memory of
        a small run is left out, which is mostly the process's own.
        """
        parts = []
        if memory and not (self.on_cpu and self.memory < _LEAST_CPU_MEMORY):
            sizes = f"{memory_text(self.memory)}, measured {memory_text(memory)}"
            reason = ", a CPU process keeps freed memory too" if self.on_cpu and memory > self.memory else ""
            parts.append(f"memory of the largest rank {sizes} ({_error(self.memory, memory)}{reason})")
        if seconds and self.seconds is not None:
            times = f"{self.seconds:.3g} s, measured {seconds:.3g} s"
            parts.append(f"step {times} ({_error(self.seconds, seconds)})")
        return f"predicted: {'; '.join(parts)}" if parts else ""


def predict_run(run: PlannedRun, card: str | None, nodes: int, cards_per_node: int) -> RunPrediction:
    """Return the prediction of a run. card: its name in torch; None, or one that is not known: no time."""
    memory = largest_rank(run)
    tokens = run.micro_batches * run.tokens * run.layout.data
    name = "" if card is None else card.removeprefix("NVIDIA ")
    if name not in FACTS or Cluster(name).peak(run.precision) is None:
        return RunPrediction(memory.peak, None, tokens, "", run.on_cpu)
    cluster = Cluster(name, nodes, cards_per_node)
    rates = f"{cluster.efficiency:.0%} of the {name}'s peak, links at {cluster.link_efficiency:.0%}"
    basis = f"assumed: products at {rates}"
    return RunPrediction(memory.peak, step_time(run, cluster, memory).total, tokens, basis, run.on_cpu)


def _error(predicted: float, measured: float) -> str:
    error = predicted / measured - 1
    return f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"
