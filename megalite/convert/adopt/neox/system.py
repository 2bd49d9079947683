"""GPT-NeoX: one or several YAML files, hyphens or underscores, with DeepSpeed's keys among its own.

Keys and defaults are those of megatron/neox_arguments of EleutherAI/gpt-neox.
"""

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.continued import answer_output
from megalite.convert.adopt.deepspeed_json import BLOCKS, NAMES, answer_keys
from megalite.convert.adopt.keyed.keyed_file import MAPPINGS, answer_all, complete, read_files
from megalite.convert.adopt.keyed.keyed_system import KeyedSystem
from megalite.convert.adopt.launchers import answer_launcher, is_hostfile
from megalite.convert.adopt.neox import model as neox_model
from megalite.convert.adopt.neox import run as neox_run
from megalite.convert.adopt.report import nested
from megalite.convert.adopt.rule_table import read_table
from megalite.convert.adopt.rules import (
    KeyRule,
    Reading,
    Take,
    Together,
    computed,
    number,
    switch,
    text,
    whole,
)
from megalite.convert.adopt.sink_keys import sink_keys
from megalite.convert.adopt.sources import Source

_EXTRA = "deepspeed_extra_args."
_BLOCKS = BLOCKS | {"optimizer", "optimizer.params", "deepspeed_extra_args"}
_STRUCTURES = frozenset(
    f"{kind}_data_{part}" for kind in ("train", "valid") for part in ("paths", "weights")
) | {"attention_config", "optimizer.params.betas", *NAMES}


def _steps(value: Any) -> int:
    steps = whole(value)
    if steps < 1:
        raise ValueError(f"{value!r} is no number of steps")
    return steps


def _stages(value: Any) -> int:
    return max(1, whole(value))


def _read_dropout(reading: Reading, key: str, value: Any) -> None:
    probability = number(value)
    reading.take(key, {"model.residual_dropout": probability, "model.embedding_dropout": probability})


def _read_training_kind(reading: Reading, key: str, value: Any) -> None:
    """train_impl and dataset_impl: text or DPO."""
    if value in ("normal", "gpt2"):
        reading.take(key, {}, "text")
    elif value in ("dpo", "pairwise") and reading.get("train_impl") == "dpo":
        reading.take(key, {"data.kind": "preference"})
    else:
        reading.refuse(key, "megalite trains on text, conversations and preferences (DPO)", "leave it out")


def _read_hostfile(reading: Reading, key: str, value: Any) -> None:
    reading.account.launch.append(f"--{key} {quote(text(value))}")
    reading.take(key, {}, f"megalite launch --{key}")


def _read_ranks(reading: Reading, key: str, value: Any) -> None:
    reading.account.ranks = whole(value)
    reading.take(key, {}, "the number of ranks")


def _read_deepspeed(reading: Reading, key: str, value: Any) -> None:
    """DeepSpeed's keys among the others, all of them with the first."""
    own = {name: inner for name, inner in reading.keys.items() if RULES.get(name) is _DEEPSPEED}
    for name in [name for name in own if name.startswith(("fp16.", "bf16.enabled", "bfloat16.enabled"))]:
        if name.startswith("fp16.") and name != "fp16.enabled" and not neox_run.is_fp16(reading):
            reading.no_effect(name, "only fp16 has a loss scale")
        elif name.endswith(".enabled") and not switch(own[name]):
            reading.no_effect(name, "it is off")
        elif name == "fp16.enabled" and not neox_run.is_fp16(reading):
            reading.take(name, {"training.precision": "bf16"}, "fp16.type is bfloat16")
        else:
            continue
        del own[name]
    reading.answered.update(own)
    answer_keys(reading.account, nested(own), own, lambda path: reading.names.get(path, path))


def _fill(reading: Reading) -> None:
    complete(reading, neox_model.fill_model_defaults, neox_model.choose_family, neox_run.fill_run_defaults)
    neox_run.report_missing(reading)


