"""One pool of worker processes for the whole test run; every call gets a new gloo group.

Workers are forked from one server that has imported torch and DeepSpeed once. A call sends a module-level
function to the first `world_size` workers, which run it as ranks of a new process group and return its result; the
test asserts in the parent, over all ranks. Processes are reused, groups are not.
"""

import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import queue
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.planted import PLANTED, Planted
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
# torch.compile imports inductor on first use, which takes two seconds per process; the server imports it once.
PRELOADED = [
    "pytest",
    "torch._inductor.compile_fx",
    "megalite.train.optimizer.deepspeed",
]
START_SECONDS = 120
# Time for the other ranks to end after one rank has failed; most notice within half a second.
GRACE_SECONDS = 5.0
# A gloo group that is still referenced has three threads, which wake up a hundred times a second.
MOST_THREADS = 60
RELEASE = pickle.dumps("release")
READY = b"ready"
JOINED = b"joined"


class RankFailed(AssertionError):
    """A rank raised or died; the message begins with the first failed rank."""


class RanksHung(AssertionError):
    """Ranks did not end in time; the message names them and has the stack of each."""


@dataclass(frozen=True)
class Task:
    """The task of one rank."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    world_size: int
    store: str
    timeout: float
    device: str
    faults: tuple[Planted, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a task on one rank. `at` orders failures: all processes read the same monotonic clock."""

    value: Any = None
    summary: str = ""
    traceback: str = ""
    died: bool = False
    at: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return bool(self.summary)

    @classmethod
    def of_error(cls, error: BaseException) -> "Outcome":
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(summary=summary, traceback="".join(traceback.format_exception(error)).rstrip())


@dataclass(frozen=True)
class Worker:
    """The parent's end of one worker: its pipe, and the file for its stack dump."""

    process: Any
    connection: Connection
    stack: Path


class RankPool:
    """The workers, started when first needed; all are replaced when one hangs, dies or has too many threads.

    device: "standin" registers the stand-in accelerator in every worker, and groups use its backend.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        if device == "standin":
            from tests.support.standin import build

            build.library()  # here, because compiling takes longer than a task's timeout
        self._workers: list[Worker] = []
        self._calls = itertools.count()
        self._folder = Path(tempfile.mkdtemp(prefix="megalite-ranks-"))

    def run(
        self,
        function: Callable[..., Any],
        world_size: int = 1,
        *,
        timeout: float = PATIENCE,
        **arguments: Any,
    ) -> list[Any]:
        """Call `function(**arguments)` on each of `world_size` ranks; return their results in rank order.

        The function must be at a module's top level, because it is sent by name; its result must pickle.
        Raises RankFailed with the first rank's traceback first, and RanksHung `timeout` seconds after all have joined.
        """
        __tracebackhide__ = True
        try:
            return self._run(function, world_size, timeout, arguments)
        except RanksHung as hung:
            # On a busy machine gloo's ranks now and then do not find each other, before the function is called.
            if str(hung).count("in init_process_group") < world_size:
                raise
        return self._run(function, world_size, timeout, arguments)

    def _run(
        self, function: Callable[..., Any], world_size: int, timeout: float, arguments: dict[str, Any]
    ) -> list[Any]:
        """As `run`, once."""
        __tracebackhide__ = True
        store = self._folder / f"store-{next(self._calls)}"
        task = Task(function, arguments, world_size, str(store), timeout, self._device, tuple(PLANTED))
        if any(_threads(worker) > MOST_THREADS for worker in self._workers):
            self._kill()
        try:
            workers = self._first_workers(world_size)
            outcomes = _outcomes(workers, pickle.dumps(task), timeout)
        except BaseException:  # KeyboardInterrupt too: do not wait for the workers
            self._kill()
            raise
        problem = _problem(workers, outcomes, timeout)
        if len(outcomes) < world_size or any(outcome.died for outcome in outcomes.values()):
            self._kill()
        else:
            self._release(workers)
        store.unlink(missing_ok=True)
        if problem is not None:
            raise problem
        return [outcomes[rank].value for rank in range(world_size)]

    def close(self) -> None:
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def process_ids(self) -> list[int]:
        """Return the process ids of the running workers, by rank."""
        return [worker.process.pid for worker in self._workers]

    def _first_workers(self, count: int) -> list[Worker]:
        new = [_start(rank, self._folder) for rank in range(len(self._workers), count)]
        self._workers += new
        _expect_ready(new, START_SECONDS)
        return self._workers[:count]

    def _release(self, workers: list[Worker]) -> None:
        """Let the ranks leave their group together: leaving closes a rank's connections to the others."""
        for worker in workers:
            worker.connection.send_bytes(RELEASE)
        try:
            _expect_ready(workers, START_SECONDS)
        except RanksHung:
            self._kill()
            raise

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []


