"""The prediction that a run is compared with: memory of its fullest rank, time of a step on a card or as measured."""

from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from megalite.config.output.summary import memory_text
from megalite.errors import ConfigError
from megalite.planner.calibrated_step import CalibratedMachine
from megalite.planner.calibration import DEFAULT_FILE, Calibration, read_calibration
from megalite.planner.cluster import FACTS, Cluster, Machine
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


def calibration_here(device: str, precision: str, torch: str) -> Calibration | None:
    """Return the calibration in the working folder if it was measured on this host and device, with this torch.

    device: "cpu" or the card's name in torch. None without one, or where it has no times in this precision.
    """
    try:
        found = read_calibration(Path(DEFAULT_FILE))
    except ConfigError:
        return None
    same = (found.machine, found.device, found.torch) == (gethostname(), device, torch)
    return found if same and precision in found.precisions else None


def predict_run(
    run: PlannedRun, card: str | None, nodes: int, cards_per_node: int, calibration: Calibration | None = None
) -> RunPrediction:
    """Return the prediction of a run: on one node by its calibration, else by the card's data sheet.

    card: its name in torch; None, or one that is not known: no time without a calibration.
    """
    memory = largest_rank(run)
    machine, basis = _machine(run, card, nodes, cards_per_node, calibration)
    seconds = None if machine is None else step_time(run, machine, memory).total
    tokens = run.micro_batches * run.micro_batch_size * run.sequence_length * run.layout.data
    return RunPrediction(memory.peak, seconds, tokens, basis, run.on_cpu)


def _machine(
    run: PlannedRun, card: str | None, nodes: int, cards_per_node: int, calibration: Calibration | None
) -> tuple[Machine | None, str]:
    """Return the machine and what its times stand on; None if they are not known."""
    if calibration is not None and nodes == 1 and run.layout.context == 1:
        measured = CalibratedMachine(calibration, cards_per_node)
        return measured, measured.assumptions
    name = "" if card is None else card.removeprefix("NVIDIA ")
    if name not in FACTS or Cluster(name).peak(run.precision) is None:
        return None, ""
    cluster = Cluster(name, nodes, cards_per_node)
    rates = f"{cluster.efficiency:.0%} of the {name}'s peak, links at {cluster.link_efficiency:.0%}"
    return cluster, f"assumed: products at {rates}"


def _error(predicted: float, measured: float) -> str:
    error = predicted / measured - 1
    return f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"
