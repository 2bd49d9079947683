"""CUDA's hardware queues: whether a stream computes while kernels of other streams wait, as posted receives do.

    python -m benchmarks.gpu.queues     # one JSON object, for CUDA_DEVICE_MAX_CONNECTIONS as it is set

Each of some streams gets one or two kernels that wait for a flag of the host; then another stream gets work. Where it
does not run, work behind a receive that was posted ahead of another would hang (docs/gpu.md).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONNECTIONS = ("", "1", "8", "32")
STREAMS, EACH, PATIENCE_SECONDS = (1, 2, 4, 7, 8, 9, 16, 31, 40), (1, 2), 0.3
KERNELS = r"""
extern "C" __global__ void waits(volatile int* flag) { while (*flag == 0) __nanosleep(1000); }
extern "C" __global__ void tells(volatile int* flag) { *flag = 1; __threadfence_system(); }
"""


def queues() -> Iterator[dict[str, Any]]:
    """Yield a row for each number of hardware queues, from a process of its own."""
    for connections in CONNECTIONS:
        chosen = {"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.queues"],
            cwd=Path(__file__).parents[2],
            env=os.environ | chosen,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        yield {"connections": connections or "default", "computes": json.loads(done.stdout)}


def measure() -> dict[str, bool]:
    """{"8 streams, 2 waiting in each": whether another stream's work ran meanwhile}."""
    import cupy
    import numpy as np

    waits, tells = (cupy.RawKernel(KERNELS, name) for name in ("waits", "tells"))
    memory = [cupy.cuda.alloc_pinned_memory(4) for _ in range(2)]
    released, told = (np.frombuffer(each, np.int32, 1) for each in memory)
    flags = [np.uint64(each.ptr) for each in memory]
    found = {}
    released[0] = 1
    for kernel, flag in zip((waits, tells), flags, strict=True):
        kernel((1,), (1,), (flag,))  # the first launch compiles and loads it
    cupy.cuda.runtime.deviceSynchronize()
    for streams in STREAMS:
        for each in EACH:
            released[0] = told[0] = 0
            computing, *waiting = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams + 1)]
            for stream in waiting:
                for _ in range(each):
                    waits((1,), (1,), (flags[0],), stream=stream)
            tells((1,), (1,), (flags[1],), stream=computing)
            end = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < end and not told[0]:
                time.sleep(0.002)
            found[f"{streams} streams, {each} waiting in each"] = bool(told[0])
            released[0] = 1
            cupy.cuda.runtime.deviceSynchronize()
    return found


if __name__ == "__main__":
    print(json.dumps(measure()))
