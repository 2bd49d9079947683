"""Each rule that spans settings or the number of ranks, as one function that yields what breaks it."""

from collections.abc import Callable, Iterator
from math import isqrt

from megalite.config.batch import BatchProblem, plan_batch
from megalite.config.computation_rules import COMPUTATION_RULES
from megalite.config.data_rules import DATA_RULES
from megalite.config.family_rules import FAMILY_RULES
from megalite.config.optimizer_rules import OPTIMIZER_RULES
from megalite.config.pipeline_rules import PIPELINE_RULES
from megalite.config.validate import Facts, Unknown
from megalite.config.validation_rules import VALIDATION_RULES
from megalite.errors import Problem
from megalite.topology.families import FAMILIES
from megalite.topology.sharding import units_fit

Rule = Callable[[Facts], Iterator[Problem]]


def problems_of(facts: Facts) -> list[Problem]:
    """What all rules find; a rule that needs a wrong or missing value is passed over."""
    found: list[Problem] = []
    for rule in RULES:
        try:
            found += rule(facts)
        except Unknown:
            continue
    return found


def tensor_divides_attention_heads(facts: Facts) -> Iterator[Problem]:
    tensor, heads = facts.parallel.tensor, facts.model.num_attention_heads
    if heads % tensor:
        message = f"{tensor} does not divide model.num_attention_heads = {heads}"
        yield Problem("parallel.tensor", message, f"use one of {_sizes_for_heads(facts)}")


def tensor_fits_key_value_heads(facts: Facts) -> Iterator[Problem]:
    tensor, heads = facts.parallel.tensor, facts.model.num_key_value_heads
    if heads is not None and not units_fit(heads, tensor):
        message = f"{tensor} neither divides model.num_key_value_heads = {heads} nor is a multiple of it"
        yield Problem("parallel.tensor", message, f"use one of {_sizes_for_heads(facts)}")


def _sizes_for_heads(facts: Facts) -> list[int]:
    query = facts.model.num_attention_heads
    shared = facts.model.num_key_value_heads or query
    return [size for size in divisors(query) if units_fit(shared, size)]


def zero_3_splits_no_shared_head(facts: Facts) -> Iterator[Problem]:
    tensor, heads = facts.parallel.tensor, facts.model.num_key_value_heads
    if heads is not None and facts.zero_stage == 3 and tensor > heads:
        source = facts.source("deepspeed.zero_optimization")
        message = f"3 {source} splits weights, of which parallel.tensor = {tensor} ranks keep copies of each of the "
        message += f"{heads} key-value heads alike"
        yield Problem(
            "deepspeed.zero_optimization.stage", message, f"use stage 1 or 2, or parallel.tensor {heads}"
        )


def tensor_fits_intermediate_size(facts: Facts) -> Iterator[Problem]:
    tensor, size = facts.parallel.tensor, facts.model.intermediate_size
    if tensor > size:
        message = f"{tensor} ranks cannot share model.intermediate_size = {size}"
        yield Problem("parallel.tensor", message, f"use at most {size}")


def tensor_fits_vocabulary(facts: Facts) -> Iterator[Problem]:
    tensor, size = facts.parallel.tensor, facts.model.vocab_size
    if size != "auto" and tensor > size:
        yield Problem(
            "parallel.tensor", f"{tensor} ranks cannot share model.vocab_size = {size}", f"use at most {size}"
        )


def query_heads_share_key_value_heads(facts: Facts) -> Iterator[Problem]:
    query, shared = facts.model.num_attention_heads, facts.model.num_key_value_heads
    if shared is not None and query % shared:
        message = f"{shared} does not divide model.num_attention_heads = {query}"
        yield Problem("model.num_key_value_heads", message, f"use one of {divisors(query)}")


def heads_fill_hidden_size(facts: Facts) -> Iterator[Problem]:
    hidden, heads = facts.model.hidden_size, facts.model.num_attention_heads
    if facts.model.head_dim is None and hidden % heads:
        message = f"{heads} does not divide model.hidden_size = {hidden}"
        yield Problem(
            "model.num_attention_heads", message, f"use one of {divisors(hidden)}, or set model.head_dim"
        )


def head_dim_is_even(facts: Facts) -> Iterator[Problem]:
    if FAMILIES[facts.model.family].fixed.get("position_embedding") == "learned":
        return
    dim = facts.model.head_dim
    if dim is not None:
        if dim % 2:
            message = f"{dim} is odd, and rotary embeddings turn pairs"
            yield Problem("model.head_dim", message, f"use {dim + 1}")
        return
    hidden, heads = facts.model.hidden_size, facts.model.num_attention_heads
    if hidden % heads == 0 and hidden // heads % 2:
        message = f"{hidden} / model.num_attention_heads {heads} = {hidden // heads} is an odd head_dim"
        remedy = f"rotary embeddings turn pairs: use {heads * (hidden // heads + 1)}, or set model.head_dim"
        yield Problem("model.hidden_size", message, remedy)


