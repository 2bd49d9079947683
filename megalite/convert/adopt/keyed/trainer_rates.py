"""Length, optimizer, learning rate and intervals in the words of Hugging Face's Trainer."""

from collections.abc import Mapping
from typing import Any

from megalite.convert.adopt.rules import OFF, Reading, number, whole

_SCHEDULE_KEYS = ("lr_scheduler_type", "lr_scheduler")
_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
)
_PAGED = ("paged_adamw", "paged_adamw_32bit")
_EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
_EIGHT_BIT_LION = ("lion_8bit", "paged_lion_8bit")
_LION = ("lion_32bit", "paged_lion_32bit", "lion", "paged_lion")
_OTHERS = "megalite has adamw, sgd, lion, adafactor and muon: set optimizer.name, and rates for it"
_INTERVALS = {
    "logging_steps": ("monitor.every", "logging_strategy"),
    "eval_steps": ("validation.every", "eval_strategy"),
    "save_steps": ("checkpoint.every", "save_strategy"),
}


def read_length(reading: Reading, key: str, value: Any) -> None:
    """max_steps takes precedence over the epochs where it is above 0."""
    limit = whole(reading.get("max_steps", -1))
    if key == "max_steps" and limit > 0:
        reading.take(key, {"training.steps": limit})
    elif key == "max_steps" or limit > 0:
        reading.no_effect(key, "max_steps decides" if limit > 0 else "the epochs decide")
    else:
        reading.take(key, {"training.epochs": number(value)})


def read_schedule_arguments(reading: Reading, key: str, value: Any) -> None:
    """lr_scheduler_kwargs: the least rate of cosine_with_min_lr; the steps of others have no setting of ours."""
    table = value if isinstance(value, Mapping) else {}
    rate = number(reading.get("learning_rate", 5e-5))
    if not table:
        reading.no_effect(key, "it is empty")
    elif set(table) == {"min_lr"} and rate > 0:
        reading.take(key, {"optimizer.minimum_ratio": number(table["min_lr"]) / rate})
    elif set(table) == {"min_lr_rate"}:
        reading.take(key, {"optimizer.minimum_ratio": number(table["min_lr_rate"])})
    else:
        reading.refuse(
            key,
            "megalite has no such arguments",
            "set [optimizer] in run.toml: decay_fraction, minimum_ratio",
        )


def read_warmup(reading: Reading, key: str, value: Any) -> None:
    """warmup_steps below 1 is a ratio, as in transformers 5; the plain constant schedule has no warm-up."""
    figure = number(value)
    if schedule_of(reading) == "constant":
        reading.no_effect(key, "the schedule constant has no warm-up")
    elif figure < 0:
        raise ValueError(f"{value!r} is below 0")
    elif key == "warmup_ratio" and reading.get("warmup_steps", 0) not in (0, *OFF):
        reading.no_effect(key, "warmup_steps takes precedence")
    elif not figure:
        reading.take(key, {}, "no warm-up")
    elif key == "warmup_steps" and figure >= 1:
        reading.take(key, {"optimizer.warmup_steps": whole(value)})
    else:
        reading.take(key, {"optimizer.warmup_ratio": figure})


def schedule_of(reading: Reading) -> str:
    """Return the schedule of the file in its own words; "" where it is silent."""
    return next((str(reading.get(key)) for key in _SCHEDULE_KEYS if reading.has(key)), "")


def read_optimizer(reading: Reading, key: str, value: Any) -> None:
    if value in _ADAMW:
        reading.take(key, {"optimizer.name": "adamw"})
    elif value in _PAGED:
        reading.take(key, {"optimizer.name": "adamw"}, "the states stay in the accelerator's memory")
    elif value in _EIGHT_BIT:
        reading.change(key, {"optimizer.name": "adamw"}, "the states have 32 bits instead of 8 or 4")
    elif value in _EIGHT_BIT_LION:
        reading.change(key, {"optimizer.name": "lion"}, "the state has 32 bits instead of 8")
    elif value in _LION:
        reading.take(key, {"optimizer.name": "lion"})
    elif value == "sgd":
        reading.take(key, {"optimizer.name": "sgd"})
    else:
        reading.refuse(key, "megalite has no such optimizer, or with another rule", _OTHERS)


def _is_adamw(reading: Reading, key: str) -> bool:
    name = reading.get(key, "adamw_torch")
    return name in _ADAMW or name in _PAGED or name in _EIGHT_BIT


def _optimizer_key(reading: Reading) -> str:
    return "optimizer" if reading.has("optimizer") else "optim"


