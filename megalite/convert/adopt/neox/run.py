"""GPT-NeoX's keys that describe the run together: optimizer, learning rate, data, tokenizer, checkpoints."""

from math import floor
from pathlib import PurePath
from typing import Any

from megalite.convert.adopt.continued import answer_resume, begins_anew
from megalite.convert.adopt.keyed.keyed_file import require
from megalite.convert.adopt.rules import Reading, number, text, whole

_NEOX = "GPT-NeoX's default"
_WARMUP = (
    "warm-up: GPT-NeoX repeats its first rate once, so every rate of the warm-up comes a step earlier here"
)


def is_fp16(reading: Reading) -> bool:
    """Return whether the fp16 block is on and means fp16; DeeperSpeed chose bf16 by fp16.type."""
    on = reading.is_on("fp16.enabled") or reading.get("precision") == "fp16"
    return on and reading.get("fp16.type") != "bfloat16"


def read_optimizer(reading: Reading, key: str, value: Any) -> None:
    kind = str(value).lower()
    if kind in ("adam", "cpu_adam", "cpu_torch_adam"):
        reading.take(key, {"optimizer.name": "adamw"}, "GPT-NeoX's Adam decays the weights as AdamW does")
    elif kind == "lion":
        reading.take(key, {"optimizer.name": "lion"})
    else:
        reading.refuse(key, "megalite has no such optimizer here", "use Adam or Lion")


def read_parameter(reading: Reading, key: str, value: Any) -> None:
    """optimizer.params.*: weight_decay stands at the top level in GPT-NeoX."""
    name = key.rpartition(".")[2]
    lion = str(reading.get("optimizer.type", "")).lower() == "lion"
    if name == "lr":
        reading.take(key, {"optimizer.learning_rate": number(value)})
    elif name == "betas" and isinstance(value, list) and len(value) == 2:
        reading.take(key, {"optimizer.betas": [number(beta) for beta in value]})
    elif name == "eps" and not lion:
        reading.take(key, {"optimizer.eps": number(value)})
    elif name == "weight_decay":
        reading.refuse(
            key, "GPT-NeoX gives its optimizer weight_decay of the top level too", "delete one of the two"
        )
    else:
        reading.no_effect(key, "megalite's optimizer has no such option")


def read_decay(reading: Reading, key: str, value: Any) -> None:
    """lr_decay_style and min_lr: GPT-NeoX's line falls to 0 and stops at min_lr."""
    style = reading.get("lr_decay_style", "linear")
    if style not in ("linear", "cosine", "constant"):
        reading.refuse(
            "lr_decay_style", "megalite has no such decay", "it has cosine, linear, constant and wsd"
        )
        reading.no_effect("min_lr", "it belongs to lr_decay_style")
        return
    rate = number(reading.get("optimizer.params.lr", 0))
    least = number(reading.get("min_lr", 0.0))
    if rate <= 0 or not 0 <= least <= rate:
        raise ValueError("needs a learning rate (optimizer.params.lr) that is not below min_lr")
    if key == "lr_decay_style":
        reading.take(key, {"optimizer.schedule": style})
    elif style == "linear" and least:
        reason = (
            "GPT-NeoX's line falls to 0 and stops at min_lr; megalite's ends at min_lr with the last step"
        )
        reading.change(key, {"optimizer.minimum_ratio": least / rate}, reason)
    else:
        reading.take(key, {"optimizer.minimum_ratio": least / rate})


def read_warmup(reading: Reading, key: str, value: Any) -> None:
    share, steps = number(value), _decay_steps(reading)
    if not 0 <= share < 1:
        raise ValueError(f"{value!r} is no fraction of the steps")
    if steps is None:
        reading.take(key, {"optimizer.warmup_ratio": share}, "of the steps, whose number the data decide")
    elif abs(share * steps - round(share * steps)) < 1e-6:
        reading.take(key, {"optimizer.warmup_steps": round(share * steps)})
    else:
        count = round(share * steps)
        reading.change(
            key, {"optimizer.warmup_steps": count}, f"GPT-NeoX warms up for {share * steps:g} steps"
        )
    if share:
        reading.account.note(_WARMUP)


def _decay_steps(reading: Reading) -> int | None:
    if reading.has("lr_decay_iters"):
        return whole(reading.get("lr_decay_iters"))
    if not reading.has("train_iters"):
        return None
    return floor(whole(reading.get("train_iters")) * number(reading.get("lr_decay_fraction", 1)))


