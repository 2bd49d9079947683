"""The conversation of `megalite generate --chat`, on every rank."""

import os
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megalite.cli.generate_run import GenerationJob, tell
from megalite.errors import MegaliteError
from megalite.generation.chat_history import ChatHistory

if TYPE_CHECKING:
    from megalite.generation.batch_engine import BatchEngine
    from megalite.generation.loaded import LoadedModel
    from megalite.parallel.mesh import ParallelMesh

CLEAR = "/clear"


def chat(job: GenerationJob, mesh: "ParallelMesh") -> int:
    """Answer the lines of standard input, on rank 0, until it ends."""
    from megalite.generation.batch_engine import BatchEngine
    from megalite.generation.loaded import load_shown

    loaded = load_shown(job.source, mesh, job.dtype)
    engine = BatchEngine(loaded, max_requests=1)
    if mesh.rank != 0:
        engine.serve_steps()
        return 0
    _converse(job, loaded, engine)
    engine.close()
    return 0


def _converse(job: GenerationJob, loaded: "LoadedModel", engine: "BatchEngine") -> None:
    from megalite.generation.batch_engine import IDLE_STEP_SECONDS
    from megalite.generation.prompts import Chat

    rules = Chat(loaded.tokenizer, job.source.tokenizer, job.template)
    ends = job.request.stop_ids | rules.stops.ids
    texts = tuple(dict.fromkeys((*job.request.stop, *rules.stops.texts)))
    history = ChatHistory(rules.prompt_ids, engine.max_tokens, job.request.max_tokens)
    if _is_terminal(job):
        tell(f"{CLEAR} forgets the conversation, Ctrl-D ends it")
    for line in _lines(job, engine.step, IDLE_STEP_SECONDS):
        if line == CLEAR:
            history.clear()
            tell("(the conversation is forgotten)")
            continue
        try:
            ids, room, dropped = history.ask(line)
            engine.submit(replace(job.request, prompt_ids=ids, stop_ids=ends, stop=texts, max_tokens=room))
        except MegaliteError as error:
            tell(f"error: {error}")
            continue
        if dropped:
            exchanges = "oldest exchange is" if dropped == 1 else f"{dropped} oldest exchanges are"
            tell(f"(the context of {engine.max_tokens} tokens is full: the {exchanges} forgotten)")
        answer = ""
        while engine.has_work:
            for event in engine.step():
                answer += event.text
                print(event.text, end="", flush=True)
        print(flush=True)
        history.answer(answer)


def _is_terminal(job: GenerationJob) -> bool:
    return sys.stdin.isatty() if job.keyboard is None else os.isatty(job.keyboard)


def _lines(job: GenerationJob, idle: Callable[[], object], seconds: float) -> Iterator[str]:
    """Yield the lines that are typed, without empty ones, after a mark where a person types them.

    idle: called every `seconds` while `job.keyboard` has no input.
    """
    terminal = _is_terminal(job)
    while True:
        if terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline() if job.keyboard is None else _line_of(job.keyboard, idle, seconds)
        if not line:
            if terminal:  # the next prompt of the shell begins a line
                print(flush=True)
            return
        if line.strip():
            yield line.strip()


def _line_of(keyboard: int, idle: Callable[[], object], seconds: float) -> str:
    """Return the next line of a file descriptor with its end; "" behind the last one."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([keyboard], [], [], seconds)[0]:
            idle()
            continue
        # One byte: `select` would not see what a buffer holds.
        byte = os.read(keyboard, 1)
        if not byte:
            break
        line += byte
    return line.decode("utf-8", errors="replace")
