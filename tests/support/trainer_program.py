"""transformers' Trainer on one process: three steps, a checkpoint, and its own next step."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from megalite.checkpoint.regions import full_slice
from megalite.convert.huggingface.load import HuggingFaceReader
from megalite.families.registry import hf_config
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from tests.support.next_step import NextStep, token_rows

STEPS, ROWS = 3, 8
OPTIMIZER = {
    "optimizer__learning_rate": 3e-3,
    "optimizer__betas": [0.9, 0.98],
    "optimizer__eps": 1e-6,
    "optimizer__weight_decay": 0.1,
    "optimizer__gradient_clipping": 0.5,
}


def canonical_weights(folder: Path, shape: ModelShape) -> dict[str, Tensor]:
    """Return the canonical tensors of a Hugging Face folder."""
    with HuggingFaceReader(folder, shape) as reader:
        return {
            name: reader.read("weight", name, full_slice(size))
            for name, size in canonical_tensors(shape).items()
        }


def run_trainer(shape: ModelShape, folder: Path, dtype: torch.dtype = torch.float32) -> NextStep:
    """Train and save checkpoint-3 and checkpoint-4; return the fourth step."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**hf_config(shape, "float32", {})), dtype=dtype
    )
    rows = [row for step in range(STEPS + 1) for row in token_rows(shape, step, rows=ROWS)]
    # The first label has no prediction; with a mark it is not counted either.
    data = [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS + 1,
        save_steps=1,
        per_device_train_batch_size=ROWS // 2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        weight_decay=0.1,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_total_limit=2,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=data)
    trainer.train()
    last = next(entry for entry in trainer.state.log_history if entry["step"] == STEPS + 1)
    after = canonical_weights(folder / f"checkpoint-{STEPS + 1}", shape)
    return NextStep(token_rows(shape, STEPS, rows=ROWS), last["loss"], last["grad_norm"], after)
