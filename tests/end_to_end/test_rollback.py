"""A run whose weights are ruined goes back to its last checkpoint, and so does one that is stopped behind it."""

from pathlib import Path
from typing import Any

from megalite import Callback, Trainer, load_config
from megalite.checkpoint.folder import find_latest
from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.run_status import RunFolderReader
from megalite.monitor.jsonl import read_metrics
from tests.support.jobs import Job, training_here

RUINED_AFTER, STEPS = 7, 12
SETTINGS: dict[str, Any] = {
    "training": {"loss_spike": "rollback", "spike_window": 4, "global_batch_size": 4, "sequence_length": 16},
    "checkpoint": {"every": 3, "keep_last": 1},
}


class RuinsWeights(Callback):
    """Makes the head much too large after a step, once; stops the run two steps behind it if asked to."""

    def __init__(self, *, stops: bool):
        self._stops = stops

    def on_step_end(self, run: Any, step: Any) -> None:
        if step.step == RUINED_AFTER:
            for name, weight in run.model.named_parameters():
                if "embed_tokens" in name:
                    weight.data.mul_(100)
        if self._stops and step.step == RUINED_AFTER + 2:
            run.stop("seen enough")


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder / "metrics.jsonl")}


def test_ruined_weights_go_back_and_a_stopped_run_goes_on_behind_them(tmp_path: Path) -> None:
    """Saves are at 3, 6, 9, 12; the loss of step 8 is a spike, and the weights of step 6 come back."""
    run_file = Job.write(tmp_path, tensor=1, pipeline=1, data=2).run_file
    through, stopped = (tmp_path / name for name in ("through", "stopped"))
    with training_here():
        for folder, callbacks in (
            (through, [RuinsWeights(stops=False)]),
            (stopped, [RuinsWeights(stops=True)]),
            (stopped, []),
        ):
            Trainer(
                load_config(run_file, run={"folder": str(folder)}, **SETTINGS), callbacks=callbacks
            ).train()
    records = {record["step"]: record for record in read_metrics(through / "metrics.jsonl")}
    assert list(records) == [*range(1, STEPS + 1)]
    event = [records[RUINED_AFTER + 1][key] for key in ("skipped_for", "rolled_back_to", "skipped_steps")]
    assert event == ["loss_spike", 6, 2]
    assert records[RUINED_AFTER + 1]["loss"] > 2 * records[RUINED_AFTER]["loss"]
    assert records[RUINED_AFTER + 2]["loss"] < 1.2 * records[RUINED_AFTER]["loss"]
    assert losses(through) == losses(stopped)
    # The checkpoint of the rollback replaced the one before it.
    assert (
        records[RUINED_AFTER + 3].get("checkpoint_step", records[RUINED_AFTER + 2].get("checkpoint_step"))
        == 8
    )
    final = [CheckpointReader(find_latest(folder / "checkpoints") or folder) for folder in (through, stopped)]
    for reader in final:
        reader.close()
    one, other = (reader.manifest for reader in final)
    assert one.step == STEPS and one.tensors == other.tensors and one.trainer_state == other.trainer_state
    assert one.trainer_state["rollbacks"] == [[8, 6]]
    status = RunFolderReader(through)
    status.read()
    # A busy machine may make a rank slow, which is another alarm.
    assert status.history.alarms[:1] == ["2 steps were skipped, with 1 rollback"]
