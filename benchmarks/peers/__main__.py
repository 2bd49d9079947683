"""Speed, memory and start of megalite beside its peers, in the same layout on the same two cores.

    python -m benchmarks.peers [--rounds 3] [--layout "data 2"] [--picotron FOLDER] [--quick]

The step of benchmarks/workload.py: a 17M Llama, 4 x 256 tokens (with context parallelism one long sequence), float32,
AdamW with clipping. One process has two threads, two processes have one each. Every contender of every round trains in
fresh processes; rounds alternate between the contenders. All begin with the same weights and see the same tokens: a run
in which the first three losses of a contender are not megalite's ends with an error.

Peers run as installed, DDP with gradient_as_bucket_view. DeepSpeed's AdamW and its collectives over shared memory
(which it uses for inference only) are built before any measurement, for which it needs a C++ compiler. picotron is no
package: fetch github.com/huggingface/picotron (tried: 59714b1) and name its folder. torchtitan and megatron-core are
left out, as both need CUDA: torchtitan takes "cuda" where it finds no accelerator, and megatron-core has no path
without it. picotron is the only peer of context parallelism.

s/step         median over the rounds of each round's median step, of the slowest rank.
over megalite  seconds of the row by those of megalite's (first) row, in the same round: median, low and high of the
               rounds. Above 1, megalite is ahead.
peak MiB       resident memory of the largest process.
first step     seconds from starting the processes to the end of the first step: interpreter, imports, process group,
               model, and the step. Under `megalite train` ranks share the imports; here every process has its own.
save, load     of a checkpoint of weights and optimizer, with data parallelism: torch.distributed.checkpoint for torch,
               each library's own else. DeepSpeed leaves the files to the page cache, megalite and torch sync them;
               megalite hashes them too. The step after loading has the same loss as the one after saving.
"""

import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.peers.cases import CASES, chosen
from benchmarks.peers.contender import Figures, PeerLayout, measure
from benchmarks.peers.figures import Cases, Round, best_of, check_losses, rows_of
from benchmarks.peers.preparation import build_deepspeed_operators, write_weights
from benchmarks.ranks import run_fresh_ranks

CORES = 2
STEPS, QUICK_STEPS = 6, 1  # timed, after those whose losses are compared; fewer of more tokens than TOKENS
TOKENS = 1024
COLUMNS = {
    "layout": "layout",
    "contender": "contender",
    "seconds": "s/step",
    "tokens_per_second": "tokens/s",
    "over_megalite": "over megalite",
    "low": "low",
    "high": "high",
    "peak_mib": "peak MiB",
    "first_step_seconds": "first step, s",
    "save_seconds": "save, s",
    "load_seconds": "load, s",
}
BEST = {
    "layout": "layout",
    "megalite": "megalite",
    "best_peer": "best peer",
    "peer_over_ours": "peer / megalite",
    "low": "low",
    "high": "high",
    "ahead": "ahead",
}


def one_round(cases: Cases, weights: Path, *, steps: int, picotron: Path | None) -> dict[PeerLayout, Round]:
    """Every contender, one after the other. Raises ValueError where one does other work than megalite."""
    found: dict[PeerLayout, dict[str, Figures]] = {}
    for layout, contenders in cases.items():
        timed = max(min(steps, 2), steps * TOKENS // layout.tokens)
        found[layout] = {
            each.name: measure(each, layout, weights, cores=CORES, steps=timed, picotron=picotron)
            for each in contenders
        }
    check_losses(cases, found)
    return found


def measured(
    cases: Cases, *, rounds: int, steps: int, picotron: Path | None
) -> Iterator[list[dict[PeerLayout, Round]]]:
    """All rounds so far, after each."""
    with tempfile.TemporaryDirectory(prefix="megalite-peers-") as folder:
        weights = Path(folder) / "weights.safetensors"
        run_fresh_ranks(write_weights, 1, weights)
        found: list[dict[PeerLayout, Round]] = []
        for _ in range(rounds):
            found.append(one_round(cases, weights, steps=steps, picotron=picotron))
            yield found


def facts_of(cases: Cases) -> dict[str, Any]:
    """Those of the machine, and of the peers."""
    facts = {**report.machine(), **{name: version(name) for name in ("transformers", "deepspeed")}}
    modules = {each.module for contenders in cases.values() for each in contenders}
    if modules & {"deepspeed_zero", "deepspeed_pipeline"}:
        [built] = run_fresh_ranks(build_deepspeed_operators, 1)
        facts["deepspeed_shared_memory_collectives"] = "built" if built else "could not be built"
    return facts


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layout", action="append", default=[], choices=[layout.name for layout in CASES])
    parser.add_argument("--picotron", type=Path, metavar="FOLDER", help="a checkout of picotron")
    arguments = report.arguments_of(parser)
    cases = chosen(arguments.layout, quick=arguments.quick, picotron=arguments.picotron is not None)
    if not cases:
        parser.error("the layouts have no peer but picotron: name its checkout with --picotron FOLDER")
    facts = facts_of(cases)
    left_out = [] if arguments.picotron else ["picotron (no --picotron FOLDER)"]
    for each in left_out:
        print(f"left out: {each}")
    rounds, steps = (1, QUICK_STEPS) if arguments.quick else (arguments.rounds, STEPS)
    for found in measured(cases, rounds=rounds, steps=steps, picotron=arguments.picotron):
        each_layout = [(layout, cases[layout], [one[layout] for one in found]) for layout in cases]
        rows = [row for each in each_layout for row in rows_of(*each)]
        best = [row for each in each_layout for row in best_of(*each)]
        report.show(f"A step of each contender, {len(found)} rounds", rows, COLUMNS)
        report.show("megalite and the fastest peer", best, BEST)
        settings = {"quick": arguments.quick, "rounds": len(found), "steps": steps, "left_out": left_out}
        report.write("peers", facts, {**settings, "best": best}, rows, arguments.results)


if __name__ == "__main__":
    main()
