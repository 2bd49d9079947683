"""`megalite convert export --quantise int8`: the folder, its cost, and what it is not for."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from megalite.cli import convert
from megalite.config.load import load_run
from megalite.config.sources.huggingface import shape_of_folder
from megalite.config.sources.quantisation import KEY, is_int8
from megalite.errors import CheckpointError, ConfigError
from megalite.generation.loaded import load
from tests.support.evaluated import Evaluated, write_evaluated
from tests.support.parity import about


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return write_evaluated(tmp_path_factory.mktemp("evaluated"))


def test_the_cost_is_printed_and_the_folder_only_for_inference(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "int8"
    request = [
        "export",
        str(evaluated.run),
        str(folder),
        "--quantise",
        "int8",
        "--data",
        str(evaluated.texts),
    ]
    assert convert.run(request) == 0
    printed = capsys.readouterr().out
    [before], [after] = (
        re.findall(rf"^  {name} +([0-9.]+)", printed, re.MULTILINE) for name in ("float32", "int8")
    )
    assert float(after) == about(float(before), 0.05) and before != after
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in evaluated.export.iterdir()}
    weights = [(at / "model.safetensors").stat().st_size for at in (folder, evaluated.export)]
    assert f"{weights[0]:,} bytes" in printed and weights[0] < 0.7 * weights[1]
    assert {path.name for path in tmp_path.iterdir()} == {"int8"}
    assert len(load(folder).tokenizer.encode("The")) > 0
    elements, own = inspected(folder, capsys), inspected(evaluated.export, capsys)
    int8 = sum(rows * columns for rows, columns, kind in elements.matrices if kind == "I8")
    assert elements.total == own.total
    assert elements.note == f", {int8:,} of them int8 in {elements.kinds['I8']} tensors with scales"
    assert int8 > 0 and own.note == "" and "I32" not in elements.kinds
    with pytest.raises(ConfigError, match=r"quantization_config; .*: int8 weights only generate"):
        load_run(None, [f"--model.weights={folder}", "--data.source=stdlib"])
    with pytest.raises(ConfigError, match=r"before they were quantised: int8 weights only"):
        convert.run(["import", str(folder), str(tmp_path / "imported")])


@dataclass(frozen=True)
class Inspected:
    """What `megalite convert inspect` prints of a folder. matrices: rows, columns and type. kinds: type -> tensors."""

    total: int
    note: str
    matrices: list[tuple[int, int, str]]
    kinds: Counter[str]


def inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> Inspected:
    capsys.readouterr()
    assert convert.run(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    head = re.search(r"^weight: ([0-9,]+) elements(.*)$", printed, re.MULTILINE)
    assert head is not None
    rows = re.findall(r"^  \S+ +([0-9]+) x ([0-9]+)  (\w+)  \S+$", printed, re.MULTILINE)
    kinds = re.findall(r"^  \S+ +[0-9][0-9 x]*  (\w+)  \S+$", printed, re.MULTILINE)
    matrices = [(int(one), int(other), kind) for one, other, kind in rows]
    return Inspected(int(head[1].replace(",", "")), head[2], matrices, Counter(kinds))


def test_what_cannot_be_is_said_before_work_begins(evaluated: Evaluated, tmp_path: Path) -> None:
    request = ["export", str(evaluated.run), str(tmp_path / "out")]
    for flags, message in (
        (["--data", "x.txt"], r"--data: .*; add --quantise int8"),
        (["--quantise", "int8", "--adapter"], r"--quantise: .*; leave out --adapter"),
        (["--quantise", "int8", "--dtype", "float16"], r"--dtype: .*; use bfloat16 or float32"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert.run([*request, *flags])
    assert not any(tmp_path.iterdir())


def test_another_form_is_refused(evaluated: Evaluated, tmp_path: Path) -> None:
    folder = tmp_path / "int8"
    assert convert.run(["export", str(evaluated.run), str(folder), "--quantise", "int8"]) == 0
    config = json.loads((folder / "config.json").read_text())
    assert is_int8(config[KEY]) and shape_of_folder(str(folder), int8=True)
    group = config[KEY]["config_groups"]["group_0"]
    for where, change in (
        (config[KEY], {"format": "int-quantized"}),
        (config[KEY], {"kv_cache_scheme": {"num_bits": 8}}),
        (config[KEY], {"config_groups": {"one": group, "two": group}}),
        (group, {"input_activations": {"num_bits": 8}}),
        (group["weights"], {"num_bits": 4}),
        (group["weights"], {"symmetric": False}),
    ):
        kept = dict(where)
        where.update(change)
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            ConfigError, match=r"quantization_config; use the weights from before they were quantised$"
        ):
            load(folder)
        where.clear()
        where.update(kept)
    (folder / "config.json").write_text(json.dumps({**config, KEY: None}))
    with pytest.raises(CheckpointError, match=r"weight_packed"):
        load(folder)
