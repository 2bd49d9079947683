"""Trains a 5M Llama on WikiText-2 with megalite and with a plain transformers loop, and compares what both learned.

    python -m benchmarks.wikitext2 FOLDER [--steps 500] [--layout 1,2,2] [--layout 1,1,1] [--quick]

FOLDER holds train.txt (or train.txt.gz) and valid.txt. Both sides start from the same weights, which transformers
draws, and see the same samples in the same order (`data.shuffle = false`): with other orders the reference itself
moves by several percent. The loop shares nothing with megalite but the tokens: transformers' model, torch's AdamW,
a learning rate written out below. Each trained model is evaluated by transformers, from the folder that megalite
exported, over all of valid.txt in windows of the training length.

layout        pipeline, tensor, data. Several may be given.
perplexity    of a token of this tokenizer (4,096 byte-level BPE ids), not of a word.
difference    from the plain loop's, in percent.
largest gap   between the losses of a training step on both sides, relative.
seconds       of the training alone, on all cores, whatever else they did: no measurement of speed.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import report
from megalite.launcher.process import available_cores

VOCABULARY, LENGTH, SEED = 4096, 128, 1234
PEAK, WARM_UP, MINIMUM, DECAY, CLIPPING, BETAS, EPS = 1e-3, 0.05, 0.1, 0.1, 1.0, (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Size:
    """How much to train: the model, the steps of `batch` sequences, and the sequences to evaluate."""

    hidden_size: int
    layers: int
    steps: int
    batch: int
    evaluated: int | None

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(SEED)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.hidden_size,
                intermediate_size=self.hidden_size * 11 // 4,
                num_hidden_layers=self.layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=LENGTH,
                tie_word_embeddings=True,
            )
        )

    @property
    def warm_up(self) -> int:
        return max(1, round(WARM_UP * self.steps))


def prepare(corpus: Path, work: Path) -> None:
    """A tokenizer of the training text, and both texts in its ids."""
    packed = corpus / "train.txt.gz"
    train = packed if packed.exists() else corpus / "train.txt"
    tokenizer = ["--tokenizer", str(work / "tokenizer")]
    megalite(
        *("tokenizer", "train", "--source", str(train), "--vocab-size", str(VOCABULARY)),
        *("--output", str(work / "tokenizer")),
    )
    for name, source in (("train", train), ("valid", corpus / "valid.txt")):
        megalite("data", "prepare", "--source", str(source), *tokenizer, "--output", str(work / name))


def megalite(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megalite", *arguments], check=True, stdout=subprocess.DEVNULL)


def samples_of(prefix: Path) -> NDArray[np.uint16]:
    """[samples, LENGTH + 1]: from token i * LENGTH on, the inputs of sample i and, one later, its labels."""
    tokens = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)
    return windows[::LENGTH]


def token_losses(model: LlamaForCausalLM, samples: NDArray[np.uint16], reduction: str) -> torch.Tensor:
    ids = torch.from_numpy(samples.astype(np.int64))
    logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def learning_rate(step: int, size: Size) -> float:
    if step < size.warm_up:
        return PEAK * (step + 1) / size.warm_up
    progress = (step - size.warm_up) / (size.steps - size.warm_up)
    return PEAK * (MINIMUM + (1 - MINIMUM) * 0.5 * (1 + math.cos(math.pi * progress)))


def plain_loop(model: LlamaForCausalLM, samples: NDArray[np.uint16], size: Size) -> Iterator[float]:
    """The loss of each step of training in one process, as a user of transformers would write it."""
    groups = [
        {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in model.parameters() if each.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, size)
        optimizer.zero_grad()
        loss = token_losses(model, samples[step * size.batch : (step + 1) * size.batch], "mean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        yield float(loss.detach())


def megalite_run(start: Path, work: Path, size: Size, layout: str) -> tuple[Path, list[float]]:
    """The exported model of a run of `megalite train`, and its losses."""
    pipeline, tensor, data = layout.split(",")
    folder = work / f"run-{layout}"
    settings = {
        "run.folder": folder,
        "run.seed": SEED,
        "model.weights": start,
        "tokenizer.path": work / "tokenizer",
        "data.source": work / "train",
        "data.shuffle": "false",
        "parallel.pipeline": pipeline,
        "parallel.tensor": tensor,
        "parallel.data": data,
        "training.steps": size.steps,
        "training.precision": "fp32",
        "training.sequence_length": LENGTH,
        "training.micro_batch_size": max(1, size.batch // int(data) // (4 * int(pipeline))),
        "training.global_batch_size": size.batch,
        "optimizer.learning_rate": PEAK,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": size.warm_up,
        "optimizer.minimum_ratio": MINIMUM,
        "optimizer.weight_decay": DECAY,
        "optimizer.gradient_clipping": CLIPPING,
        "optimizer.betas": json.dumps(BETAS),
        "optimizer.eps": EPS,
        "monitor.every": 100,
    }
    run_file = work / f"run-{layout}.toml"
    run_file.write_text("")
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    megalite("train", str(run_file), *flags)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return folder / "export", [loss for line in lines if (loss := json.loads(line).get("loss")) is not None]


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, samples: NDArray[np.uint16]) -> float:
    model.eval()
    total = sum(
        float(token_losses(model, chunk, "sum")) for chunk in np.array_split(samples, len(samples) // 16)
    )
    return math.exp(total / (len(samples) * LENGTH))


def compare(corpus: Path, work: Path, size: Size, layouts: Sequence[str]) -> list[dict[str, Any]]:
    prepare(corpus, work)
    train, valid = samples_of(work / "train"), samples_of(work / "valid")[: size.evaluated]
    model = size.model()
    parameters = model.num_parameters()
    model.save_pretrained(work / "start")
    torch.set_num_threads(available_cores())
    untrained = perplexity(model, valid)
    began = time.perf_counter()
    losses = list(plain_loop(model.train(), train, size))
    seconds = time.perf_counter() - began
    reference = perplexity(model, valid)
    common = {"parameters": parameters, "tokens": size.steps * size.batch * LENGTH}

    def row(case: str, found: float, gap: float, seconds: float) -> dict[str, Any]:
        return {
            **common,
            "case": case,
            "perplexity": round(found, 4),
            "difference_percent": round(100 * (found / reference - 1), 4),
            "largest_gap": float(f"{gap:.2e}"),
            "seconds": round(seconds, 1),
        }

    rows = [row("untrained", untrained, 0.0, 0.0), row("transformers, plain loop", reference, 0.0, seconds)]
    for layout in layouts:
        began = time.perf_counter()
        export, ours = megalite_run(work / "start", work, size, layout)
        seconds = time.perf_counter() - began
        gap = max(abs(one / other - 1) for one, other in zip(ours, losses, strict=True))
        found = perplexity(LlamaForCausalLM.from_pretrained(export), valid)
        rows.append(row(f"megalite, pipeline,tensor,data {layout}", found, gap, seconds))
    return rows


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("corpus", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layout", action="append", metavar="P,T,D")
    arguments = report.arguments_of(parser)
    size = Size(256, 6, arguments.steps, 16, None)
    if arguments.quick:
        size = Size(64, 4, min(arguments.steps, 12), 8, 64)
    facts = report.machine()
    with tempfile.TemporaryDirectory() as work:
        rows = compare(arguments.corpus, Path(work), size, arguments.layout or ["1,1,1", "2,2,1"])
    columns = {
        "case": "trained by",
        "perplexity": "perplexity",
        "difference_percent": "difference %",
        "largest_gap": "largest gap",
        "seconds": "seconds",
    }
    report.show(
        f"WikiText-2, {rows[0]['parameters']:,} parameters, {rows[0]['tokens']:,} tokens", rows, columns
    )
    report.write("wikitext2", facts, {"quick": arguments.quick}, rows, arguments.results)


if __name__ == "__main__":
    main()
