"""The tasks of `megalite generate`, on every rank: continue a prompt, run a file of requests."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from megalite.cli.results import report, wanted
from megalite.errors import named
from megalite.generation.request import Request
from megalite.generation.source import ModelSource
from megalite.generation.token_text import TokenText
from megalite.monitor.work import is_screen, working
from megalite.topology.axes import Layout

if TYPE_CHECKING:
    from megalite.data.chat.chat_template import ChatTemplate
    from megalite.generation.batch_engine import Event
    from megalite.generation.request_file import FileRequest
    from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class GenerationJob:
    """The arguments that every rank gets.

    request: the settings of all requests, with the ids of `prompt` if the task is one. file: the requests of a file.
    keyboard: a file descriptor to read a conversation from; None: standard input.
    template: of the conversation; None: the tokenizer's own.
    """

    task: Literal["prompt", "batch", "chat"]
    source: ModelSource
    layout: Layout
    dtype: str | None
    request: Request
    prompt: str = ""
    file: "tuple[FileRequest, ...]" = ()
    output: Path | None = None
    max_requests: int = 16
    keyboard: int | None = None
    template: "ChatTemplate | None" = None


def continue_prompt(job: GenerationJob, mesh: "ParallelMesh") -> int:
    """Print the prompt and its continuation, as it is made, on rank 0."""
    from megalite.generation.loaded import load_shown
    from megalite.generation.text import stream

    loaded = load_shown(job.source, mesh, job.dtype)
    started, events = time.perf_counter(), []
    _show(mesh, job.prompt)
    for event in stream(loaded, job.request):
        events.append(event)
        _show(mesh, event.text)
    seconds = time.perf_counter() - started
    _show(mesh, "\n")
    if mesh.rank == 0:
        answer = _answer(job.request, events, TokenText(loaded.tokenizer))
        report(model=job.source.folder, prompt=job.prompt, seconds=seconds, **answer)
    if job.request.logprobs is not None:
        shown = TokenText(loaded.tokenizer)
        for event in events:
            _show(mesh, shown.line(event) + "\n")
    if mesh.rank == 0:
        tell(f"{job.source.folder}: {len(events)} tokens in {seconds:.2f} s")
    return 0


def run_file(job: GenerationJob, mesh: "ParallelMesh") -> int:
    """Run all requests of the file; rank 0 writes a JSON object for each, in the order of the file."""
    from megalite.generation.batch_engine import BatchEngine
    from megalite.generation.loaded import load_shown

    loaded = load_shown(job.source, mesh, job.dtype)
    longest = max(len(each.request.prompt_ids) + each.request.max_tokens for each in job.file)
    engine = BatchEngine(loaded, max_requests=min(job.max_requests, len(job.file)), max_tokens=longest)
    shown = TokenText(loaded.tokenizer)
    rows: list[Mapping[str, Any]] = []
    results = {engine.submit(each.request): _Result(each) for each in job.file}
    started, tokens, waiting = time.perf_counter(), 0, list(results)
    # On a terminal that shows the results, they themselves tell how far the work is.
    shown_alone = mesh.rank == 0 and (job.output is not None or not is_screen(sys.stdout))
    work = working("generating", unit="requests", total=len(job.file), shown=shown_alone)
    with _output(job, mesh) as file, work:
        while engine.has_work:
            for event in engine.step():
                results[event.number].events.append(event)
                work.advance(event.finish is not None)
                tokens += 1
            while waiting and results[waiting[0]].ended:
                result = results.pop(waiting.pop(0))
                if file is not None:
                    row = result.row(shown)
                    print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
                    rows += [row] if wanted() else []
    seconds = time.perf_counter() - started
    if mesh.rank == 0:
        report(model=job.source.folder, results=rows, tokens=tokens, seconds=seconds)
        tell(f"{job.source.folder}: {len(job.file)} requests, {tokens} tokens in {seconds:.2f} s")
    return 0


@dataclass
class _Result:
    """A request of the file and its events."""

    asked: "FileRequest"
    events: "list[Event]" = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].finish is not None

    def row(self, tokens: TokenText) -> Mapping[str, Any]:
        """Return the JSON object of the result."""
        name = {} if self.asked.name is None else {"id": self.asked.name}
        return {"line": self.asked.line, **name, **_answer(self.asked.request, self.events, tokens)}


def _answer(request: Request, events: "Sequence[Event]", tokens: TokenText) -> dict[str, Any]:
    """Return the answer to a request for programs."""
    row: dict[str, Any] = {
        "text": "".join(event.text for event in events),
        "finish": events[-1].finish if events else None,
    }
    row |= {"prompt_tokens": len(request.prompt_ids), "new_tokens": len(events)}
    return row if request.logprobs is None else row | {"logprobs": [tokens.row(event) for event in events]}


@contextmanager
def _output(job: GenerationJob, mesh: "ParallelMesh") -> Iterator[TextIO | None]:
    """The stream for the results, on rank 0."""
    if mesh.rank != 0:
        yield None
    elif job.output is None:
        yield sys.stdout
    else:
        with named(job.output), job.output.open("w", encoding="utf-8") as file:
            yield file


def _show(mesh: "ParallelMesh", text: str) -> None:
    if mesh.rank == 0:
        print(text, end="", flush=True)


def tell(text: str) -> None:
    """Print a line beside the results, on standard error."""
    print(text, file=sys.stderr, flush=True)
