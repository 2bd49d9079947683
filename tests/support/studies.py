"""The run file of a small study on token files without a tokenizer, and finished runs that nobody trained."""

import json
from pathlib import Path

from tests.support.tiny_run import LENGTH, VOCABULARY, write_token_files

RUN_FILE = """
[run]
folder = "{folder}/runs/tiny"

[model]
vocab_size = {vocabulary}
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 1
max_position_embeddings = 32
tie_word_embeddings = true

[training]
steps = 6
precision = "fp32"
sequence_length = {length}
micro_batch_size = 2
micro_batches = 1
threads = 1

[data]
source = "{folder}/train"
validation = "{folder}/held"

[checkpoint]
export = false
"""


def write_study(folder: Path) -> Path:
    """Write the token files and the run file; return the run file."""
    write_token_files(folder)
    run_file = folder / "run.toml"
    run_file.write_text(RUN_FILE.format(folder=folder, vocabulary=VOCABULARY, length=LENGTH))
    return run_file


def write_finished(run_folder: Path, steps: int, loss: float) -> None:
    """Leave what a run leaves that ended after `steps` with this validation loss."""
    (run_folder / "checkpoints" / f"step-{steps:06d}").mkdir(parents=True)
    record = {"step": steps, "loss": loss + 0.1, "tokens": steps * 2 * LENGTH, "validation_loss": loss}
    (run_folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
