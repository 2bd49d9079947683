"""The inputs of a run under a launcher: rank 0 prepares them before torch's process group stands, every host checks."""

import hashlib
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megalite.config.sections.schema import RunConfig
from megalite.config.sources.hub import HubName
from megalite.data.files.token_file import bin_path, idx_path
from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.control.rendezvous import Meeting
from megalite.monitor.console import announce
from megalite.parallel.mesh import Store, reach_store, serve_store
from megalite.train.inputs import RunInputs, prepare_inputs
from megalite.train.run_folder import RunFolder

_SAME_FILES = (
    "the hosts do not see the same files; put the run folder, the data and the weights on a file system that all of "
    "them share, or copy them to the same paths:"
)
_SHARED_SECONDS = 30.0
_HASHED_BYTES = 2**16


def agreed_inputs(meeting: Meeting, config: RunConfig, folder: RunFolder, *, leads_node: bool) -> RunInputs:
    """Return the inputs of the run, which rank 0 prepares while the others wait, seen alike on every host.

    leads_node: whether this rank looks at the files for its host. Rank 0 must have claimed the folder.
    """
    member = meeting.member
    progress.begin(Activity.PREPARING)
    if member.hello.rank == 0:
        inputs, mark = prepare_inputs(config, folder), secrets.token_hex(16)
        folder.mark(mark)
        member.announce("inputs", {"inputs": inputs.as_json(), "mark": mark})
    else:
        who = f"rank {member.hello.rank} on {member.hello.host}"
        note = partial(announce, f"{who} waits while rank 0 prepares text, tokenizer and weights")
        announced = member.wait("inputs", note if leads_node else None)
        inputs, mark = RunInputs.from_json(announced["inputs"]), announced["mark"]
    facts: dict[str, str] = {}
    if leads_node:
        shared = folder.shows(mark, _SHARED_SECONDS)
        place = folder.root.resolve()
        facts["run.folder"] = "the folder of rank 0" if shared else f"another folder ({place})"
        facts |= dict(_files(inputs))
    member.agree("files", facts, _SAME_FILES)
    return inputs


def agreed_store(meeting: Meeting, seconds: float) -> Store:
    """Return the store over which torch's process group meets; rank 0 serves it at a free port of its own."""
    if meeting.member.hello.rank == 0:
        store, port = serve_store(meeting.address, seconds)
        meeting.member.announce("store", [meeting.address, port])
        return store
    address, port = meeting.member.wait("store")
    return reach_store(address, port, seconds)


def _files(inputs: RunInputs) -> Iterator[tuple[str, str]]:
    """Yield path, "size and digest" of the token files or streamed files, the tokenizer's and the weights'."""
    data = inputs.data
    paths = [
        place(prefix)
        for prefix in (*data.train, *data.validation, *data.test)
        for place in (bin_path, idx_path)
    ]
    paths += [file.path for file in data.stream]
    folders = [data.tokenizer] if data.tokenizer is not None else []
    if inputs.weights is not None and HubName.of(inputs.weights) is None:
        folders.append(Path(inputs.weights).expanduser())
    for path in paths:
        yield str(path), _fingerprint(path)
    for folder in folders:
        names = sorted(each.name for each in folder.iterdir() if each.is_file()) if folder.is_dir() else []
        yield str(folder), ", ".join(names) if names else f"missing ({folder.resolve()})"
        for name in names:
            yield str(folder / name), _fingerprint(folder / name)


def _fingerprint(path: Path) -> str:
    """Return the size and the digest of both ends of a file: a change in the middle alone is not seen."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            ends = file.read(_HASHED_BYTES)
            file.seek(max(0, size - _HASHED_BYTES))
            ends += file.read(_HASHED_BYTES)
    except OSError as error:
        return f"{'missing' if isinstance(error, FileNotFoundError) else error.strerror} ({path.resolve()})"
    return f"{size} bytes {hashlib.sha256(ends).hexdigest()[:12]}"
