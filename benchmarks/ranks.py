"""Runs a benchmark's function as the ranks of a process group on this machine."""

import multiprocessing
import os
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# One server imports these once, computes nothing with them, and forks every rank.
PRELOADED = ["torch", "deepspeed"]
# As megalite's own processes have it (launcher/rank/environment.py).
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "GOMP_SPINCOUNT": "1000",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """function(*arguments) on each of `world_size` fresh processes, one thread each; what they returned.

    The function stands at a module's top level, and finds the default process group made (also of one rank).
    Raises RuntimeError with the traceback of the first rank that fails, and ends the others.
    """
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="megalite-benchmark-") as folder:
        return _run(context, _run_rank, world_size, str(Path(folder) / "store"), function, arguments)


def run_fresh_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """The same on new interpreters that have imported nothing, with torchrun's variables and no process group.

    The module of the function imports no torch, so that the function can still set what torch reads once.
    """
    return _run(
        multiprocessing.get_context("spawn"), _run_fresh_rank, world_size, _free_port(), function, arguments
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _run(context: Any, rank_function: Callable[..., None], world_size: int, *arguments: Any) -> list[Any]:
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=rank_function, args=(sender, rank, world_size, *arguments), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        return _results([receiver for receiver, _ in pipes])
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()


def _results(receivers: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        for receiver in wait(list(waiting)):
            rank = waiting.pop(receiver)  # type: ignore[call-overload]
            try:
                failure, value = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                failure, value = "the process died", None
            if failure:
                raise RuntimeError(f"rank {rank} of {len(receivers)}: {failure}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _run_rank(
    sender: Connection,
    rank: int,
    world_size: int,
    store: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # DeepSpeed looks for a launcher's variables even where the group exists.
    _export(rank, world_size, port=0)
    import torch
    import torch.distributed as dist

    from megalite.parallel.mesh import connect, disconnect

    torch.set_num_threads(1)
    try:
        connect(
            rank,
            world_size,
            device=torch.device("cpu"),
            rendezvous=f"file://{store}",
            timeout_seconds=600,
        )
        value = function(*arguments)
        dist.barrier()  # leaving closes a rank's connections to the others
        disconnect()
        sender.send((None, value))
    except BaseException:
        sender.send((traceback.format_exc(), None))


def _run_fresh_rank(
    sender: Connection,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _export(rank, world_size, port)
    try:
        sender.send((None, function(*arguments)))
    except BaseException:
        sender.send((traceback.format_exc(), None))


def _export(rank: int, world_size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _end_with_parent() -> None:
    # The benchmark's process, not the server that forked this one.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