def _start(rank: int, folder: Path) -> Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    stack = folder / f"stack-{rank}"
    arguments = (theirs, rank, str(stack))
    process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
    # The server reads these when it starts; all workers are forked from it.
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    with patch.dict(os.environ, settings):
        process.start()
    theirs.close()
    return Worker(process, ours, stack)


def _threads(worker: Worker) -> int:
    """Return the number of threads of the process; 0 if the system does not say."""
    tasks = Path(f"/proc/{worker.process.pid}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _expect_ready(workers: Iterable[Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    late = []
    for worker in workers:
        try:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                late.append(worker.process.name)
                continue
            message = worker.connection.recv_bytes()
            assert message == READY, f"{worker.process.name} sent {message[:80]!r} between two tasks"
        except EOFError:
            late.append(f"{worker.process.name} (dead)")
    if late:
        raise RanksHung(f"not ready for a task within {seconds:g} s: {', '.join(late)}")


def _outcomes(workers: list[Worker], task: bytes, timeout: float) -> dict[int, Outcome]:
    """Send the task and collect; ranks that do not answer in time are missing from the result."""
    for worker in workers:
        worker.connection.send_bytes(task)
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    outcomes: dict[int, Outcome] = {}
    joining = len(workers)
    deadline = time.monotonic() + START_SECONDS
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), remaining):
            rank = waiting[connection]
            outcome = _receive_outcome(workers[rank])
            if outcome is None:
                joining -= 1
                if joining == 0 and not any(each.failed for each in outcomes.values()):
                    deadline = time.monotonic() + timeout
                continue
            del waiting[connection]
            outcomes[rank] = outcome
            if outcome.failed:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return outcomes


def _receive_outcome(worker: Worker) -> Outcome | None:
    """Return the outcome of a task; None: the rank has joined its group, and the task begins."""
    try:
        message = worker.connection.recv_bytes()
        return None if message == JOINED else pickle.loads(message)
    except (EOFError, ConnectionError):
        worker.process.join(GRACE_SECONDS)
        code = worker.process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return Outcome(summary=f"the process died: {how}", traceback=worker.stack.read_text(), died=True)


