"""Tokens per second of one training step: megalite against transformers, and each axis against one process.

    python -m benchmarks.training_step [--rounds 3] [--name training-step-cpu]

With MKL_ENABLE_INSTRUCTIONS=AVX2 and ATEN_CPU_CAPABILITY=avx2, of a library built with MEGALITE_CPU=x86-64-v3, it is
what a processor without AVX-512 does. Every case runs in a process of its own; rounds alternate between the cases, so
that a busy minute hits all of them. Prints the table, and writes it with the machine's facts into benchmarks/results/.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

from megalite.launcher.process import available_cores, keep_freed_memory
from megalite.topology.axes import Layout

# name -> (peer, layout, threads a process, our settings of the allocator and of waiting threads); "megalite" takes the
# operators that model.kernels = "auto" does, "plain" those of torch. Those of huge pages have HUGE_PAGES too.
CASES: dict[str, tuple[str, Layout, int, bool]] = {
    "transformers, as installed": ("transformers", Layout(), 2, False),
    "transformers, our settings": ("transformers", Layout(), 2, True),
    "transformers, our settings, huge pages": ("transformers", Layout(), 2, True),
    "megalite, plain operators, 2 threads": ("plain", Layout(), 2, True),
    "megalite, one process, 2 threads": ("megalite", Layout(), 2, True),
    "megalite, one process, huge pages": ("megalite", Layout(), 2, True),
    "megalite, tensor 2, 1 thread each": ("megalite", Layout(tensor=2), 1, True),
    "megalite, pipeline 2, 1 thread each": ("megalite", Layout(pipeline=2), 1, True),
    "megalite, data 2, 1 thread each": ("megalite", Layout(data=2), 1, True),
}


# Of 2 MiB for what malloc gives, where the kernel has them for the asking (enabled: madvise). Read as a process begins.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def _run_rank(rank: int, case: str, store: str, results: Connection) -> None:
    peer, layout, threads, ours = CASES[case]
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if ours:
        os.environ["GOMP_SPINCOUNT"] = "1000"
        keep_freed_memory()
    import torch

    from benchmarks.workload import Setup, Training, step_seconds, transformers_step
    from megalite.model.options import ModelOptions
    from megalite.monitor.throughput import gemm_flops_per_second
    from megalite.parallel.mesh import ParallelMesh, connect, disconnect
    from megalite.selftest.decide import choose_kernels

    torch.set_num_threads(threads)
    if layout.world_size > 1:
        connect(rank, layout.world_size, device=torch.device("cpu"), rendezvous=f"file://{store}")
    mesh = ParallelMesh.over_world(layout) if layout.world_size > 1 else ParallelMesh.single()
    kernels = choose_kernels("reference" if peer == "plain" else "auto", "cpu").operators
    setup = Setup(
        layout, micro_batches=4 if layout.pipeline > 1 else 1, options=ModelOptions(operators=kernels)
    )
    step = transformers_step() if peer == "transformers" else Training(setup, mesh).step
    seconds = step_seconds(step)
    if rank == 0:
        rate = gemm_flops_per_second(torch.float32) if layout.world_size == 1 else None
        results.send({"step_seconds": seconds, "sgemm_flops_per_second": rate})
    disconnect()


def measure(case: str) -> dict[str, object]:
    """Step times of one case, in fresh processes."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            spawn.Process(target=_run_rank, args=(rank, case, store, sender))
            for rank in range(CASES[case][1].world_size)
        ]
        wanted = HUGE_PAGES if case.endswith("huge pages") else {}
        with mock.patch.dict(os.environ, wanted):
            for process in ranks:
                process.start()
        result: dict[str, object] = receiver.recv()
        for process in ranks:
            process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--name", default="training-step-cpu", help="what the results are called, after the date"
    )
    options = parser.parse_args()
    rounds = options.rounds
    import torch

    from benchmarks.workload import SEQUENCE_LENGTH, SHAPE, TOKENS
    from megalite.ops import extension
    from megalite.topology.flops import flops_per_token

    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    rates: list[float] = []
    for _ in range(rounds):
        for case in CASES:
            result = measure(case)
            seconds[case] += result["step_seconds"]  # type: ignore[operator]
            if result["sgemm_flops_per_second"]:
                rates.append(float(result["sgemm_flops_per_second"]))  # type: ignore[arg-type]
    sgemm = max(rates)
    flops = flops_per_token(SHAPE, SEQUENCE_LENGTH)
    one = "megalite, one process, 2 threads"
    rows = []
    for case in CASES:
        median = statistics.median(seconds[case])
        rows.append(
            {
                "case": case,
                "median_step_seconds": round(median, 4),
                "fastest_step_seconds": round(min(seconds[case]), 4),
                "tokens_per_second": round(TOKENS / median),
                "share_of_sgemm": round(flops * TOKENS / median / sgemm, 3),
                "megalite_over_this": round(median / statistics.median(seconds[one]), 3),
            }
        )
        print(rows[-1])
    report = {
        "date": date.today().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": available_cores(),
            "torch_instructions": torch.backends.cpu.get_cpu_capability(),
            "mkl_instructions": os.environ.get("MKL_ENABLE_INSTRUCTIONS", "all"),
            "built": extension.built().said,
        },
        "sgemm_flops_per_second": sgemm,
        "rounds": rounds,
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / f"{report['date']}-{options.name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