_DEEPSPEED = Together(_read_deepspeed)
RULES: Mapping[str, KeyRule] = {
    **dict.fromkeys(NAMES, _DEEPSPEED),
    **read_table(__file__),
    **computed(
        {
            _read_dropout: "hidden_dropout",
            neox_model.read_activation: "activation",
            neox_model.read_gelu_fusion: "bias_gelu_fusion",
            neox_model.read_width: "intermediate_size expansion_factor mlp_multiple_of",
            neox_model.read_epsilon: "layernorm_epsilon rms_norm_epsilon",
            neox_model.read_norm_bias: "use_bias_in_norms",
            neox_model.read_blocks: "gpt_j_residual gpt_j_tied",
            neox_model.read_rotation: "rotary_pct rotary_emb_base",
            neox_model.read_attention: "attention_config",
            neox_model.read_initial: "init_method output_layer_init_method init_method_std",
            neox_run.read_gas: "gas",
            neox_run.read_optimizer: "optimizer.type",
            neox_run.read_parameter: """
                optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
                optimizer.params.momentum optimizer.params.freeze_step optimizer.params.cuda_aware
                optimizer.params.bias_correction optimizer.params.adam_w_mode""",
            neox_run.read_decay: "lr_decay_style min_lr",
            neox_run.read_warmup: "warmup",
            neox_run.read_decay_length: "lr_decay_iters lr_decay_fraction",
            _read_training_kind: "train_impl dataset_impl",
            neox_run.read_paths: "train_data_paths train_data_weights valid_data_paths valid_data_weights",
            neox_run.read_split: "split",
            neox_run.read_tokenizer: "tokenizer_type vocab_file merge_file",
            answer_output: "save",
            _read_ranks: "global_num_gpus",
            neox_run.read_load: "load finetune no_load_optim no_load_rng",
            neox_run.read_saving: "checkpoint_factor checkpoint_scale",
            neox_run.read_evaluation: "eval_interval eval_iters",
            _read_hostfile: "hostfile include exclude",
        }
    ),
    "sliding_window_width": Take(
        "model.sliding_window", lambda value: whole(value) + 1, "GPT-NeoX counts the keys before the token"
    ),
    "train_iters": Take("training.steps", _steps),
    "pipe_parallel_size": Take("parallel.pipeline", _stages),
    "model_parallel_size": Take("parallel.tensor", _stages),
    **sink_keys(
        {"tensorboard_dir": "tensorboard", "use_wandb": "wandb"},
        {
            "wandb_project": "monitor.project",
            "wandb_run_name": "monitor.run_name",
            "wandb_team": "monitor.entity",
            "wandb_group": "monitor.group",
        },
    ),
}
"""Key of GPT-NeoX or DeepSpeed, tables with dots -> its rule."""


class _Neox(KeyedSystem):
    def read(self, sources: Sequence[Source]) -> Account:
        hostfiles = [source for source in sources if source.suffix not in MAPPINGS and is_hostfile(source)]
        own = [source for source in sources if source not in hostfiles]
        reading, unset = read_files(self.name, own, self.blocks, hyphens=True)
        reading = answer_all(_with_extra_arguments(reading), unset, self.rules, self.structures)
        self.fill(reading)
        answer_launcher(reading.account, [], hostfiles)
        return reading.account


def _with_extra_arguments(reading: Reading) -> Reading:
    """Return the keys with those of deepspeed_extra_args among the others, as DeepSpeed gets them."""
    keys: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in reading.keys.items():
        inner = key.removeprefix(_EXTRA)
        name = key if inner in reading.keys else inner
        keys[name] = value
        names[name] = reading.names[key]
    return Reading(reading.account, keys, names)


SYSTEM = _Neox(
    "GPT-NeoX", RULES, _STRUCTURES, _fill, _BLOCKS | {_EXTRA + block for block in BLOCKS}, hyphens=True
)
