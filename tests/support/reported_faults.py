"""Faults of public reports, which exhibits of the museum of bugs plant (`tests/support/museum.py`)."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import IO, Any

import numpy as np

from megalite.errors import CheckpointError, ConfigError, LaunchError
from megalite.topology.parameters import EMBEDDING
from tests.support.planted import Planted, instead

Function = Callable[..., Any]

# ------------------------------------------------------------------------------------------------- layouts, checkpoints


def _equal_stages(consecutive: Function) -> Function:
    return lambda sizes: consecutive([min(sizes)] * len(sizes))


def _padded(balanced_split: Function) -> Function:
    def padded(total: int, parts: int) -> tuple[range, ...]:
        size = -(-total // parts)
        return tuple(range(part * size, (part + 1) * size) for part in range(parts))

    return padded


def _at_the_first_rank_s_place(targets: Function) -> Function:
    def local(*arguments: Any) -> Iterator[Any]:
        for each in targets(*arguments):
            yield replace(each, region=replace(each.region, offsets=(0,) * len(each.region.shape)))

    return local


def _from_the_parameter_s_start(shard_targets: Function) -> Function:
    def from_start(*arguments: Any) -> Iterator[Any]:
        return (replace(each, start=0) for each in shard_targets(*arguments))

    return from_start


LAYERS_THAT_DO_NOT_DIVIDE_ARE_LOST = Planted("megalite.topology.stages:_consecutive", _equal_stages)
SHARDS_ARE_PADDED = Planted("megalite.topology.sharding:balanced_split", _padded)
PUBLISHED_WITH_HOLES = Planted("megalite.checkpoint.publish:check_coverage", instead(lambda *_: None))
LOADED_AT_LOCAL_PLACES = Planted("megalite.checkpoint.load:targets", _at_the_first_rank_s_place)
MOMENTS_FROM_THE_PARAMETER_S_START = Planted(
    "megalite.checkpoint.load:shard_targets", _from_the_parameter_s_start
)
MOMENTS_LEFT_OUT = Planted("megalite.checkpoint.load:shard_targets", instead(lambda *_: ()))


def _a_buffer_for_each_save(begin: Function) -> Function:
    def begun(self: Any, tensors: Any) -> Any:
        self._buffer.reserve(self._buffer.bytes.nbytes + self.needed_bytes(tensors), None)
        return begin(self, tensors)

    return begun


STAGING_GROWS = Planted("megalite.checkpoint.staging:Staging.begin", _a_buffer_for_each_save)

# ------------------------------------------------------------------------------------------------- Hugging Face folders


def _without_layer_1(family_tensors: Function) -> Function:
    return lambda shape: tuple(each for each in family_tensors(shape) if ".1." not in each.name)


def _without_width(hf_config: Function) -> Function:
    def without(*arguments: Any) -> dict[str, Any]:
        return {key: value for key, value in hf_config(*arguments).items() if key != "intermediate_size"}

    return without


def _with_a_tied_head(weight_map: Function) -> Function:
    def mapped(files: Any) -> Iterator[tuple[str, str]]:
        yield from weight_map(files)
        yield "lm_head.weight", next(iter(files))

    return mapped


def _without_a_lower_bound(scaled: dict[str, Function]) -> dict[str, Function]:
    yarn = scaled["yarn"]
    names = {**yarn.__globals__, "max": lambda first, least: first}
    return {**scaled, "yarn": FunctionType(yarn.__code__, names)}


def _with_a_bias_a_rank(rounded: Function) -> Function:
    return lambda values, dtype, name: rounded(
        values * 4 if name.endswith("dense.bias") else values, dtype, name
    )


A_LAYER_IS_NOT_EXPORTED = Planted(
    "megalite.convert.huggingface.export:family_tensors", _without_layer_1, seen_as=(CheckpointError,)
)
EXPORTS_ARE_NOT_COMPARED = Planted(
    "megalite.convert.huggingface.export:compare_with_transformers", instead(lambda *_: ())
)
CONFIG_LACKS_THE_MLP_S_WIDTH = Planted("tests.unit.families.test_families:hf_config", _without_width)
INDEX_NAMES_THE_TIED_HEAD = Planted(
    "megalite.convert.huggingface.export:_weight_map", _with_a_tied_head, (CheckpointError,)
)
MASTERS_ARE_ROUNDED = Planted(
    "megalite.convert.huggingface.export:rounded",
    lambda rounded: lambda values, dtype, name: rounded(values.bfloat16(), dtype, name),
    seen_as=(CheckpointError,),
)
YARN_IS_NOT_CLAMPED = Planted("megalite.model.rope_scaling:_SCALED", _without_a_lower_bound)
BIASES_OF_ROWS_ARE_SUMMED = Planted("megalite.convert.huggingface.export:rounded", _with_a_bias_a_rank)

# ---------------------------------------------------------------------------------------------------- builds, launchers

STALE_LOCKS_STAY = Planted(
    "megalite.train.optimizer.deepspeed_ops:_alone", instead(lambda folder: nullcontext()), (ConfigError,)
)


def _every_package(find_spec: Function) -> Function:
    return lambda name, *package: find_spec("json" if name == "amp_C" else name, *package)


ANY_APEX_IS_TAKEN = Planted("megalite.launcher.machine_report:importlib.util.find_spec", _every_package)
VICTIMS_ARE_CAUSES = Planted(
    "megalite.launcher.control.failures:_is_loss_of_peer", instead(lambda error: False)
)
WHO_DID_NOT_ARRIVE_IS_UNKNOWN = Planted(
    "megalite.launcher.control.hang:_behind", instead(lambda marks, layout: set())
)
LAUNCHER_ARGUMENTS_ARE_REPLACED = Planted(
    "megalite.launcher.hosts.deepspeed_commands:_values_of",
    lambda values_of: lambda name, words: ([], values_of(name, words)[1]),
)
SSH_OPTIONS_ARE_REPLACED = Planted(
    "megalite.launcher.hosts.commands:pdsh_ssh_options", instead(lambda environ, extra: [])
)
SLOTS_ARE_GUESSED = Planted(
    "megalite.launcher.hosts.hostfile:_problem_of_slots", instead(lambda word: ("", "")), (LaunchError,)
)

# ------------------------------------------------------------------------------------------------------------- settings


CONTRADICTIONS_HAVE_NO_ORIGIN = Planted(
    "megalite.config.rules.batch:_contradiction",
    lambda contradiction: (
        lambda *numbers: replace(contradiction(*numbers), message="the batch is not consistent")
    ),
)
A_USED_UP_LOSS_SCALE_GOES_ON = Planted(
    "megalite.train.optimizer.loss_scale:LossScale.exhausted", instead(property(lambda self: False))
)
EARLIER_OVERFLOWS_ARE_FORGOTTEN = Planted(
    "megalite.train.optimizer.nonfinite:FiniteFlags.backward_ends", instead(lambda self: None)
)


def _one_micro_batch_too_few(stage_states: Function) -> Function:
    def fewer(run: Any, stage: int) -> Any:
        for state in stage_states(run, stage):
            chunks = len(state.numbers) // 3
            kept = tuple(max(0, number - 1) for number in state.numbers[:chunks])
            yield state._replace(numbers=kept + state.numbers[chunks:])

    return lambda run, stage: tuple(fewer(run, stage))


A_MICRO_BATCH_IS_NOT_COUNTED = Planted("megalite.planner.memory:stage_states", _one_micro_batch_too_few)

# ----------------------------------------------------------------------------------------------------------------- data


def _epochs_of_their_own(sample_ids: Function) -> Function:
    def with_replacement(self: Any, positions: Any) -> Any:
        return np.random.default_rng(self.seed).integers(self.samples, size=len(positions))

    return with_replacement


def _from_the_epoch_s_start(step_batch: Function) -> Function:
    def replayed(self: Any, consumed_samples: int, **options: Any) -> Any:
        seen = self.__dict__.setdefault("_first_place", consumed_samples)
        return step_batch(self, consumed_samples - seen, **options)

    return replayed


OTHER_SAMPLES_ARE_TAKEN = Planted(
    "megalite.train.checkpoints.resume_check:ResumeCheck.require_same_samples", instead(lambda self: None)
)
SAMPLES_ARE_DRAWN_AGAIN = Planted("megalite.data.batches.sampler:Sampler.sample_ids", _epochs_of_their_own)
A_RESUME_REPLAYS = Planted("megalite.data.batches.loader:StepLoader.step_batch", _from_the_epoch_s_start)


def _locked_but_not_looked_at(path: Path) -> IO[bytes]:
    file = path.open("ab")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


WAITERS_WRITE_INTO_WHAT_IS_PUBLISHED = Planted(
    "megalite.data.files.partial_files:locked", instead(_locked_but_not_looked_at), (FileNotFoundError,)
)
A_RESUMED_STREAM_BEGINS_AGAIN = Planted(
    "megalite.data.batches.stream_lane:Lane.go_on",
    lambda go_on: lambda self, sequence, place=None: go_on(self, sequence, self._begin),
)

# -------------------------------------------------------------------------------------------------- evaluation, serving


def _with_later_steps(make: Function) -> Function:
    return lambda folder, purge_step: make(folder)


CURVES_KEEP_LATER_STEPS = Planted("torch.utils.tensorboard:SummaryWriter", _with_later_steps)
A_TIED_HEAD_COSTS_NOTHING = Planted(
    "megalite.topology.flops:_multiplies",
    lambda multiplies: lambda parameter, shape: parameter.name != EMBEDDING and multiplies(parameter, shape),
)


def _merged_tokens_count_as_context(pair: Function) -> Function:
    def paired(self: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
        whole, first = self.ids(context + continuation), len(self.ids(context.rstrip()))
        return whole[:first], whole[first:]

    return paired


MERGED_TOKENS_COUNT_AS_CONTEXT = Planted(
    "megalite.evaluate.encoding:TextEncoder.pair", _merged_tokens_count_as_context
)


def _without_a_look_at_their_tokens(encoded: Function) -> Function:
    def let_through(self: Any, field: str, prompts: Any) -> Iterator[Any]:
        for prompt in prompts:
            yield from encoded(self, field, [prompt]) if prompt else [(field, ())]

    return let_through


def _as_if_it_asked_to_repeat(completion: Function) -> Function:
    def let_through(self: Any, body: Any) -> Any:
        return completion(self, body.model_copy(update={"echo": True}) if body.max_tokens == 0 else body)

    return let_through


EMPTY_PROMPTS_REACH_THE_ENGINE = Planted(
    "megalite.serve.prompts:Prompts._encoded", _without_a_look_at_their_tokens
)
NO_TOKENS_REACH_THE_ENGINE = Planted("megalite.serve.prompts:Prompts.completion", _as_if_it_asked_to_repeat)
HALF_CHARACTERS_ARE_SHOWN = Planted("megalite.generation.detokenise:_LONGEST_HOLD", instead(0))
CHOICES_SHARE_A_SEED = Planted("megalite.serve.prompts:_SEEDS", instead(1))


def _targets_of_the_window(pair_windows: Function) -> Function:
    def all_of_it(*arguments: Any) -> Any:
        [window] = pair_windows(*arguments)
        return [replace(window, targets=np.concatenate([window.inputs[1:], window.targets[-1:]]))]

    return all_of_it


SCORES_REACH_INTO_THE_CONTEXT = Planted("megalite.evaluate.encoding:pair_windows", _targets_of_the_window)
