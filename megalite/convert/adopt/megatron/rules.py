"""Megatron-LM's and Megatron-DeepSpeed's arguments -> what becomes of them. Names without the two hyphens."""

from collections.abc import Mapping
from math import log2
from typing import Any

from megalite.convert.adopt.megatron import data, length
from megalite.convert.adopt.megatron.experts import expert_defaults, read_expert_argument
from megalite.convert.adopt.megatron.model import MODEL_ARGUMENTS, answer_model
from megalite.convert.adopt.rule_table import read_table
from megalite.convert.adopt.rules import Change, KeyRule, Reading, Take, Together, computed, number, whole
from megalite.convert.adopt.sink_keys import sink_keys

RENAMED = {
    "layernorm-epsilon": "norm-epsilon",
    "encoder-seq-length": "seq-length",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "rotary-position-embeddings-theta": "rotary-base",
    "checkpoint-activations": "recompute-activations-fully",
    "disable-moe-token-dropping": "moe-token-dropping",
}
"""Names of Megatron-DeepSpeed and of older versions -> today's, where the meaning is the same."""
SEVERAL = ("data-path", "train-data-path", "valid-data-path", "test-data-path")
"""Arguments that take a list of words."""
_BETAS = {"adam": (0.9, 0.999), "lion": (0.95, 0.98)}
_CONTEXT_METHODS = {"p2p": "ring", "all_gather": "gather", "a2a": "ulysses"}
_DROPOUT = "Megatron-LM's default; 0 here"


def _model(reading: Reading, key: str, value: Any) -> None:
    answer_model(reading)


def _experts(reading: Reading, key: str, value: Any) -> None:
    if reading.has("num-experts") and "num-experts" not in reading.answered:
        answer_model(reading)
    read_expert_argument(reading, key, value)


def _betas(reading: Reading, key: str, value: Any) -> None:
    """--adam-beta1 and 2, --lion-beta1 and 2, of which either may be missing."""
    optimizer = key.partition("-")[0]
    if reading.get("optimizer", "adam") != optimizer:
        reading.no_effect(key, f"the optimizer is not {optimizer}")
        return
    names = (f"{optimizer}-beta1", f"{optimizer}-beta2")
    defaults = zip(names, _BETAS[optimizer], strict=True)
    betas = [number(reading.get(name, default)) for name, default in defaults]
    for name in names:
        reading.take(name, {"optimizer.betas": betas})


def _clipping(reading: Reading, key: str, value: Any) -> None:
    if reading.is_on("deepspeed"):
        reading.no_effect(
            key, "with --deepspeed, gradient_clipping of its JSON counts, 1.0 where it is silent"
        )
    else:
        reading.take(key, {"optimizer.gradient_clipping": number(value)})


def _epsilon(reading: Reading, key: str, value: Any) -> None:
    if reading.get("optimizer", "adam") == "adam":
        reading.take(key, {"optimizer.eps": number(value)})
    else:
        reading.no_effect(key, "the optimizer is not adam")


def _momentum(reading: Reading, key: str, value: Any) -> None:
    if reading.get("optimizer") == "sgd":
        reading.take(key, {"optimizer.momentum": number(value)})
    else:
        reading.no_effect(key, "the optimizer is not sgd")


def _decay_over_time(reading: Reading, key: str, value: Any) -> None:
    first, last = reading.get("start-weight-decay"), reading.get("end-weight-decay")
    if first is None and last is None and value == "constant":
        reading.no_effect(key, "the weight decay stays the same")
    elif reading.get("weight-decay-incr-style", "constant") == "constant" or first == last:
        constant = first if first is not None else last
        for name in ("start-weight-decay", "end-weight-decay"):
            reading.take(name, {"optimizer.weight_decay": number(constant)})
        reading.no_effect("weight-decay-incr-style", "the weight decay stays the same")
    else:
        for name in ("start-weight-decay", "end-weight-decay", "weight-decay-incr-style"):
            if reading.has(name):
                reading.refuse(name, "megalite keeps one weight decay", "set optimizer.weight_decay")