def ranks_make_whole_replicas(facts: Facts) -> Iterator[Problem]:
    world, tensor, pipeline = facts.world_size, facts.parallel.tensor, facts.parallel.pipeline
    if world is None or facts.parallel.data != "auto" or world % (tensor * pipeline) == 0:
        return
    replica = tensor * pipeline
    message = f"{world} ranks are not a multiple of parallel.tensor {tensor} * parallel.pipeline {pipeline} = {replica}"
    nearest = [str(each) for each in (world // replica * replica, (world // replica + 1) * replica) if each]
    yield Problem("parallel.data", message, f"start {' or '.join(nearest)} ranks")


def ranks_fill_the_layout(facts: Facts) -> Iterator[Problem]:
    world, data = facts.world_size, facts.parallel.data
    if world is None or data == "auto":
        return
    tensor, pipeline = facts.parallel.tensor, facts.parallel.pipeline
    if world != tensor * pipeline * data:
        message = f"tensor {tensor} * pipeline {pipeline} * data {data} = {tensor * pipeline * data}, not the {world} "
        yield Problem("parallel.data", message + "ranks that were started", 'use "auto", or start as many')


def batch_numbers_agree(facts: Facts) -> Iterator[Problem]:
    try:
        plan_batch(facts)
    except BatchProblem as found:
        yield found.problem


def zero_fits_the_pipeline(facts: Facts) -> Iterator[Problem]:
    stage, stages = facts.zero_stage, facts.parallel.pipeline
    if stage >= 2 and stages > 1:
        source = facts.source("deepspeed.zero_optimization")
        does = "reduces gradients" if stage == 2 else "gathers weights"
        message = (
            f"{stage} {source} {does} in every micro batch, and parallel.pipeline = {stages} interleaves them"
        )
        yield Problem("deepspeed.zero_optimization.stage", message, "use stage 1, or parallel.pipeline 1")


def length_is_given_once(facts: Facts) -> Iterator[Problem]:
    steps, epochs = facts.training.steps, facts.training.epochs
    if steps is None and epochs is None:
        yield Problem(
            "training.steps", "the length of the run is not set", "set training.steps or training.epochs"
        )
    elif steps is not None and epochs is not None:
        message = f"{steps} stands beside training.epochs = {epochs}"
        yield Problem(
            "training.steps", message, "set one of the two; on the command line `none` takes the other away"
        )


def sequences_fit_the_model(facts: Facts) -> Iterator[Problem]:
    length, longest = facts.training.sequence_length, facts.model.max_position_embeddings
    if length > longest:
        message = f"{length} is longer than model.max_position_embeddings = {longest}"
        yield Problem("training.sequence_length", message, "shorten the one or raise the other")


def warmup_ends_before_the_run(facts: Facts) -> Iterator[Problem]:
    warmup, steps = facts.optimizer.warmup_steps, facts.training.steps
    if steps is not None and warmup and warmup >= steps:
        message = f"{warmup} is not less than training.steps = {steps}"
        yield Problem("optimizer.warmup_steps", message, f"use {steps - 1} or fewer")


def decay_follows_the_warmup(facts: Facts) -> Iterator[Problem]:
    warmup, end = facts.optimizer.warmup_steps, facts.optimizer.decay_steps
    if end is not None and end <= warmup:
        message = f"{end} is not more than optimizer.warmup_steps = {warmup}"
        yield Problem("optimizer.decay_steps", message, f"use {warmup + 1} or more")


def momentum_is_for_sgd(facts: Facts) -> Iterator[Problem]:
    momentum, name = facts.optimizer.momentum, facts.optimizer.name
    if momentum and name != "sgd":
        yield Problem(
            "optimizer.momentum", f"{momentum} has no meaning for {name}", 'use optimizer.betas, or "sgd"'
        )


def divisors(number: int) -> list[int]:
    """Ascending."""
    low = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]


RULES: tuple[Rule, ...] = (
    tensor_divides_attention_heads,
    tensor_fits_key_value_heads,
    zero_3_splits_no_shared_head,
    tensor_fits_intermediate_size,
    tensor_fits_vocabulary,
    query_heads_share_key_value_heads,
    heads_fill_hidden_size,
    head_dim_is_even,
    *PIPELINE_RULES,
    ranks_make_whole_replicas,
    ranks_fill_the_layout,
    batch_numbers_agree,
    zero_fits_the_pipeline,
    *COMPUTATION_RULES,
    *OPTIMIZER_RULES,
    length_is_given_once,
    sequences_fit_the_model,
    warmup_ends_before_the_run,
    decay_follows_the_warmup,
    momentum_is_for_sgd,
    *DATA_RULES,
    *VALIDATION_RULES,
    *FAMILY_RULES,
)
