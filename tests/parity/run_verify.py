"""Verifies many layouts of many models, as `megalite verify RUN.toml --matrix N` does: each must hold.

    python -m tests.parity.run_verify                      all models; minutes
    python -m tests.parity.run_verify --only gpt_oss       those whose name has this word

Prints a line a layout, and after each model writes the verdicts into benchmarks/results/. Exit code 1 where one
departs.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megalite.config.flags import as_flags
from megalite.config.sections.schema import ModelConfig
from megalite.config.sections.shape_settings import as_settings
from megalite.verify.matrix import MatrixCertificate, verify_matrix
from megalite.verify.run import VerifyRequest
from tests.support.matrix.axes import AXES
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES
from tests.support.verification import SETTINGS, adapters_without_weights

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DROPOUT = {**AXES["dropout"].values["hidden"], "model.attention_dropout": 0.2}
DOCUMENTS = {"data.document_mask": True}
LORA, DORA = (AXES["adapter"].values[name] for name in ("lora", "dora"))
BALANCED = {"training.router_balance": 0.3, "training.router_z": 0.05}


@dataclass(frozen=True)
class Case:
    """A model of tests/support/tiny.py, further settings of its run, and the most ranks."""

    shape: str
    ranks: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    request: VerifyRequest = field(default_factory=VerifyRequest)

    @property
    def flags(self) -> list[str]:
        shape = {**FAMILY_SHAPES, **MIXTURE_SHAPES}[self.shape]
        known = {
            key: value for key, value in as_settings(vars(shape)).items() if key in ModelConfig.model_fields
        }
        model = {f"model.{key}": value for key, value in known.items() if value is not None}
        return [*as_flags({**SETTINGS, **model, **self.settings})]


CASES: Mapping[str, Case] = {
    "llama, bf16": Case(
        "llama 3", settings={"training.precision": "bf16"}, request=VerifyRequest(precision="run")
    ),
    "mixtral, bf16": Case(
        "mixtral",
        settings={**BALANCED, "training.precision": "bf16"},
        request=VerifyRequest(precision="run"),
    ),
    "gemma3, documents, bf16": Case(
        "gemma3",
        settings={**DOCUMENTS, "training.precision": "bf16"},
        request=VerifyRequest(precision="run"),
    ),
    "phi3, LoRA with dropout": Case("phi3", settings=LORA),
    "mistral, DoRA": Case("mistral", settings=DORA),
    "olmo2, instructions, smoothed": Case(
        "olmo2", settings={"data.kind": "instruct", "training.label_smoothing": 0.1, "training.z_loss": 0.01}
    ),
    "gpt_oss": Case("gpt_oss", settings=BALANCED),
    "qwen3_moe, dropout": Case(
        "qwen3_moe", settings={**BALANCED, "model.residual_dropout": 0.2, "model.attention_dropout": 0.2}
    ),
    "deepseek_v3, documents": Case("deepseek_v3", settings={**BALANCED, **DOCUMENTS}),
    "qwen2, fp32": Case(
        "qwen2 tied", settings={"training.precision": "fp32"}, request=VerifyRequest(precision="run")
    ),
    "gemma3, documents": Case("gemma3", settings=DOCUMENTS),
    "llama": Case("llama 3"),
    "gpt2, dropout, recompute": Case("gpt2", settings={**DROPOUT, "training.recompute": "full"}),
    "qwen3, Muon, groups, moving average": Case(
        "qwen3",
        settings={
            "optimizer.name": "muon",
            "optimizer.ema_decay": 0.9,
            "optimizer.groups": [{"pattern": "*.mlp.*", "learning_rate_ratio": 0.25}],
        },
    ),
    "mixtral": Case("mixtral", settings=BALANCED),
    "llama, preferences": Case(
        "llama with biases", settings={"data.kind": "preference", "training.micro_batch_size": 2}
    ),
}


def write_results(
    found: Mapping[str, MatrixCertificate], left: Sequence[str], seconds: float, path: Path
) -> None:
    """Write the verdicts on some models. left: those that are not verified yet."""
    content = {
        "date": date.today().isoformat(),
        "command": "python -m tests.parity.run_verify",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "deepspeed")},
        "seconds": round(seconds, 1),
        "layouts": sum(len(matrix.layouts) for matrix in found.values()),
        "failed": [f"{name}: {row.layout}" for name, matrix in found.items() for row in matrix.failed],
        "left": left,
        "worst": {name: _worst(matrix) for name, matrix in found.items()},
    }
    rows = [{"model": name, **_row(row)} for name, matrix in found.items() for row in matrix.layouts]
    text = json.dumps(content, indent=2).removesuffix("\n}")
    path.write_text(
        f'{text},\n  "rows": [\n' + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]\n}\n"
    )


def _worst(matrix: MatrixCertificate) -> dict[str, float]:
    """Return bound -> the largest error of the layouts that have this bound."""
    worst: dict[str, float] = {}
    for row in matrix.layouts:
        key = f"{row.bound:.0e}"
        worst[key] = max(worst.get(key, 0.0), row.error)
    return worst


def _row(row: Any) -> dict[str, Any]:
    values = asdict(row)
    return {**values, "flags": " ".join(values["flags"]), "seconds": round(values["seconds"], 2)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="run_verify"
    )
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="only models with it")
    default = RESULTS / f"{date.today().isoformat()}-verify-matrix.json"
    parser.add_argument("--output", type=Path, metavar="FILE", help="verdicts of some models alone")
    options = parser.parse_args(arguments)
    chosen = {
        name: case
        for name, case in CASES.items()
        if not options.only or any(word in name for word in options.only)
    }
    if not chosen:
        parser.error("no model is called that")
    output = options.output or (default if len(chosen) == len(CASES) else None)
    began, found = time.perf_counter(), dict[str, MatrixCertificate]()
    for name, case in chosen.items():
        print(f"\n{name}", flush=True)
        with adapters_without_weights():
            found[name] = verify_matrix(None, case.flags, case.ranks, case.request, say=_say)
        print(*(line for line in found[name].summary()), sep="\n", flush=True)
        if found[name].left:
            return 130
        if output:
            left = [each for each in chosen if each not in found]
            write_results(found, left, time.perf_counter() - began, output)
    seconds = time.perf_counter() - began
    rows = [row for matrix in found.values() for row in matrix.layouts]
    print(f"{len(rows)} layouts in {seconds:.0f} s, {sum(not row.holds for row in rows)} depart")
    if output:
        print(f"written to {output}")
    return int(not all(row.holds for row in rows))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
