"""The args of a Megatron-LM or Megatron-DeepSpeed checkpoint, answered by the table of their command line. No torch.

The args hold every argument, by its `dest` of argparse and with its type; most are at their defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.convert.adopt.account import Account, KeyAnswer, Outcome
from megalite.convert.adopt.launchers import set_data_parallel_size
from megalite.convert.adopt.megatron.arguments import answer_arguments, argument_key
from megalite.convert.adopt.megatron.rules import SEVERAL, answer_defaults, with_prefixes
from megalite.convert.adopt.rules import Reading, Refuse
from megalite.convert.adopt.shell.expand import as_source

_DERIVED = (
    *("allow_transformer_engine", "compression_training", "consumed_train_bins", "consumed_train_samples"),
    *("consumed_train_tokens", "consumed_valid_samples", "curr_iteration", "curriculum_seqlen"),
    *("data_efficiency_curriculum_learning_numel", "data_efficiency_curriculum_learning_seqlen_type"),
    *("data_parallel_size", "deepspeed_config_dict", "deepspeed_configuration", "do_test", "do_train"),
    *("do_valid", "encoder_num_layers", "encoder_seq_length", "iteration", "model_type", "modelopt_enabled"),
    *("num_floating_point_operations_so_far", "padded_vocab_size", "params_dtype", "random_ltd_layer_num"),
    *("rank", "skipped_train_samples", "stream_ckpt_dequant", "to_test", "total_model_size"),
    *("transformer_pipeline_model_parallel_size", "use_gloo_process_groups", "vocab_size", "world_size"),
    *("use_layer_wise_distributed_optimizer", "_is_global_batch_size_explicitly_specified"),
)
"""Arguments that the program itself computes or counts."""
_RENAMED = {
    "barrier_with_L1_time": "no-barrier-with-level-1-timing",
    "bert_binary_head": "bert-no-binary-head",
    "fp8": "fp8-format",
    "logit_dtype": "output-logit-dtype",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "muon_split_qkv": "muon-no-split-qkv",
    "nccl_ub": "use-nccl-ub",
    "offset_sampling_seed_by_dp_rank": "use-same-sampling-seed-across-dp-ranks",
    "overlap_p2p_comm_warmup_flush": "overlap-p2p-communication-warmup-flush",
    "log_learning_rate_to_tensorboard": "no-log-learnig-rate-to-tensorboard",
    "rope_theta": "rotary-base",
    "torch_fsdp2_reshard_after_forward": "torch-fsdp2-no-reshard-after-forward",
}
"""dest -> argument, where the rules below do not give it."""
_DTYPES = ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


@dataclass
class _Arguments:
    """keys: as on a command line. names: key -> its dest. unset, derived: dests that say nothing."""

    keys: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)


def answer_namespace(account: Account, table: Mapping[str, Any], *, deepspeed_json: bool = False) -> Reading:
    """Answer every argument of a checkpoint's args, and set what they imply.

    table: dest -> plain value. deepspeed_json: whether DeepSpeed's JSON is answered too, which then says the stage.
    """
    arguments = _as_typed(table, deepspeed_json=deepspeed_json)
    _count(account, arguments.unset, "are None, False or empty, as where a script leaves them out")
    _count(account, arguments.derived, "are computed or counted by the program itself")
    reading = answer_arguments(account, arguments.keys, arguments.names)
    ranks = table.get("world_size")
    if isinstance(ranks, int) and 0 < ranks < 1 << 20:
        account.ranks = ranks
    answer_defaults(reading)
    set_data_parallel_size(account)
    return reading


def group_idle(account: Account) -> None:
    """Answer the keys without effect in one line for each reason."""
    by_reason: dict[str, list[KeyAnswer]] = {}
    for answer in account.with_outcome(Outcome.NO_EFFECT):
        by_reason.setdefault(answer.reason, []).append(answer)
    account.answers = [answer for answer in account.answers if answer.outcome is not Outcome.NO_EFFECT]
    for reason, answers in by_reason.items():
        if len(answers) == 1:
            account.answers += answers
        else:
            _count(account, [answer.key for answer in answers], reason)


def _count(account: Account, names: list[str], reason: str) -> None:
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        account.answers.append(
            KeyAnswer(f"{len(names)} arguments ({some})", None, Outcome.NO_EFFECT, {}, reason)
        )


def _as_typed(table: Mapping[str, Any], *, deepspeed_json: bool) -> _Arguments:
    """Return the arguments of a command line that gives these args."""
    arguments = _Arguments()
    for dest, value in table.items():
        if _is_derived(dest, table) or (deepspeed_json and dest == "zero_stage"):
            arguments.derived.append(dest)
            continue
        key, negative = _flag_of(dest, value)
        if negative:
            value = value is False
        if key in _DTYPES and value == "fp32":
            value = None
        if _is_off(key, value):
            arguments.unset.append(dest)
            continue
        arguments.names[key] = dest
        arguments.keys[key] = None if value is True else _words(key, value)
    return arguments


def _is_derived(dest: str, table: Mapping[str, Any]) -> bool:
    if dest == "virtual_pipeline_model_parallel_size":
        return any(table.get(name) for name in _VIRTUAL)
    return dest in _DERIVED or dest.endswith("_deprecated") or dest.startswith("deprecated_")


def _flag_of(dest: str, value: Any) -> tuple[str, bool]:
    """Return the argument of a dest without its hyphens, and whether it is one that switches off (--no-..., )."""
    if dest == "virtual_pipeline_model_parallel_size":
        return "num-virtual-stages-per-pipeline-rank", False
    key = _RENAMED.get(dest) or argument_key(dest)
    if _is_known(key):
        return key, dest in _RENAMED and ("no-" in key or dest.startswith("offset_"))
    rest = key.partition("-")[2]
    opposites = (f"no-{key}", f"disable-{key}", f"no-{rest}", f"disable-{rest}")
    opposite = next((name for name in opposites if _is_known(name)), None)
    return (opposite, True) if opposite and isinstance(value, bool | None) else (key, False)


def _is_off(key: str, value: Any) -> bool:
    zero = value == 0 and isinstance(with_prefixes({key: None}).get(key), Refuse)
    return value is None or value is False or value in ([], {}, "") or zero


def _is_known(key: str) -> bool:
    return key in with_prefixes({key: None})


def _words(key: str, value: Any) -> str | list[str]:
    """Return a value as a script would have it."""
    if isinstance(value, list) and key == "window-size":
        return ",".join(map(str, value))
    if isinstance(value, list):
        words = [as_source(str(word)) for word in value]
        return words if key in SEVERAL or len(words) > 1 else words[0]
    return as_source(str(value))
