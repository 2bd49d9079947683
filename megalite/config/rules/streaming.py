"""Rules over data.streaming: text that is read while the run trains has no token file, and no known length."""

from collections.abc import Iterator

from megalite.config.sections.checked import CheckedRun
from megalite.errors import Problem


def streams_are_one_set_of_documents(run: CheckedRun) -> Iterator[Problem]:
    if not run.data.streaming:
        return
    if run.data.kind != "text":
        message = f'is for documents, but data.kind is "{run.data.kind}"'
        yield Problem.reset("data.streaming", message, 'set it to false, or data.kind = "text"', False)
    if run.data.blend is not None:
        remedy = "name all files as data.source, or set data.streaming = false"
        yield Problem(
            "data.blend",
            "has several data sets, but data.streaming reads one",
            remedy,
            {"data.streaming": False},
        )


def streams_are_not_split(run: CheckedRun) -> Iterator[Problem]:
    split = run.data.split
    if run.data.streaming and split is not None and len(split) > 1:
        message = "needs a pass over all documents, which data.streaming does not make"
        yield Problem.reset("data.split", message, "delete it, and name other text as data.validation")


def streams_have_a_tokenizer(run: CheckedRun) -> Iterator[Problem]:
    if run.data.streaming and run.tokenizer.path is None:
        remedy = "train one on a part of the text (megalite tokenizer train), and set tokenizer.path"
        yield Problem("data.streaming", "needs an existing tokenizer", remedy)


def streams_have_a_last_step(run: CheckedRun) -> Iterator[Problem]:
    if run.data.streaming and run.training.steps is None:
        message = "is required with data.streaming, since the length of the text is not known"
        yield Problem("training.steps", message, "set it, and delete training.epochs")


def one_thread_reads_a_stream(run: CheckedRun) -> Iterator[Problem]:
    workers = run.data.loader_workers
    if run.data.streaming and workers > 1:
        yield Problem.reset(
            "data.loader_workers", f"{workers} threads cannot read a stream in order", "use 1", 1
        )
