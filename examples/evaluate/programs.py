"""pass@k of generated programs, for humaneval.yaml: runs each in a limited process of its own.

This keeps accidents away from the machine, not attacks: a program reads what you may read, and has the network. Run
models that you do not trust in a container.
"""

import contextlib
import math
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile

SECONDS = 3
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 24


def with_prompts(resps: list[list[str]], docs: list[dict[str, str]]) -> list[list[str]]:
    """Return the programs: the head of each function, completed."""
    return [[doc["prompt"] + text for text in texts] for doc, texts in zip(docs, resps, strict=True)]


def pass_at_k(references: list[str], predictions: list[list[str]], k: list[int]) -> dict[str, float]:
    """Return the unbiased estimates of pass@k for the programs of one problem; references: its tests.

    Chen et al., "Evaluating Large Language Models Trained on Code", 2021: 1 - C(n - c, k) / C(n, k).
    """
    [test], [programs] = references, predictions
    right = sum(passes(f"{program}\n\n{test}\n") for program in programs)
    samples = len(programs)
    if samples < max(k):
        raise ValueError(f"pass@{max(k)} needs {max(k)} programs of each problem: set repeats: {max(k)}")
    return {f"pass@{size}": 1 - math.comb(samples - right, size) / math.comb(samples, size) for size in k}


def passes(program: str, seconds: int = SECONDS) -> bool:
    """Return whether a program runs to its last line: with an empty folder, no variables of ours, and no input."""
    token = secrets.token_hex(16)  # a program that leaves early, by sys.exit(0), does not show it
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as output,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", f"{program}\n\nprint({token!r})\n"],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
        output.seek(0)
        return code == 0 and output.read().decode(errors="replace").rstrip().endswith(token)


def _limit() -> None:
    for kind, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        resource.setrlimit(kind, (most, most))
