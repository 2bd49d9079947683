"""Megatron-LM's length of a run, batch and learning-rate schedule: iterations, samples or tokens as steps."""

from math import ceil

from megalite.convert.adopt.rules import Reading, number, whole

WARM_UP = (
    "step k of N has the rate k / N of the peak there (0 in the first step), (k + 1) / N here; equal after it"
)
_UNITS = ("iters", "samples", "tokens")


def steps_of(reading: Reading, prefix: str) -> tuple[float, str] | None:
    """Return the steps that --PREFIX-iters, -samples or -tokens says, and its key; None: none is given.

    Raises ValueError where the batch size is unknown.
    """
    lengths = []
    for unit in _UNITS:
        key = f"{prefix}-{unit}"
        if reading.has(key):
            amount = number(reading.get(key))
            lengths.append((amount / (1 if unit == "iters" else _per_step(reading, unit)), key))
    return min(lengths, default=None)


def read_length(reading: Reading, key: str, value: object) -> None:
    """Answer --train-iters, --train-samples and --train-tokens: the first of them that ends the run."""
    found = steps_of(reading, "train")
    assert found is not None
    steps, shortest = found
    # A last batch that is not full is dropped, but a run of tokens goes on until they are reached.
    whole_steps = ceil(steps) if shortest.endswith("tokens") else int(steps)
    for unit in _UNITS:
        other = f"train-{unit}"
        if other != shortest:
            reading.no_effect(other, f"--{shortest} ends the run earlier, or at the same step")
    settings = {"training.steps": whole_steps}
    if shortest.endswith("iters"):
        reading.take(shortest, settings)
    elif shortest.endswith("tokens"):
        reading.take(shortest, settings, "until the tokens are reached, as there")
    elif steps != whole_steps:
        note = "no whole batches: the last one is dropped, and the order of samples that repeat depends on their number"
        reading.change(shortest, settings, note)
    else:
        reading.take(shortest, settings, "divided by the global batch")


def read_decay_end(reading: Reading, key: str, value: object) -> None:
    """Answer --lr-decay-iters, --lr-decay-samples and --lr-decay-tokens."""
    steps, first = _only(reading, "lr-decay")
    if reading.get("lr-decay-style") == "constant":
        reading.no_effect(first, "the rate is constant")
    elif steps == int(steps):
        reading.take(first, {"optimizer.decay_steps": int(steps)})
    else:
        reading.change(first, {"optimizer.decay_steps": ceil(steps)}, f"{steps:.6g} steps, rounded up")


def read_warm_up(reading: Reading, key: str, value: object) -> None:
    """Answer --lr-warmup-iters, -samples, -tokens and --lr-warmup-fraction of the decay."""
    if reading.has("lr-warmup-fraction"):
        end = steps_of(reading, "lr-decay") or steps_of(reading, "train")
        if end is None:
            raise ValueError("is a fraction of a length that is not given")
        steps, first = number(reading.get("lr-warmup-fraction")) * end[0], "lr-warmup-fraction"
        for unit in _UNITS:
            reading.no_effect(f"lr-warmup-{unit}", "--lr-warmup-fraction counts")
    else:
        steps, first = _only(reading, "lr-warmup")
    rounded = ceil(round(steps, 6))
    settings = {"optimizer.warmup_steps": rounded}
    if not rounded:
        reading.take(first, settings)
    elif abs(rounded - steps) < 1e-6:
        reading.change(first, settings, WARM_UP)
    else:
        reading.change(first, settings, f"{steps:.6g} steps, rounded up; {WARM_UP}")


def read_style(reading: Reading, key: str, value: object) -> None:
    """Answer --lr-decay-style and, for WSD, its length and form."""
    if value in ("cosine", "linear", "constant"):
        reading.take(key, {"optimizer.schedule": str(value)})
    elif value == "WSD":
        _read_wsd(reading, key)
    else:
        reading.refuse(
            key, "megalite has no such decay", "set optimizer.schedule cosine, linear, constant or wsd"
        )


def read_minimum(reading: Reading, key: str, value: object) -> None:
    """Answer --min-lr, which is a fraction of the peak here."""
    if not reading.has("lr"):
        raise ValueError("needs --lr, of which it is a fraction here")
    if reading.get("lr-decay-style") == "constant":
        reading.no_effect(key, "the rate is constant")
        return
    reading.take(key, {"optimizer.minimum_ratio": round(number(value) / number(reading.get("lr")), 12)})


def read_wsd_part(reading: Reading, key: str, value: object) -> None:
    """Answer the length and form of WSD, which may stand before --lr-decay-style."""
    if reading.get("lr-decay-style") == "WSD":
        _read_wsd(reading, "lr-decay-style")
    else:
        reading.no_effect(key, "--lr-decay-style is not WSD")


def length_defaults(reading: Reading) -> None:
    """Set the schedule that Megatron-LM has where the script is silent."""
    account = reading.account
    account.default("optimizer.schedule", "linear", "Megatron-LM's default of --lr-decay-style; cosine here")
    if account.settings["optimizer.schedule"] != "constant":
        account.default(
            "optimizer.minimum_ratio", 0.0, "Megatron-LM's default of --min-lr; 0.1 of the peak here"
        )


def _read_wsd(reading: Reading, key: str) -> None:
    form = reading.get("lr-wsd-decay-style", "exponential")
    shape = {"minus_sqrt": "sqrt", "linear": "linear"}.get(form)
    length, end = (
        steps_of(reading, "lr-wsd-decay"),
        steps_of(reading, "lr-decay") or steps_of(reading, "train"),
    )
    parts = ("lr-wsd-decay-style", "lr-wsd-decay-iters", "lr-wsd-decay-samples")
    if shape is None or length is None or end is None:
        why = (
            f"megalite's wsd falls linearly or as minus_sqrt, not {form}"
            if shape is None
            else "WSD needs its length"
        )
        for name in (key, *(part for part in parts if reading.has(part))):
            reading.refuse(
                name, why, "set optimizer.decay_shape sqrt or linear, and optimizer.decay_fraction"
            )
        return
    reading.take(key, {"optimizer.schedule": "wsd"})
    reading.take("lr-wsd-decay-style", {"optimizer.decay_shape": shape})
    for name in parts[1:]:
        reading.take(name, {"optimizer.decay_fraction": round(length[0] / end[0], 12)})


def _only(reading: Reading, prefix: str) -> tuple[float, str]:
    """Return the steps of the first of -iters, -samples, -tokens that is not 0; others have no effect."""
    given = [f"{prefix}-{unit}" for unit in _UNITS if reading.has(f"{prefix}-{unit}")]
    nonzero = [key for key in given if number(reading.get(key))]
    first = nonzero[-1] if nonzero else given[0]
    for key in given:
        if key != first:
            reading.no_effect(key, f"--{first} counts")
    amount, unit = number(reading.get(first)), first.rpartition("-")[2]
    return (amount / _per_step(reading, unit) if unit != "iters" and amount else amount), first


def _per_step(reading: Reading, unit: str) -> int:
    """Return the samples or tokens of a step. Raises ValueError."""
    needed = ("global-batch-size",) if unit == "samples" else ("global-batch-size", "seq-length")
    product = 1
    for key in needed:
        if not reading.has(key):
            raise ValueError(f"is in {unit}: it needs --{key} to become steps")
        product *= whole(reading.get(key))
    if not product:
        raise ValueError("divides by a batch of 0")
    return product
