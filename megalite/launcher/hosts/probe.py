"""The preflight's program on each host: answers questions about this host, as JSON lines over stdin and stdout.

The launching process sends this file's text to the host's interpreter, so that it also answers where megalite is
missing or has another version. It imports megalite only to find out whether that works. ASCII only.

`python -m megalite.launcher.hosts.probe --json` prints the facts of this machine once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MARK = "megalite-probe "
"""The beginning of an answer's line; other lines come from the host's shell and are no answers."""

PACKAGES = ("torch", "deepspeed", "transformers")

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of <linux/sockios.h>
_CONNECT_SECONDS = 3.0
_CONNECTIONS = 64


class Listener:
    """A port of this host that other hosts connect to; it tells each of them `token`, and nothing else."""

    def __init__(self, token: str, ports: Sequence[int] = (0,), address: str = ""):
        self.token = token
        self._socket = _listening(ports, address)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(self.token.encode() + b"\n")


def _listening(ports: Sequence[int], address: str) -> socket.socket:
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family, dualstack_ipv6=dual)
    # IPv6 may be compiled in and turned off.
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port))
    raise OSError(f"no port from {ports[0]} to {ports[-1]} is free")


def reach(addresses: Sequence[str], port: int, token: str) -> dict[str, str]:
    """Connect to the first of the addresses where a `Listener` tells `token`.

    Returns address, the `own` address and `interface` that the connection uses, and `error`, "" if one was reached.
    """
    errors = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
                answer = connection.makefile().readline().strip()
                own = connection.getsockname()[0].removeprefix("::ffff:")
        except OSError as error:
            errors.append(f"{address} port {port}: {error.strerror or error}")
            continue
        if answer == token:
            return {"address": address, "own": own, "interface": interface_of(own), "error": ""}
        errors.append(f"{address} port {port}: another machine or program answers")
    return {"address": "", "own": "", "interface": "", "error": "; ".join(errors) or "it has no address"}


def interfaces() -> dict[str, str]:
    """Return interface -> its first IPv4 address; without the ones that have none."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF_INTERFACE, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def interface_of(address: str) -> str:
    return next((name for name, each in interfaces().items() if each == address), "")


def facts(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the preflight compares; paths: run_file and run_folder, each "" for none."""
    return {
        "host": socket.gethostname(),
        "own_name": _resolved(socket.gethostname()),
        "interfaces": interfaces(),
        "folder": str(Path.cwd()),
        "python": sys.version.split()[0],
        **_megalite(),
        **{name: _version(name) for name in PACKAGES},
        "run_file": digest(paths["run_file"]),
        **_machine(),
        **_disk(paths["run_folder"]),
    }


def _megalite() -> dict[str, Any]:
    """Return version, library, cores and memory as megalite sees them; `megalite_error` if it cannot be imported."""
    try:
        import megalite.version
        from megalite.launcher.process import available_cores, available_memory_bytes, total_memory_bytes
        from megalite.version import __version__
    except Exception as error:  # whatever a damaged installation raises
        spec = importlib.util.find_spec("megalite")
        hidden = list(spec.submodule_search_locations or ()) if spec and spec.origin is None else []
        return {
            "megalite": "",
            "megalite_error": f"{type(error).__name__}: {error}",
            "megalite_hidden_by": hidden[0] if hidden else "",
            "library": "",
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": None,
            "total_memory_bytes": None,
        }
    package = Path(megalite.version.__file__).parent
    return {
        "megalite": f"{__version__} {_code(package)}",
        "megalite_error": "",
        "megalite_hidden_by": "",
        "library": digest(str(package / "ops" / "libmegalite.so"))["digest"],
        "cores": available_cores(),
        "memory_bytes": available_memory_bytes(),
        "total_memory_bytes": total_memory_bytes(),
    }


def _code(package: Path) -> str:
    """Return a digest of a package's Python files: two checkouts may have the same version."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:6]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def digest(path: str) -> dict[str, str]:
    """Return the digest of a file, or the error of reading it; both "" without a path."""
    try:
        return {
            "digest": hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else "",
            "error": "",
        }
    except OSError as error:
        return {"digest": "", "error": error.strerror or str(error)}


def _resolved(name: str) -> dict[str, Any]:
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return {"addresses": [], "error": str(error)}
    return {"addresses": sorted(map(str, addresses)), "error": ""}


def _machine() -> dict[str, Any]:
    cards = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not cards:
        nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
        cards = sum(node.read_text().strip() not in ("", "0") for node in nodes)
    # WSL2 does not say how many it has.
    accelerator = cards > 0 or Path("/dev/dxg").exists()
    shared = _free_bytes(Path("/dev/shm"))
    return {"gpus": cards, "accelerator": accelerator, "shared_memory_bytes": shared}


def _disk(run_folder: str) -> dict[str, Any]:
    """Return free bytes of the disk that holds, or will hold, the run folder, and whether it can be written."""
    if not run_folder:
        return {"disk_bytes": None, "disk_error": ""}
    folder = standing(Path(run_folder))
    writable = os.access(folder, os.W_OK | os.X_OK)
    return {
        "disk_bytes": _free_bytes(folder),
        "disk_error": "" if writable else f"{folder} cannot be written",
    }


def standing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


class Probe:
    """Answers the questions of one launching process; `finish` removes what they left."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._marker: Path | None = None

    def facts(self, paths: Mapping[str, Any]) -> dict[str, Any]:
        return facts(paths)

    def time(self) -> float:
        return time.time()

    def listen(self, token: str, ports: Sequence[int], address: str) -> dict[str, Any]:
        try:
            self._listener = Listener(token, ports, address)
        except OSError as error:
            return {"port": 0, "error": str(error)}
        return {"port": self._listener.port, "error": ""}

    def reach(self, others: Sequence[tuple[Sequence[str], int, str]]) -> list[dict[str, str]]:
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            return list(threads.map(lambda other: reach(*other), others))

    def mark(self, run_folder: str, name: str) -> str:
        """Write a file that hosts with the same folder see; return its error."""
        marker = standing(Path(run_folder)) / name
        try:
            marker.touch(exist_ok=False)
        except OSError as error:
            return error.strerror or str(error)
        self._marker = marker
        return ""

    def sees(self, run_folder: str, name: str, seconds: float) -> bool:
        """Whether the file that another host wrote is here within some seconds."""
        end = time.monotonic() + seconds
        folder = Path(run_folder)
        while not (standing(folder) / name).exists():
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def finish(self) -> None:
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
        if self._listener is not None:
            self._listener.close()


def converse(ask: Callable[[], str], answer: Callable[[str], None]) -> None:
    """Answer each line `[question, argument...]`, until the launching process closes its end."""
    probe = Probe()
    try:
        while line := ask():
            question, *arguments = json.loads(line)
            try:
                answer(json.dumps({"answer": getattr(probe, question)(*arguments)}))
            except Exception as error:  # one failing question leaves the others
                answer(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    finally:
        probe.finish()


def main() -> None:
    write = sys.stdout.write
    if "--json" in sys.argv:
        write(json.dumps(facts({"run_file": "", "run_folder": ""}), indent=2) + "\n")
        return

    def answer(text: str) -> None:
        write(f"{MARK}{text}\n")
        sys.stdout.flush()

    answer(json.dumps({"answer": "ready"}))
    converse(sys.stdin.readline, answer)


if __name__ == "__main__":
    main()
