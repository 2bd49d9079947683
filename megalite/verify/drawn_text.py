"""Text drawn for a verification, in the form that a run's `data.kind` reads: any run can be verified before its text.

It is prepared, packed and read by the run's own code; documents are short, so that several share a sequence.
"""

import json
import random
from pathlib import Path
from typing import Any

from megalite.config.sections.schema import RunConfig

TOKENIZER_IDS = 280
_WORDS, _LETTERS = 400, "abcdefghijklmnopqrstuvwxyz"
_ROWS = 240


def with_drawn_text(config: RunConfig, folder: Path) -> RunConfig:
    """Write text of the run's kind into `folder`; return the run with it as its data, and a tokenizer of its own."""
    random_ = random.Random(config.run.seed)
    words = ["".join(random_.choices(_LETTERS, k=random_.randint(2, 9))) for _ in range(_WORDS)]

    def said(most: int) -> str:
        return " ".join(random_.choices(words, k=random_.randint(1, most)))

    def row() -> dict[str, Any]:
        if config.data.kind == "preference":
            return {"prompt": said(2), "chosen": said(4), "rejected": said(4)}
        if config.data.kind == "instruct":
            turns = [("user", said(2)), ("assistant", said(4))]
            return {"messages": [{"role": role, "content": text} for role, text in turns]}
        return {config.data.text_column: said(24)}

    sets = len(config.data.blend or ()) or 1
    paths = [folder / f"drawn-{number}.jsonl" for number in range(sets)]
    for path in paths:
        path.write_text("".join(json.dumps(row()) + "\n" for _ in range(_ROWS)), encoding="utf-8")
    changes: dict[str, Any] = {
        **{"validation": None, "split": None, "pattern": "*", "min_length": 0, "workers": 0},
        "too_long": "truncate",
    }
    if config.data.blend is None:
        changes["source"] = str(paths[0])
    else:
        blend = config.data.blend
        changes["blend"] = tuple(
            part.model_copy(update={"source": str(path), "text_column": None, "pattern": None})
            for part, path in zip(blend, paths, strict=True)
        )
    if config.data.order == "megatron":
        # It reads token files alone.
        changes["order"] = "megalite"
    tokenizer = type(config.tokenizer)(vocab_size=TOKENIZER_IDS)
    if config.data.kind != "text":
        tokenizer = tokenizer.model_copy(update={"chat_template": "plain"})
    validation = type(config.validation)()
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=changes),
            "tokenizer": tokenizer,
            "validation": validation,
        }
    )