def _loss_scale(reading: Reading, key: str, value: Any) -> None:
    if not reading.is_on("fp16"):
        reading.no_effect(key, "only fp16 has a loss scale")
    elif reading.is_on("deepspeed"):
        reading.no_effect(key, "with --deepspeed, fp16 of its JSON says the loss scale")
    elif key == "loss-scale":
        reading.take(key, {"training.loss_scale": number(value)})
    elif key == "initial-loss-scale":
        power = round(log2(max(1.0, number(value))))
        same = 2.0**power == number(value)
        report = reading.take if same else reading.change
        report(key, {"training.initial_loss_scale_power": power}, "" if same else "the nearest power of two")
    elif key == "min-loss-scale":
        note = "an overflow at this scale ends the run here; there the scale stays"
        reading.change(key, {"training.minimum_loss_scale": whole(value)}, note)
    else:
        name = "loss_scale_window" if key == "loss-scale-window" else "loss_scale_hysteresis"
        reading.take(key, {f"training.{name}": whole(value)})


def _sequence(reading: Reading, key: str, value: Any) -> None:
    if whole(reading.get("tensor-model-parallel-size", 1)) == 1:
        reading.no_effect(key, "Megatron-LM switches it off without tensor parallelism too")
    else:
        reading.take(key, {"parallel.sequence": True})


def _ulysses(reading: Reading, key: str, value: Any) -> None:
    size = whole(value)
    reading.take(
        key, {"parallel.context": size} | ({"parallel.context_method": "ulysses"} if size > 1 else {})
    )


def _context_method(reading: Reading, key: str, value: Any) -> None:
    if whole(reading.get("context-parallel-size", 1)) == 1:
        reading.no_effect(key, "there is one context rank")
    elif value in _CONTEXT_METHODS:
        reading.take(key, {"parallel.context_method": _CONTEXT_METHODS[value]})
    else:
        remedy = 'set parallel.context_method = "auto"'
        reading.refuse(key, "all layers and ranks exchange alike here", remedy, numbers=False)


def _pipeline(reading: Reading, key: str, value: Any) -> None:
    if reading.is_on("no-pipeline-parallel"):
        reading.take("no-pipeline-parallel", {"parallel.pipeline": 1})
        reading.no_effect("pipeline-model-parallel-size", "--no-pipeline-parallel counts")
    else:
        reading.take(key, {"parallel.pipeline": whole(value)})


def _virtual(reading: Reading, key: str, value: Any) -> None:
    stages = whole(reading.get("pipeline-model-parallel-size", 1))
    if stages < 2:
        reading.no_effect(key, "there is one pipeline stage")
        return
    chunks = whole(value)
    if key == "num-layers-per-virtual-pipeline-stage":
        per_stage, rest = divmod(whole(reading.get("num-layers", 0)), stages)
        if not chunks or rest or per_stage % chunks:
            raise ValueError("does not divide the layers of a stage")
        chunks = per_stage // chunks
    schedule = {"parallel.schedule": "interleaved_1f1b", "parallel.virtual_stages": chunks}
    reading.take(key, schedule if chunks > 1 else {})