def read_decay_length(reading: Reading, key: str, value: Any) -> None:
    if key == "lr_decay_fraction" and reading.has("lr_decay_iters"):
        reading.no_effect(key, "lr_decay_iters takes precedence")
    elif (steps := _decay_steps(reading)) is None:
        reading.refuse(key, "megalite has it in steps alone", "set training.steps and optimizer.decay_steps")
    else:
        reading.take(key, {"optimizer.decay_steps": steps})


def read_paths(reading: Reading, key: str, value: Any) -> None:
    """train_data_paths with train_data_weights, valid_data_paths with valid_data_weights."""
    kind = key.split("_")[0]
    paths, weights = reading.get(f"{kind}_data_paths"), reading.get(f"{kind}_data_weights")
    if not isinstance(paths, list) or not paths:
        reading.refuse(key, f"{kind}_data_paths is no list of paths", "name prefixes of .bin and .idx files")
        return
    numbers = [number(weight) for weight in weights] if isinstance(weights, list) else [1.0] * len(paths)
    if len(numbers) != len(paths):
        raise ValueError(f"{len(numbers)} weights for {len(paths)} paths")
    names = [text(path) for path in paths]
    setting = "data.source" if kind == "train" else "data.validation"
    if kind == "valid" and names == reading.get("train_data_paths"):
        reading.refuse(key, "names the training text", "name other text, or set data.split", numbers=False)
        return
    if len(set(names)) == 1:
        reading.take(key, {setting: names[0]} if key.endswith("paths") else {}, "a single data set")
    elif kind == "train":
        blend = [{"source": name, "weight": weight} for name, weight in zip(names, numbers, strict=True)]
        reading.take(key, {"data.blend": blend})
    elif key.endswith("paths"):
        reading.take(key, {setting: names})
    else:
        reading.change(key, {}, "megalite validates on all of the validation text")


def read_split(reading: Reading, key: str, value: Any) -> None:
    shares = [number(share) for share in str(value).replace("/", ",").split(",")]
    shares += [0.0] * (3 - len(shares))
    if len(shares) > 3 or min(shares) < 0 or not sum(shares):
        raise ValueError(f"{value!r} should be three shares, as in 969,30,1")
    if not reading.has("data_path"):
        reading.no_effect(key, "it divides data_path, which is not set")
        return
    # Rounded so that the shares of a file with round numbers stay readable; they add up to 1 within 1e-6.
    reading.take(key, {"data.split": [round(share / sum(shares), 9) for share in shares]})


def read_tokenizer(reading: Reading, key: str, value: Any) -> None:
    """tokenizer_type, vocab_file and merge_file."""
    kind = reading.get("tokenizer_type", "GPT2BPETokenizer")
    vocabulary = reading.get("vocab_file")
    known = {
        name.lower(): name for name in ("GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer")
    }
    name = known.get(str(kind).lower())
    if name is None:
        remedy = "name a tokenizer.json, a sentencepiece model or a folder of vocab.json as tokenizer.path"
        reading.refuse(key, f"megalite cannot read a {kind}", remedy)
    elif vocabulary is None:
        reading.no_effect(
            key, "no vocab_file is named: set tokenizer.path, or model.vocab_size for .bin files"
        )
    elif name != "GPT2BPETokenizer" and key == "merge_file":
        reading.no_effect(key, f"a {name} has no such file")
    elif name == "GPT2BPETokenizer":
        folder = str(PurePath(text(vocabulary)).parent)
        reason = "megalite reads the folder: name the two files vocab.json and merges.txt there"
        reading.change(key, {"tokenizer.path": folder}, reason)
    else:
        reading.take(key, {"tokenizer.path": text(vocabulary)})


def read_load(reading: Reading, key: str, value: Any) -> None:
    """load and finetune: a run that goes on finds its own checkpoints; others are imported first."""
    load = reading.get("load")
    if load is None:
        reading.no_effect(key, "no load is named")
    elif key != "load":
        reading.no_effect(key, "it says how load is read, which has the answer")
    elif begins_anew(reading, load, reading.get("save"), "no_load_optim"):
        remedy = f"megalite convert export {load} FOLDER, then set model.weights to FOLDER"
        reading.refuse(key, "a new run begins from GPT-NeoX's weights", remedy)
    else:
        answer_resume(reading, key, text(load), reading.get("save"))


