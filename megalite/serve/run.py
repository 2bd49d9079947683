"""Wires a model on disk, the generation engine and the server: rank 0 answers, other ranks take part in its steps."""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from megalite.errors import ConfigError
from megalite.generation.batch_engine import BatchEngine
from megalite.generation.json_schema import JSON_OBJECT
from megalite.generation.loaded import load_shown
from megalite.generation.prompts import Chat
from megalite.parallel.mesh import ParallelMesh
from megalite.serve.address import listen
from megalite.serve.app import Service
from megalite.serve.engine_thread import EngineThread
from megalite.serve.prompts import ServedModel
from megalite.serve.server import run_server
from megalite.serve.settings import ServePlan


def serve(plan: ServePlan, mesh: ParallelMesh, on_ready: Callable[[int], None]) -> None:
    """Serve until a signal; collective over the mesh.

    on_ready: called on rank 0 with the port. Raises LaunchError if the address cannot be used, the errors of
    `load_source`, and the error that ended the engine.
    """
    settings = plan.settings
    sockets = listen(settings) if mesh.rank == 0 else []
    loaded = load_shown(plan.source, mesh, plan.dtype)
    engine = BatchEngine(loaded, max_requests=settings.max_requests, max_tokens=plan.context_length)
    # The first grammar takes up to a second, in which the running requests would stand still.
    with suppress(ConfigError):
        engine.grammars.check(JSON_OBJECT)
    pids = mesh.gather_objects(os.getpid())
    if pids is None:
        engine.serve_steps()
        return
    # The template is tried here, which imports transformers: a request should not wait for that.
    template = plan.template
    chat = None if template is None else Chat(loaded.tokenizer, plan.source.tokenizer, template)
    model = ServedModel(
        plan.name,
        loaded.tokenizer,
        chat,
        engine.max_tokens,
        int(time.time()),
        engine.grammars,
        tuple(plan.source.adapters),
        loaded.stops,
    )
    # The number of cores is a setting of each thread.
    threads = torch.get_num_threads()
    owner = EngineThread(engine, prepare=lambda: torch.set_num_threads(threads))
    others = {rank: pid for rank, pid in enumerate(pids) if rank != mesh.rank}
    asyncio.run(run_server(Service(model, owner, settings), sockets, on_ready=on_ready, peers=others))