def _uneven_stages(reading: Reading, key: str, value: Any) -> None:
    layers, stages = (
        whole(reading.get("num-layers", 0)),
        whole(reading.get("pipeline-model-parallel-size", 1)),
    )
    first, last = (reading.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    ends = [None if end is None else whole(end) for end in (first, last)]
    between = stages - sum(end is not None for end in ends)
    share, rest = divmod(layers - sum(end or 0 for end in ends), between) if between > 0 else (0, 1)
    if rest or share < 1:
        raise ValueError("does not divide the layers of the other stages")
    split = [end for end in ends[:1] if end is not None] + [share] * between
    split += [end for end in ends[1:] if end is not None]
    for name in ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"):
        reading.take(name, {"parallel.layers_per_stage": split})


def _recompute(reading: Reading, key: str, value: Any) -> None:
    """Recomputation changes memory and time alone: all of its arguments are read together."""
    full = reading.is_on("recompute-activations-fully") or reading.get("recompute-granularity") == "full"
    selective = reading.is_on("recompute-activations") or reading.get("recompute-granularity") == "selective"
    mode = {"training.recompute": "full" if full else "selective"} if full or selective else {}
    for name in ("recompute-activations-fully", "recompute-activations", "recompute-granularity"):
        reading.take(name, mode)
    if not full:
        for name in ("recompute-method", "recompute-num-layers"):
            reading.no_effect(name, "only full recomputation has it")
    elif reading.get("recompute-method") == "block" and reading.has("recompute-num-layers"):
        reading.take("recompute-method", {})
        reading.take(
            "recompute-num-layers", {"training.recompute_layers": whole(reading.get("recompute-num-layers"))}
        )
    else:
        for name in ("recompute-method", "recompute-num-layers"):
            reading.no_effect(name, "each layer is recomputed by itself; the numbers stay the same")


def _distributed_optimizer(reading: Reading, key: str, value: Any) -> None:
    if reading.is_on("deepspeed"):
        reading.no_effect(key, "--deepspeed shards the optimizer")
        return
    reading.change(
        key, {"deepspeed.zero_optimization.stage": 1}, "sharded by DeepSpeed's ZeRO 1; the same numbers"
    )


def _zero(reading: Reading, key: str, value: Any) -> None:
    stage = whole(value)
    if not reading.is_on("deepspeed"):
        reading.no_effect(key, "--deepspeed is off")
    elif stage in (0, 1, 2, 3):
        reading.take(key, {"deepspeed.zero_optimization.stage": stage} if stage else {})
    else:
        raise ValueError(f"{stage} is no ZeRO stage")


def _hidden_dropout(reading: Reading, key: str, value: Any) -> None:
    rate = number(value)
    reading.take(key, {"model.residual_dropout": rate, "model.embedding_dropout": rate})


_TABLE = read_table(__file__)
PREFIXES = {key[:-1]: _TABLE.pop(key) for key in [*_TABLE] if key.endswith("*")}
PREFIXES |= dict.fromkeys(("moe-", "expert-"), Together(_experts))
"""Prefix -> rule of the arguments that begin with it, unless they have a rule of their own."""
RULES: Mapping[str, KeyRule] = {
    **_TABLE,
    **computed(
        {
            _model: " ".join(MODEL_ARGUMENTS),
            _hidden_dropout: "hidden-dropout",
            _pipeline: "pipeline-model-parallel-size no-pipeline-parallel",
            _sequence: "sequence-parallel",
            _ulysses: "ds-sequence-parallel-size",
            _context_method: "cp-comm-type",
            _virtual: "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank",
            _uneven_stages: "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers",
            _distributed_optimizer: "use-distributed-optimizer",
            _zero: "zero-stage",
            length.read_length: "train-iters train-samples train-tokens",
            length.read_decay_end: "lr-decay-iters lr-decay-samples lr-decay-tokens",
            length.read_warm_up: "lr-warmup-iters lr-warmup-samples lr-warmup-tokens lr-warmup-fraction",
            length.read_style: "lr-decay-style",
            length.read_wsd_part: "lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples",
            length.read_minimum: "min-lr",
            _decay_over_time: "start-weight-decay end-weight-decay weight-decay-incr-style",
            _betas: "adam-beta1 adam-beta2 lion-beta1 lion-beta2",
            _epsilon: "adam-eps",
            _momentum: "sgd-momentum",
            _clipping: "clip-grad",
            _loss_scale: "loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis",
            _recompute: """
                recompute-activations-fully recompute-activations recompute-granularity recompute-method
                recompute-num-layers""",
            data.read_data: "data-path train-data-path valid-data-path",
            data.read_split: "split",
            data.read_document_mask: "reset-attention-mask reset-position-ids dataloader-inter-document-masking",
            data.read_tokenizer: "tokenizer-type tokenizer-model vocab-file merge-file",
            data.read_vocabulary: "vocab-size padded-vocab-size make-vocab-size-divisible-by",
            data.read_save_and_load: "save load pretrained-checkpoint",
            data.read_validation: "eval-interval eval-iters",
        }
    ),
    "grad-reduce-in-bf16": Change(
        "training.accumulation", lambda _: "fp32", "here in fp32, which is more exact"
    ),
    **sink_keys(
        {"tensorboard-dir": "tensorboard", "wandb-project": "wandb"},
        {
            "wandb-project": "monitor.project",
            "wandb-exp-name": "monitor.run_name",
            "wandb-entity": "monitor.entity",
        },
    ),
    "exit-duration-in-mins": Take("training.stop_after", lambda value: f"{whole(value)}m"),
    "seed": Change(
        "run.seed", whole, "the same order of samples; initial weights and dropout are other random numbers"
    ),
}
"""Argument of Megatron-LM or Megatron-DeepSpeed, without its hyphens -> its rule."""


def with_prefixes(keys: Mapping[str, Any]) -> dict[str, KeyRule]:
    """Return the rules of RULES and those of keys that begin with one of PREFIXES."""
    rules = dict(RULES)
    for key in keys:
        prefix = next((start for start in PREFIXES if key.startswith(start)), None)
        if key not in rules and prefix is not None:
            rules[key] = PREFIXES[prefix]
    return rules


def answer_defaults(reading: Reading) -> None:
    """Write out Megatron-LM's defaults that differ from ours, and name the differences that no setting removes."""
    account = reading.account
    length.length_defaults(reading)
    optimizer = reading.get("optimizer", "adam")
    if optimizer == "sgd":
        account.default("optimizer.momentum", 0.9, "Megatron-LM's default of --sgd-momentum; 0 here")
    elif optimizer in _BETAS:
        reason = f"Megatron-LM's defaults of --{optimizer}-beta1 and 2; 0.9, 0.95 here"
        account.default("optimizer.betas", list(_BETAS[optimizer]), reason)
    account.default("optimizer.weight_decay", 0.01, "Megatron-LM's default of --weight-decay; 0.1 here")
    account.default("optimizer.gradient_clipping", 1.0, "Megatron-LM's default of --clip-grad, as here")
    if (
        "training.micro_batch_size" in account.settings
        and "training.global_batch_size" not in account.settings
    ):
        reason = "Megatron-LM's default of --global-batch-size is one micro batch of each replica"
        account.default("training.micro_batches", 1, reason)
    account.default("model.attention_dropout", 0.1, _DROPOUT)
    account.default("model.residual_dropout", 0.1, _DROPOUT)
    account.default("model.embedding_dropout", 0.1, _DROPOUT)
    data.data_defaults(reading)
    expert_defaults(reading)
    account.default(
        "training.precision", "fp32", "Megatron-LM's default; the fastest that is exact enough here"
    )
    if account.settings["training.precision"] == "fp16" and not reading.is_on("deepspeed"):
        account.default(
            "training.initial_loss_scale_power", 32, "Megatron-LM begins at 2 to the power 32; 16 here"
        )
        account.default("training.loss_scale_hysteresis", 2, "Megatron-LM's default of --hysteresis; 1 here")
    if reading.is_on("fp16") and not reading.has("accumulate-allreduce-grads-in-fp32"):
        account.note(
            "gradients are summed in fp16 there without --accumulate-allreduce-grads-in-fp32, in fp32 here"
        )
    for note in _NOTES:
        account.note(note)


_NOTES = (
    "initial values have the same distribution (--init-method-std, divided by sqrt(2 * layers) in the two output"
    " projections of a layer), but are other numbers",
    "weight decay: norms and biases have none, embeddings have it, as in Megatron-LM",
    "loss: the mean over all tokens of the global batch; Megatron-LM without --calculate-per-token-loss takes the mean"
    " of the micro batches' means: the same unless micro batches have unequal numbers of unmasked tokens",
    "samples: those of megatron-core's GPTDataset in its order (data.order); Megatron-DeepSpeed and older versions"
    " of Megatron-LM round splits and count epochs in other ways",
    "vocabulary: Megatron-LM pads it to a multiple of --make-vocab-size-divisible-by (128) * tensor-parallel size, and"
    " its softmax includes the padding rows; megalite pads nothing",
)
