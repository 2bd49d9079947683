"""The tables of DeepSpeed's keys and defaults, compared with the installed DeepSpeed."""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megalite.config.deepspeed.keys import EFFECTS, KEYS, VERSION, PassedOn, Removed
from megalite.config.deepspeed.values import problem_of
from megalite.topology.optimizers import OPTIMIZERS

# Which class or constants of DeepSpeed each block is checked against.
MODELS = {
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "bfloat16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "comet": ("monitor/config.py", "CometConfig"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "timers.throughput": ("utils/config.py", "DeepSpeedThroughputTimerConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.leaf_module": ("runtime/zero/leaf_module_config.py", "DeepSpeedZeroLeafModuleConfig"),
    "zero_optimization.offload_optimizer": (
        "runtime/zero/offload_config.py",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.zenflow": ("runtime/zenflow/zenflow_config.py", "ZenFlowConfig"),
}
# Initialised while it runs, "and should not be set by users".
INTERNAL = {"zero_optimization.zenflow": {"steps_per_epoch"}}


@pytest.fixture(scope="module")
def sources() -> Path:
    """DeepSpeed's sources, found without importing them."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None or importlib.metadata.version("deepspeed") != VERSION:
        pytest.skip(f"DeepSpeed {VERSION} is not installed")
    return Path(spec.origin).parent


@pytest.mark.parametrize("block", MODELS)
def test_the_keys_of_a_block_are_those_of_the_installed_deepspeed(block: str, sources: Path) -> None:
    file, name = MODELS[block]
    tree = ast.parse((sources / file).read_text(encoding="utf-8"))
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    assert set(_field_names(found)) - INTERNAL.get(block, set()) == set(KEYS[block])


def test_the_top_level_keys_are_read_by_the_installed_deepspeed(sources: Path) -> None:
    """Each of ours stands in DeepSpeed's sources as text; each key it looks up on the whole JSON is one of ours."""
    text = "\n".join(
        file.read_text(encoding="utf-8") for file in sources.rglob("*.py") if "inference" not in file.parts
    )
    assert not [key for key in KEYS[""] if f'"{key}"' not in text and f"'{key}'" not in text]
    names = _constants(sources / "runtime/constants.py")
    looked_up = set()
    for node in ast.walk(ast.parse((sources / "runtime/config.py").read_text(encoding="utf-8"))):
        call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("get_scalar_param", "param_dict.get")
        if call and isinstance(node, ast.Call):
            on_whole = ast.unparse(node.func) == "param_dict.get" or ast.unparse(node.args[0]) == "param_dict"
            key = node.args[0 if ast.unparse(node.func) == "param_dict.get" else 1]
            if on_whole and isinstance(key, ast.Name) and key.id in names:
                looked_up.add(names[key.id])
            elif on_whole and isinstance(key, ast.Constant):
                looked_up.add(key.value)
    assert len(looked_up) > 20
    assert looked_up <= {*KEYS[""], *EFFECTS}


def test_the_removed_keys_are_those_that_the_installed_deepspeed_refuses(sources: Path) -> None:
    tree = ast.parse((sources / "runtime/config.py").read_text(encoding="utf-8"))
    tables = {
        node.targets[0].id: [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Dict)
    }
    removed = set(tables["_REMOVED_TOP_LEVEL_CONFIG_KEYS"])
    removed |= {f"zero_optimization.{key}" for key in tables["_REMOVED_ZERO_CONFIG_KEYS"]}
    assert {path for path, effect in EFFECTS.items() if isinstance(effect, Removed)} == removed


def _field_names(model: ast.ClassDef) -> Iterator[str]:
    """Names and aliases of a pydantic model's fields."""
    for node in model.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
            keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
            yield from (each.value.value for each in keywords if each.arg == "alias")  # type: ignore[attr-defined]


def _constants(file: Path) -> Mapping[str, str]:
    return {
        node.targets[0].id: node.value.value
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def test_every_key_stands_once_and_in_order() -> None:
    below = [f"{path}.{name}" for path, effect in EFFECTS.items() for name in effect.keys.split()]
    paths = [*EFFECTS, *below]
    assert len(paths) == len(set(paths))
    assert list(EFFECTS) == sorted(EFFECTS)
    assert {path for path, effect in EFFECTS.items() if not effect.of_deepspeed} == {
        "aio.thread_count",
        "comms_config",
        "monitor_config",
    }


def test_a_value_that_is_passed_on_is_one_that_deepspeed_takes() -> None:
    """DeepSpeed's own model refuses no value that the check lets through."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    tried = [True, False, 0, 1, 4, 5e8, 1.5, -1, "5e8", "x", "", [], [1], {}, {"a": 1}]
    prefix, accepted = "zero_optimization.", 0
    passed_on = {path: effect.kind for path, effect in EFFECTS.items() if isinstance(effect, PassedOn)}
    for path, kind in passed_on.items():
        for value in tried if path.startswith(prefix) and not path.endswith(".device") else ():
            if problem_of(kind, value) is not None:
                continue
            keys = path.removeprefix(prefix).split(".")
            table: dict[str, Any] = {keys[-1]: value}
            zero.DeepSpeedZeroConfig(stage=3, **(table if len(keys) == 1 else {keys[0]: table}))
            accepted += 1
    assert accepted > 100


@pytest.mark.parametrize(
    ("name", "file", "kind"),
    [
        ("adamw", "ops/adam/fused_adam.py", "FusedAdam"),
        ("adamw", "ops/adam/cpu_adam.py", "DeepSpeedCPUAdam"),
        ("lion", "ops/lion/fused_lion.py", "FusedLion"),
        ("lion", "ops/lion/cpu_lion.py", "DeepSpeedCPULion"),
    ],
)
def test_the_parameters_and_defaults_are_those_of_the_installed_deepspeed(
    sources: Path, name: str, file: str, kind: str
) -> None:
    tree = ast.parse((sources / file).read_text(encoding="utf-8"))
    [rule] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
    [init] = [node for node in rule.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    names = [argument.arg for argument in init.args.args][-len(init.args.defaults) :]
    found = {name: ast.literal_eval(each) for name, each in zip(names, init.args.defaults, strict=True)}
    form = OPTIMIZERS[name].deepspeed
    assert form is not None and set(found) <= set(form.parameters)
    ours = {key: tuple(value) if isinstance(value, list) else value for key, value in form.defaults.items()}
    assert ours == {key: found[key] for key in ours}
