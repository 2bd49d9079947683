"""Whatever a run file says, loading it gives a resolved run or one ConfigError, and never another exception."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.config.deepspeed.keys import KEYS
from megalite.config.deepspeed.scheduler import SCHEDULERS
from megalite.config.load import load_run
from megalite.config.output.write import write_resolved
from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError
from megalite.topology.optimizers import OPTIMIZERS
from tests.unit.config.runs import RUN, changed, write_run

SECTIONS = {
    name: list(getattr(info.annotation, "model_fields", {})) for name, info in RunConfig.model_fields.items()
}
DEEPSPEED_PATHS = [f"{block}.{key}" if block else key for block, keys in KEYS.items() for key in keys]
FORMS = [each.deepspeed for each in OPTIMIZERS.values() if each.deepspeed is not None]
DEEPSPEED_PATHS += [f"optimizer.params.{name}" for form in FORMS for name in form.parameters]
DEEPSPEED_PATHS += [f"scheduler.params.{name}" for each in SCHEDULERS.values() for name in each.parameters]

words = st.sampled_from(
    [
        "auto",
        "none",
        "1f1b",
        "gpipe",
        "fp16",
        "sgd",
        "linear",
        "tiny",
        "stdlib",
        "AdamW",
        "log",
        *SCHEDULERS,
        "x",
        "",
    ]
)
scalars = st.one_of(
    st.integers(-2, 16),
    st.integers(),
    st.floats(),
    st.booleans(),
    words,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.dates(),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words.filter(bool), inner, max_size=2),
    max_leaves=4,
)
settings_of_ours = st.sampled_from([f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys])
settings_of_deepspeed = st.sampled_from(DEEPSPEED_PATHS).map("deepspeed.{}".format)
unknown = st.sampled_from(["model.x", "x.y", "deepspeed.x", "deepspeed.zero_optimization.x", "training.step"])
changes = st.dictionaries(settings_of_ours | settings_of_deepspeed | unknown, values, max_size=5)


def _tables(found: dict[str, Any]) -> dict[str, Any]:
    """The run with these changes; a key below a value that is no table is left out."""
    tables = changed({}, RUN)
    for name, value in found.items():
        try:
            tables = changed({name: value}, tables)
        except (AttributeError, TypeError):
            continue
    return tables


def _plain(value: Any) -> Any:
    """Dates as text, which the writer of RUN.toml has no need of."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float) else str(value)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(changes, st.none() | st.integers(1, 16))
def test_any_run_file_is_a_run_or_a_config_error(found: dict[str, Any], world_size: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), _tables(_plain(found)))
        try:
            config = load_run(path, world_size=world_size).config
        except ConfigError as error:
            assert error.problems
            assert all(problem.key and problem.message for problem in error.problems)
            return
        assert config.layout.world_size == (world_size or config.layout.world_size)
        assert config.batch.global_batch_size == (
            config.batch.micro_batch_size * config.batch.micro_batches * config.batch.data
        )
        resolved = Path(folder) / "resolved.toml"
        write_resolved(config, resolved)
        assert load_run(resolved, world_size=world_size).config == config


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(settings_of_ours | settings_of_deepspeed | unknown, st.text(max_size=6)), max_size=4)
)
def test_any_flags_are_a_run_or_a_config_error(flags: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), RUN)
        try:
            load_run(path, [word for name, text in flags for word in (f"--{name}", text)])
        except ConfigError as error:
            assert error.problems


@settings(max_examples=60)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_config_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_bytes(content)
        try:
            load_run(path)
        except ConfigError as error:
            assert error.problems
        else:
            raise AssertionError("60 bytes cannot describe a run")
