"""Train run.toml from Python, with two callbacks: a custom metric and a time limit.

From the repository's root: .venv/bin/python examples/python/train.py [--training.steps 50 ...]
"""

import sys
import time
from collections.abc import Mapping

from megalite import ActiveRun, Callback, Trainer, load_config


class TimeLimit(Callback):
    """Ends the run with a checkpoint after some seconds; the same command resumes it."""

    def __init__(self, seconds: float):
        self._seconds, self._started = seconds, time.monotonic()

    def on_step_end(self, run: ActiveRun, report: object) -> None:
        if time.monotonic() - self._started > self._seconds:
            run.stop(f"{self._seconds:g} seconds are over")


class WeightNorm(Callback):
    """Adds a metric to the console, metrics.jsonl and the sinks of monitor.report_to."""

    def on_step_end(self, run: ActiveRun, report: object) -> Mapping[str, float]:
        squares = sum(float(weight.detach().square().sum()) for weight in run.model.parameters())
        return {"weight_norm": squares**0.5}


def main() -> None:
    config = load_config("examples/python/run.toml", *sys.argv[1:])
    result = Trainer(config, callbacks=[WeightNorm(), TimeLimit(600)]).train()
    last = result.metrics[-1]
    print(f"validation loss {last['validation_loss']:.3f}, best checkpoint {result.best}")


if __name__ == "__main__":
    main()
