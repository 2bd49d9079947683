"""Rules over data.order = "megatron": Megatron's order depends on the number of samples, and knows token files only."""

from collections.abc import Iterator

from megalite.config.rules.batch import BatchProblem, plan_batch
from megalite.config.rules.validation import has_validation_text
from megalite.config.sections.checked import CheckedRun, Unknown
from megalite.errors import Problem

_ORDER = 'data.order = "megatron"'
_LARGEST_SEED = 2**32 - 1


def megatron_orders_documents(run: CheckedRun) -> Iterator[Problem]:
    if run.data.order != "megatron":
        return
    if run.data.kind != "text":
        message = f'"megatron" is for documents, but data.kind is "{run.data.kind}"'
        yield Problem.reset("data.order", message, 'delete it, or set data.kind = "text"')
    if run.data.streaming:
        message = f"true reads the text in its own order, not in that of {_ORDER}"
        yield Problem.reset("data.streaming", message, "set it to false, or delete data.order", False)


def megatron_orders_always_shuffle(run: CheckedRun) -> Iterator[Problem]:
    if run.data.order == "megatron" and not run.data.shuffle:
        message = f"false has no effect with {_ORDER}, which shuffles"
        yield Problem.reset("data.shuffle", message, "delete it, or delete data.order")


def megatron_blends_keep_their_weights(run: CheckedRun) -> Iterator[Problem]:
    if run.data.order == "megatron" and run.data.curriculum:
        message = f"changes the weights, which {_ORDER} does not know"
        yield Problem.reset("data.curriculum", message, "delete it, or delete data.order")


def megatron_orders_have_a_number_of_samples(run: CheckedRun) -> Iterator[Problem]:
    if run.data.order == "megatron" and run.training.steps is None:
        message = f"is required with {_ORDER}, which depends on steps x global batch size"
        yield Problem(
            "training.steps", message, "set it to Megatron's --train-iters, and delete training.epochs"
        )


def megatron_seeds_have_32_bits(run: CheckedRun) -> Iterator[Problem]:
    if run.data.order == "megatron" and run.run.seed > _LARGEST_SEED:
        message = f"{run.run.seed} is more than {_ORDER} takes, a number of 32 bits"
        yield Problem.reset(
            "run.seed", message, f"use Megatron's --seed, at most {_LARGEST_SEED}", _LARGEST_SEED
        )


def megatron_validations_have_a_size(run: CheckedRun) -> Iterator[Problem]:
    if run.data.order != "megatron" or not has_validation_text(run):
        return
    why = f"is required with {_ORDER}, whose validation samples depend on their number"
    if run.validation.every is None:
        yield Problem("validation.every", why, "set it to Megatron's --eval-interval")
    if run.validation.samples is None:
        yield Problem("validation.samples", why, "set it to Megatron's --eval-iters x --global-batch-size")
    elif (size := _global_batch_size(run)) and run.validation.samples % size:
        nearest = -(-run.validation.samples // size) * size
        message = f"{run.validation.samples} is no number of whole batches of {size}, which {_ORDER} needs"
        yield Problem.reset(
            "validation.samples", message, f"use {nearest}, a multiple of the global batch size", nearest
        )


def _global_batch_size(run: CheckedRun) -> int | None:
    """Return the size that the settings say or give; None if they are wrong, which another rule reports."""
    try:
        return plan_batch(run).global_batch_size
    except (BatchProblem, Unknown):
        return None


def megatron_splits_or_names_validation(run: CheckedRun) -> Iterator[Problem]:
    if run.data.order == "megatron" and run.data.validation is not None and run.data.split is not None:
        message = f"is set together with data.validation, and Megatron takes one of them ({_ORDER})"
        yield Problem.reset("data.split", message, "delete one of them")
