"""Fine-tune a model in full, with LoRA and with a prefix; compare held-out loss, trained values, memory and time.

From the repository's root: .venv/bin/python examples/fine-tuning/compare.py --model.weights FOLDER [--KEY VALUE ...]
"""

import sys
from pathlib import Path

from megalite import Trainer, load_config

# The fewer values are trained, the higher is the learning rate that suits them.
WAYS: dict[str, dict[str, dict[str, object]]] = {
    "full": {"optimizer": {"learning_rate": 3e-3}},
    "lora": {
        "adapter": {"kind": "lora", "rank": 1, "alpha": 4.0, "targets": ["v_proj", "o_proj", "down_proj"]},
        "optimizer": {"learning_rate": 3e-2},
    },
    "prefix": {"adapter": {"kind": "prefix", "tokens": 8}, "optimizer": {"learning_rate": 3e-2}},
}
RUN = Path(__file__).with_name("run.toml")


def main(flags: list[str]) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for name, settings in WAYS.items():
        folder = Path(load_config(RUN, *flags).run.folder) / name
        config = load_config(RUN, *flags, "--run.folder", str(folder), **settings)
        result = Trainer(config).train()
        validated = [record["validation_loss"] for record in result.metrics if "validation_loss" in record]
        steps = [record for record in result.metrics if "step_seconds" in record]
        rows.append(
            {
                "way": name,
                "before": validated[0],
                "after": min(validated),
                "saved MiB": sum(file.stat().st_size for file in result.checkpoint.iterdir()) / 2**20,
                "memory GiB": max(record["memory_bytes"] for record in steps) / 2**30,
                "seconds a step": sum(record["step_seconds"] for record in steps) / len(steps),
            }
        )
    print("\n" + "".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print(
            "".join(
                f"{value:>16.3f}" if isinstance(value, float) else f"{value:>16}" for value in row.values()
            )
        )
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