def read_gas(reading: Reading, key: str, value: Any) -> None:
    """gas: releases until February 2024 overwrite it with gradient_accumulation_steps, later ones do not know it."""
    steps = whole(reading.get("gradient_accumulation_steps", 1))
    if whole(value) == steps:
        reading.no_effect(key, f"GPT-NeoX accumulates by gradient_accumulation_steps, which is {steps} too")
    elif reading.has("train_batch_size") and not reading.has("gradient_accumulation_steps"):
        reading.no_effect(key, "GPT-NeoX derives the accumulation from train_batch_size")
    else:
        reason = f"GPT-NeoX never uses it: it accumulates by gradient_accumulation_steps, which is {steps}"
        remedy = f"remove it for {steps}, or write gradient_accumulation_steps: {whole(value)} for its value"
        reading.refuse(key, reason, remedy)


def read_saving(reading: Reading, key: str, value: Any) -> None:
    """checkpoint_factor with checkpoint_scale."""
    if reading.get("checkpoint_scale", "linear") != "linear":
        reading.refuse(key, "megalite saves at equal distances", "set checkpoint.every", numbers=False)
    elif key == "checkpoint_scale":
        reading.take(key, {}, "at equal distances")
    else:
        reading.take(key, {"checkpoint.every": whole(value)})


def read_evaluation(reading: Reading, key: str, value: Any) -> None:
    count = whole(value)
    if count == 0 or not (reading.has("data_path") or reading.has("valid_data_paths")):
        reading.no_effect(key, "there is no validation text" if count else "it is 0")
    elif key == "eval_interval":
        reading.take(key, {"validation.every": count})
    else:
        size = whole(reading.get("train_micro_batch_size_per_gpu", 1)) * whole(
            reading.get("gradient_accumulation_steps", 1)
        )
        reason = (
            "megalite counts sequences; this is one replica's share, multiply it by the data-parallel size"
        )
        reading.change(key, {"validation.samples": count * size}, reason)


def fill_run_defaults(reading: Reading) -> None:
    """Set what NeoX's defaults say of the run where no key does."""
    account = reading.account
    lion = account.settings.get("optimizer.name") == "lion"
    rate = account.settings.get("optimizer.learning_rate")
    defaults: dict[str, Any] = {
        "optimizer.name": "adamw",
        "optimizer.betas": [0.9, 0.99] if lion else [0.9, 0.999],
        "optimizer.weight_decay": 0.1,
        "optimizer.gradient_clipping": 1.0,
        "optimizer.schedule": "linear",
        "optimizer.minimum_ratio": 0.0,
        "training.recompute": "none",
    }
    if rate is not None and not reading.has("optimizer.type"):
        account.note("optimizer.type is not set: Adam, as GPT-NeoX's default")
    if not reading.has("warmup"):
        steps = _decay_steps(reading)
        name = "optimizer.warmup_ratio" if steps is None else "optimizer.warmup_steps"
        defaults[name] = 0.01 if steps is None else round(0.01 * steps)
    if is_fp16(reading):
        defaults["training.loss_scale_hysteresis"] = 2
        defaults["training.loss_scale_window"] = 1000
    elif "training.precision" not in account.settings:
        defaults["training.precision"] = "fp32"
    if reading.has("data_path"):
        defaults["data.split"] = [0.969, 0.03, 0.001]
    if not reading.has("train_batch_size") and reading.has("train_micro_batch_size_per_gpu"):
        defaults["training.micro_batches"] = 1
    for setting, value in defaults.items():
        account.default(setting, value, _NEOX)
    if account.settings.get("parallel.pipeline", 1) > account.settings.get("training.micro_batches", 1):
        reason = "DeepSpeed's pipeline takes fewer micro batches than stages, 1f1b does not; the numbers are the same"
        account.default("parallel.schedule", "gpipe", reason)
    account.note(
        "the order of samples is megalite's own; documents follow one another without a mask, as in GPT-NeoX"
    )
    account.note(
        "the vocabulary is not padded: GPT-NeoX pads it to a multiple of make_vocab_size_divisible_by x tensor"
    )


def report_missing(reading: Reading) -> None:
    """Refuse a run without sizes, data, batch or length: their keys stand in another file, or nowhere."""
    needed = {
        "num_layers": ("model.num_hidden_layers",),
        "hidden_size": ("model.hidden_size",),
        "num_attention_heads": ("model.num_attention_heads",),
        "seq_length": ("training.sequence_length",),
        "data_path": ("data.source", "data.blend"),
        "train_micro_batch_size_per_gpu": ("training.micro_batch_size", "training.global_batch_size"),
        "train_iters": ("training.steps", "training.epochs"),
        "optimizer.params.lr": ("optimizer.learning_rate",),
    }
    require(reading, needed)
