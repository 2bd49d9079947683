"""The progress that a run folder shows after an attempt: its own steps, not those of the attempt before."""

import os

from megalite.train.run_progress import attempt_end, records_mark


def record(folder, *steps: int, at: int) -> None:
    """Write the records of some steps, `at` nanoseconds after the epoch."""
    path = folder / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    os.utime(path, ns=(at, at))


def test_steps_come_from_the_ranks_or_from_what_this_attempt_recorded(tmp_path):
    before = records_mark(tmp_path)
    assert attempt_end(137, "killed", None, tmp_path, before).step is None
    record(tmp_path, 1, 2, 3, at=10**18)
    assert attempt_end(137, "killed", None, tmp_path, before).step == 3
    assert attempt_end(137, "killed", 2, tmp_path, before).step == 3
    assert attempt_end(137, "killed", 4, tmp_path, before).step == 4
    # The next attempt has not come to a step: those records are older.
    assert attempt_end(137, "killed", None, tmp_path, records_mark(tmp_path)).step is None


def test_damaged_checkpoints_do_not_hide_the_end(tmp_path, caplog):
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    assert attempt_end(1, "killed", 3, tmp_path, 0).checkpoint is None
    assert "no complete checkpoint" in caplog.text