def _problem(workers: list[Worker], outcomes: dict[int, Outcome], timeout: float) -> Exception | None:
    """Return the exception for the test: the first failure, then one line for each failure that followed."""
    world = len(workers)
    hung = [rank for rank in range(world) if rank not in outcomes]
    failed = sorted(
        (rank for rank in outcomes if outcomes[rank].failed),
        key=lambda rank: (not outcomes[rank].died, outcomes[rank].at),
    )
    if not failed and not hung:
        return None
    if failed:
        first = outcomes[failed[0]]
        lines = [f"rank {failed[0]} of {world} failed first: {first.summary}", first.traceback]
        lines += [f"then rank {rank}: {outcomes[rank].summary.splitlines()[0]}" for rank in failed[1:]]
        lines += [f"then rank {rank}: was still waiting, and was killed" for rank in hung]
        return RankFailed("\n".join(lines))
    lines = [f"{_ranks(hung)} of {world} did not end within {timeout:g} s"]
    lines += [f"{_ranks(sorted(outcomes))} returned"] if outcomes else []
    lines += [f"rank {rank} stood here:\n{_stack(workers[rank])}" for rank in hung]
    return RanksHung("\n".join(lines))


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _stack(worker: Worker) -> str:
    """Return the stack of a hung worker's main thread, without the pool's own frames."""
    os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + GRACE_SECONDS
    while "_serve" not in (text := worker.stack.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    frames = [line for line in text.splitlines() if line.startswith("  File ")]
    return "\n".join(itertools.takewhile(lambda line: str(Path(__file__)) not in line, frames)) or text


# The functions below run in the workers.


def _serve(connection: Connection, rank: int, stack: str) -> None:
    """Run tasks until the parent's end of the pipe closes, also by `kill -9`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    stack_file = Path(stack).open("w")  # noqa: SIM115 (faulthandler writes to it as long as the process lives)
    faulthandler.enable(stack_file, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    gc.freeze()  # excludes torch's objects, so that the collection after each task is fast
    connection.send_bytes(READY)
    while True:
        connection.send_bytes(_perform(messages.get(), rank, connection))
        assert messages.get() == RELEASE
        _leave_group()
        gc.collect()
        connection.send_bytes(READY)


def _receive(connection: Connection, messages: "queue.SimpleQueue[bytes]") -> None:
    # In a separate thread, to notice a killed parent even while the rank hangs in a collective.
    while True:
        try:
            messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _perform(message: bytes, rank: int, connection: Connection) -> bytes:
    try:
        task: Task = pickle.loads(message)
        with _device(task):
            _reset(rank, task)
            _join_group(rank, task)
            connection.send_bytes(JOINED)
            with ExitStack() as planted:
                for fault in task.faults:
                    planted.enter_context(fault.planted())
                value = task.function(**task.arguments)
        return pickle.dumps(Outcome(value))
    except BaseException as error:
        # Take the time before leaving the group, which makes the other ranks fail.
        outcome = pickle.dumps(Outcome.of_error(error))
    _leave_group()
    return outcome


@contextmanager
def _device(task: Task) -> Iterator[None]:
    """Prepare the device; on the stand-in, fail the task if a stream used data that it had not waited for."""
    if task.device == "cpu":
        from deepspeed.accelerator import get_accelerator

        # Under ZeRO 3 DeepSpeed accepts float64 weights only on a CPU without fp16, so pretend that there is no fp16.
        with patch.object(get_accelerator(), "is_fp16_supported", lambda: False):
            yield
        return
    from tests.support.standin import use_standin

    standin = use_standin()
    from tests.support.standin.zero import use_in_deepspeed

    use_in_deepspeed()
    standin.reset()
    yield
    hazards = standin.take_hazards()
    assert not hazards, "\n".join(hazards)


def _reset(rank: int, task: Task) -> None:
    """Set the same random seeds and torch settings for every test, independent of earlier tests."""
    import numpy
    import torch

    # DeepSpeed needs a launcher's variables even if the process group exists.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task.world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.chdir(ROOT)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _join_group(rank: int, task: Task) -> None:
    import torch.distributed as dist

    # Longer than the pool's own timeout, whose message names the hung ranks.
    limit = timedelta(seconds=task.timeout + START_SECONDS)
    store = dist.FileStore(task.store, task.world_size)
    backend = dist.get_default_backend_for_device(task.device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=task.world_size, timeout=limit)


def _leave_group() -> None:
    import deepspeed.comm.comm as deepspeed_comm
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if deepspeed_comm.cdb is None:
        dist.destroy_process_group()
    else:
        deepspeed_comm.destroy_process_group()  # also destroys the groups in DeepSpeed's modules
        deepspeed_comm.cdb = None
        _forget_zero3()


def _forget_zero3() -> None:
    """Reset DeepSpeed's global state of ZeRO 3.

    ZeRO 3 compares counters between ranks, which differ if the ranks ran different tests before; and it replaces
    torch's linear by its own, which does not split the backward.
    """
    import torch
    from deepspeed.runtime.zero import parameter_offload, partition_parameters

    torch.nn.functional.linear = torch._C._nn.linear
    parameter_offload.FWD_MODULE_STACK.clear()
    (counter,) = parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counter[0] = 0
    partition_parameters.Init.param_id = 0
