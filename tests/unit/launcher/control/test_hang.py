"""When a job counts as hanging, and which ranks are named, by the marks of all ranks."""

from dataclasses import replace

import pytest

from megalite.launcher.control.hang import Hang, HangPolicy, HangWatch, frames_of, suspects
from megalite.launcher.control.progress import Activity, Progress, RankMarks
from megalite.topology.axes import Layout
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.parity import about

LAYOUT = Layout(tensor=2, data=2)
MOVING = RankMarks(
    1, "forward and backward", "all_reduce over tp", None, 0, 2, {"tp": 4, "dp": 1, "world": 2}
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def looked(watch: HangWatch, marks: dict[int, RankMarks]) -> Hang | None:
    for rank, each in marks.items():
        watch.see(rank, each)
    return watch.look({})


def watched(
    steps: int = 6, seconds: float = 2.0, each: float = 10.0
) -> tuple[HangWatch, Clock, dict[int, RankMarks]]:
    """Return a watch that has seen steps of `seconds`, and the marks since."""
    clock = Clock()
    watch = HangWatch(LAYOUT, each, clock)
    marks: dict[int, RankMarks] = {}
    for step in range(steps):
        marks = {rank: replace(MOVING, step=step, steps=step + 1) for rank in range(4)}
        assert looked(watch, marks) is None
        for _ in range(round(2 * seconds)):
            clock.now += 0.5
            assert looked(watch, marks) is None
    return watch, clock, marks


def wait(watch: HangWatch, clock: Clock, marks: dict[int, RankMarks], seconds: float):
    hang = None
    for _ in range(round(2 * seconds)):
        clock.now += 0.5
        seen = looked(watch, marks)
        hang = hang or seen
    return hang


def test_twice_the_median_step_and_ten_seconds_without_a_mark_is_a_hang():
    watch, clock, marks = watched()
    assert wait(watch, clock, marks, 14.0 - 2.0 - 0.5) is None
    hang = wait(watch, clock, marks, 1.0)
    assert hang is not None and hang.patience == about(14.0) and hang.step == 6


@pytest.mark.parametrize("field", ["beats", "phase", "collective", "step"])
def test_any_mark_of_any_rank_is_a_move(field):
    watch, clock, marks = watched()
    assert wait(watch, clock, marks, 11) is None
    changed = {"beats": 1, "phase": "between two steps", "collective": "barrier", "step": 9}
    moved = {**marks, 2: replace(marks[2], **{field: changed[field]})}
    assert wait(watch, clock, moved, 11) is None
    assert wait(watch, clock, moved, 4) is not None


@pytest.mark.parametrize("phase", [Activity.SAVING, Activity.VALIDATING])
def test_a_save_and_a_validation_may_take_six_times_as_long(phase):
    watch, clock, marks = watched()
    marks = {**marks, 0: replace(marks[0], phase=phase.value)}
    assert wait(watch, clock, marks, 80) is None
    assert wait(watch, clock, marks, 10) is not None


@pytest.mark.parametrize(
    "phase", [Activity.EXPORTING, Activity.PROFILING, Activity.UPLOADING, Activity.BUILDING, Activity.LOADING]
)
def test_what_a_step_does_not_do_is_not_watched(phase):
    watch, clock, marks = watched()
    assert wait(watch, clock, {**marks, 0: replace(marks[0], phase=phase.value)}, 1000) is None


def test_the_first_steps_may_take_as_long_as_they_like():
    watch, clock, marks = watched(steps=2)
    assert wait(watch, clock, marks, 1000) is None


def test_the_steps_of_an_earlier_process_are_none_of_this_start():
    clock = Clock()
    watch = HangWatch(LAYOUT, 10.0, clock)
    for steps, step in ((0, None), (0, 500), (1, 501)):
        marks = {rank: replace(MOVING, step=step, steps=steps) for rank in range(4)}
        assert wait(watch, clock, marks, 100) is None


POLICY = HangPolicy(10.0, stops=True, collective_seconds=400.0)


def hang_of(seconds: float, patience: float = 14.0, **changes: dict[str, object]) -> Hang:
    marks = marks_of(**changes)
    return Hang(seconds, patience, suspects(marks, LAYOUT), {}, marks)


def test_a_job_ends_after_five_times_the_patience_or_half_the_time_of_a_collective():
    assert not hang_of(69, r2=BEHIND).ends(POLICY) and hang_of(70, r2=BEHIND).ends(POLICY)
    assert not hang_of(70, r2=BEHIND).ends(replace(POLICY, stops=False))
    assert not hang_of(19, r2=BEHIND).ends(replace(POLICY, collective_seconds=40.0))
    assert hang_of(20, r2=BEHIND).ends(replace(POLICY, collective_seconds=40.0))
    # Never before it counts as one.
    assert not hang_of(13, r2=BEHIND).ends(replace(POLICY, collective_seconds=4.0))


@pytest.mark.parametrize(
    "phase", [Activity.BETWEEN_STEPS, Activity.READING_BATCH, Activity.SAVING, Activity.VALIDATING]
)
def test_what_the_user_s_code_or_a_disk_may_delay_has_half_the_time_of_a_collective(phase):
    late = {"r2": {**BEHIND, "phase": phase.value}}
    assert not hang_of(199, **late).ends(POLICY) and hang_of(200, **late).ends(POLICY)


def test_a_job_in_which_no_rank_waits_for_another_never_ends():
    alone = {f"r{rank}": {"waits_over": None} for rank in range(4)}
    assert not hang_of(10_000, **alone).ends(POLICY)


def test_ranks_of_which_nothing_is_heard_are_named_alone_whatever_their_last_phase():
    watch, clock, marks = watched()
    marks[3] = replace(marks[3], phase=Activity.PROFILING.value)
    hang = None
    for _ in range(40):
        clock.now += 0.5
        for rank, each in marks.items():
            watch.see(rank, each)
        hang = watch.look({3: "does not answer"})
    assert hang is not None and hang.suspects == [3]
    assert "rank 3 (pp 0, dp 1, tp 1) on this host: does not answer" in hang.describe(LAYOUT, {}, {})


def test_a_job_of_which_nothing_at_all_is_heard_is_suspended():
    watch, clock, _ = watched()
    for _ in range(100):
        clock.now += 0.5
        assert watch.look(dict.fromkeys(range(4), "does not answer")) is None


def test_a_hang_of_many_ranks_is_found():
    """4,096 ranks of 512 x 8, once for a hang: the first form looked at each pair of ranks."""
    layout = Layout(tensor=8, data=512)
    waiting = replace(MOVING, waits_over="world", counts={"tp": 4, "dp": 1, "world": 3})
    marks = dict.fromkeys(range(4096), waiting) | {1234: replace(MOVING, waits_over=None)}
    assert suspects(marks, layout) == [1234]


def test_a_job_that_was_stopped_as_a_whole_and_goes_on_does_not_hang():
    watch, clock, marks = watched()
    clock.now += 600
    assert looked(watch, marks) is None
    assert wait(watch, clock, marks, 13) is None
    assert wait(watch, clock, marks, 2) is not None


def marks_of(**changes: dict[str, object]) -> dict[int, RankMarks]:
    """Return marks of four ranks: all wait in the world's sum, but for the changes by "r0" ... "r3"."""
    waiting = replace(MOVING, waits_over="world", counts={"tp": 4, "dp": 1, "world": 3})
    return {rank: replace(waiting, **changes.get(f"r{rank}", {})) for rank in range(4)}


BEHIND = {"waits_over": None, "counts": {"tp": 4, "dp": 1, "world": 2}}


def test_the_rank_that_is_behind_and_does_not_wait_is_named():
    assert suspects(marks_of(r2=BEHIND), LAYOUT) == [2]


def test_a_rank_that_waits_for_another_is_not_named():
    """Rank 2 waits over tp for rank 3, so it is behind in the world's sum too."""
    at_tp = {"waits_over": "tp", "counts": {"tp": 5, "dp": 1, "world": 2}}
    assert suspects(marks_of(r2=at_tp, r3=BEHIND), LAYOUT) == [3]


@exhibit(
    "Megatron-LM#935",
    also=("DeepSpeed#7533",),
    subject="launch",
    there="after half an hour a timeout named the ranks that had waited, not the one that did not come",
    here="the ranks that did not arrive are named",
    fault=faults.WHO_DID_NOT_ARRIVE_IS_UNKNOWN,
)
def test_a_rank_that_left_a_collective_and_waits_elsewhere_is_named():
    """Rank 1 has gone on to a barrier over dp while rank 0 sums over tp with it: rank 3, its peer, is behind too."""
    at_tp = {"waits_over": "tp", "counts": {"tp": 5, "dp": 1, "world": 2}}
    left = {"waits_over": "dp", "collective": "barrier over dp", "counts": {"tp": 4, "dp": 2, "world": 2}}
    assert suspects(marks_of(r0=at_tp, r1=left, r2=at_tp, r3=at_tp), LAYOUT) == [1, 3]
    in_world = {"waits_over": "world", "collective": "barrier over world", "counts": {"world": 4}}
    at_dp = {"waits_over": "dp", "collective": "all_reduce over dp", "counts": {"dp": 5, "world": 3}}
    assert suspects(
        {0: replace(MOVING, **in_world)} | {n: replace(MOVING, **at_dp) for n in (1, 2, 3)}, LAYOUT
    ) == [0]


def test_all_are_named_where_none_stands_out():
    assert suspects(marks_of(), LAYOUT) == [0, 1, 2, 3]


def test_the_report_names_rank_place_and_frames():
    watch, clock, marks = watched()
    marks = {rank: replace(each, waits_over="tp") for rank, each in marks.items()}
    marks[1] = replace(MOVING, step=5, phase="waiting for the batch", counts={"tp": 3, "dp": 1, "world": 2})
    hang = wait(watch, clock, marks, 16)
    assert hang is not None
    text = hang.describe(LAYOUT, {1: "n7"}, {1: STACK})
    assert text.splitlines() == [
        "step 6 hangs: no rank has moved for 14 s (monitor.hang_seconds)",
        "  rank 1 (pp 0, dp 0, tp 1) on n7: waiting for the batch, last collective: all_reduce over tp; the others "
        "wait for it",
        "    at /a b/data.py:7 in read",
        "    at /lib/loop.py:80 in _step",
        "    at /lib/loop.py:60 in run",
        "  ranks 0, 2-3: forward and backward, waits in all_reduce over tp",
    ]
    mute = replace(hang, mute={1: "its process is stopped"})
    assert "on this host: its process is stopped\n" in mute.describe(LAYOUT, {}, {})


def test_of_a_reader_that_hangs_the_busy_thread_is_told_and_the_library_left_out():
    stack = """Current thread 0x00009f (most recent call first):
  File "/x/megalite/launcher/control/hang.py", line 200 in own_stacks
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
Thread 0x00008f (most recent call first):
  File "/net/reader.py", line 9 in read
Thread 0x00006f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/x/.venv/lib/python3.11/site-packages/megalite/prefetch.py", line 45 in step_batch
"""
    assert frames_of(stack) == [
        "/x/.venv/lib/python3.11/site-packages/megalite/prefetch.py:45 in step_batch",
        "/net/reader.py:9 in read (another thread)",
    ]


STACK = """Current thread 0x00007f (most recent call first):
  File "/lib/prefetch.py", line 3 in work
Thread 0x00006f (most recent call first):
  File "/a b/data.py", line 7 in read
  File "/lib/loop.py", line 80 in _step
  File "/lib/loop.py", line 60 in run
  File "/lib/run.py", line 2 in main
"""


def test_no_stack_has_no_frames():
    assert frames_of("") == []


def test_marks_are_those_of_the_collectives():
    progress = Progress()
    progress.finished(3)
    with progress.collective("all_reduce", "dp"):
        waiting = progress.marks()
        assert (
            waiting.waits_over == "dp" and waiting.doing == "between two steps, waits in all_reduce over dp"
        )
    progress.collective("all_reduce", "dp")
    progress.beat()
    marks = progress.marks()
    assert marks.waits_over is None and marks.counts == {"dp": 2} and marks.beats == 1 and marks.step == 3