def read_betas(reading: Reading, key: str, value: Any) -> None:
    """adam_beta1 and adam_beta2, of which either may be missing."""
    betas = [number(reading.get("adam_beta1", 0.9)), number(reading.get("adam_beta2", 0.999))]
    if reading.get(_optimizer_key(reading)) == "sgd":
        reading.no_effect(key, "sgd has no betas")
    else:
        reading.take(key, {"optimizer.betas": betas})


def read_epsilon(reading: Reading, key: str, value: Any) -> None:
    if _is_adamw(reading, _optimizer_key(reading)):
        reading.take(key, {"optimizer.eps": number(value)})
    else:
        reading.no_effect(key, "it belongs to AdamW")


def read_strategy(reading: Reading, key: str, value: Any) -> None:
    """eval_strategy and save_strategy: no, steps or epoch."""
    strategy = "no" if value is False else value
    ours = "checkpoint.every" if key.startswith("save") else "validation.every"
    if strategy == "steps":
        reading.take(key, {}, "at equal distances")
    elif strategy == "no":
        reading.take(key, {}, "only after the last step")
    elif strategy != "epoch":
        reading.refuse(key, f"{strategy} is none of no, steps, epoch", f"set {ours}", numbers=False)
    elif ours == "validation.every" and not has_validation(reading):
        reading.no_effect(key, "there is no validation text: set data.validation, then validation.every")
    else:
        reading.take(key, {ours: "1 epoch"})


def read_interval(reading: Reading, key: str, value: Any) -> None:
    """logging_steps, eval_steps, save_steps: steps, or a share of the run below 1."""
    ours, strategy_key = _INTERVALS[key]
    strategy = reading.get(strategy_key, reading.get("evaluation_strategy") if key == "eval_steps" else None)
    figure = number(value)
    steps = whole(reading.get("max_steps", -1))
    if 0 < figure < 1 and steps > 0:
        figure = float(round(figure * steps))
    if strategy in ("no", "epoch", False):
        reading.no_effect(key, f"{strategy_key} is {strategy}")
    elif figure < 1:
        reading.refuse(key, "is a share of the run", f"set {ours} in steps", numbers=False)
    elif key == "eval_steps" and not has_validation(reading):
        reading.no_effect(key, "there is no validation text: set data.validation, then validation.every")
    else:
        reading.take(key, {ours: whole(figure)})


def read_patience(reading: Reading, key: str, value: Any) -> None:
    """Early stopping counts validations, which need a distance."""
    strategies = (reading.get("eval_strategy"), reading.get("evaluation_strategy"))
    validates = (
        reading.has("eval_steps") or "epoch" in strategies or number(reading.get("evals_per_epoch", 0))
    )
    if validates and has_validation(reading):
        reading.take(key, {"validation.patience": whole(value)})
    else:
        remedy = "set validation.every and validation.patience in run.toml"
        reading.refuse(key, "the files do not say when the run validates", remedy, numbers=False)


def has_validation(reading: Reading) -> bool:
    """Return whether the files name validation text: under the names of the systems that have such keys."""
    return any(
        reading.get(key) not in (None, 0, 0.0, "", [])
        for key in ("val_size", "eval_dataset", "val_set_size", "test_datasets")
    )


def fill_defaults(reading: Reading, others: Mapping[str, Any]) -> None:
    """Set Trainer's defaults where no key says otherwise. others: defaults of the system itself, which come first."""
    account, reason = reading.account, f"{reading.account.system}'s default"
    settings = account.settings
    optimizer = settings.get("optimizer.name", "adamw")
    defaults: dict[str, Any] = {
        "run.seed": 42,
        "training.micro_batches": 1,
        "training.precision": "fp32",
        "training.recompute": "none",
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 5e-5,
        "optimizer.schedule": "linear",
        "optimizer.minimum_ratio": 0.0,
        "optimizer.weight_decay": 0.0,
        "optimizer.gradient_clipping": 1.0,
        **others,
    }
    if optimizer in ("adamw", "lion"):
        defaults["optimizer.betas"] = [0.9, 0.999]
    if "training.steps" not in settings:
        defaults.setdefault("training.epochs", 3.0)
    if settings.get("optimizer.warmup_ratio") or settings.get("optimizer.warmup_steps"):
        account.note(
            "warm-up: Trainer's first rate is 0, megalite's is the peak / warm-up steps, so every rate of the warm-up "
            "comes a step earlier"
        )
    for setting, value in defaults.items():
        account.default(setting, value, reason)
    account.note(
        "the loss is the mean over the trained tokens of the whole batch, as in transformers since 4.46"
    )
    account.note("the order of samples is megalite's own")
