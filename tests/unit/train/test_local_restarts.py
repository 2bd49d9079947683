"""Ranks that are started again on this machine: how often, and from where."""

from megalite.config.load import load_run
from megalite.errors import RankFailure
from megalite.launcher.hosts import restarts
from megalite.train import local_restarts, run_progress
from megalite.train.local_restarts import run_again

SETTINGS = {
    "model.preset": "tiny",
    "data.source": "stdlib",
    "training.steps": 4,
    "training.sequence_length": 16,
    "training.global_batch_size": 2,
    "training.micro_batch_size": 1,
    "parallel.data": 2,
    "launch.restarts": 2,
    "checkpoint.resume": "never",
}


def run(patch, folder, ends, saved=(), *, stepless=False, **changes):
    """Run ranks that end so, one start after another; return the code, what each start resumes and the lines."""
    flags = {**SETTINGS, "run.folder": folder, **changes}
    config, resumed, said = (
        load_run(None, [f"--{key}={value}" for key, value in flags.items()]).config,
        [],
        [],
    )
    left = list(ends)

    def ranks(started):
        resumed.append(started.checkpoint.resume)
        if not stepless:
            (folder / "metrics.jsonl").write_text(f'{{"step": {len(resumed)}}}\n' * len(resumed))
        end = left.pop(0)
        if isinstance(end, RankFailure):
            raise end
        return end

    again = restarts.run_with_restarts
    patch.setattr(local_restarts, "run_with_restarts", lambda *given: again(*given, lambda _: None))
    for module in (local_restarts, run_progress):
        patch.setattr(module, "published_step", lambda _: 3 if len(resumed) in saved else None)
    try:
        return run_again(config, ranks, said.append), resumed, said
    except RankFailure as failure:
        return str(failure), resumed, said


def test_a_run_starts_again_from_what_it_has_saved(tmp_path, monkeypatch):
    killed = RankFailure("rank 1 was killed", 137)
    code, resumed, said = run(monkeypatch, tmp_path, [killed, killed, 0], saved=(2,))
    assert code == 0 and resumed == ["never", "never", "auto"]
    assert [line[:16] for line in said[:2]] == ["restart 1 of 2 i", "restart 2 of 2 i"]


def test_no_restart_goes_on_from_a_checkpoint_that_the_run_passes_over(tmp_path, monkeypatch):
    """The folder may have those of another run, or newer ones than that of checkpoint.resume."""
    killed = RankFailure("rank 1 was killed", 137)
    code, resumed, _ = run(monkeypatch, tmp_path, [killed, 0], saved=(0, 1, 2))
    assert code == 0 and resumed == ["never", "never"]


def test_a_run_that_began_anew_goes_on_from_its_copies_in_memory(tmp_path, monkeypatch):
    killed = RankFailure("rank 1 was killed", 137)
    _, resumed, _ = run(monkeypatch, tmp_path, [killed, 0], **{"checkpoint.in_memory_every": 1})
    assert resumed == ["never", "auto"]
    anew = {"checkpoint.in_memory_every": 1, "run.folder": tmp_path / "other"}
    _, resumed, _ = run(monkeypatch, tmp_path, [killed, 0], stepless=True, **anew)
    assert resumed == ["never", "never"], "copies may be those of an earlier run in this folder"


def test_the_last_failure_is_raised_and_wrong_input_at_once(tmp_path, monkeypatch):
    ends = [RankFailure(f"rank 1 failed {number}", 1) for number in range(3)]
    assert run(monkeypatch, tmp_path, ends)[0] == "rank 1 failed 2"
    assert run(monkeypatch, tmp_path, ends, **{"launch.restarts": 0})[:2] == ("rank 1 failed 0", ["never"])
    told = RankFailure("rank 1 was killed", 137, asked=True)
    assert run(monkeypatch, tmp_path, [told, 0])[:2] == ("rank 1 was killed", ["never"])
    assert run(monkeypatch, tmp_path, [RankFailure("wrong", 2)])[:2] == ("wrong", ["never"])
    assert run(monkeypatch, tmp_path, [75])[0] == 75
