"""Import and export of deep models: the tables of tensors are built once, not once for each tensor."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import convert
from megalite.families.tensors import TensorNames
from megalite.topology import parameters
from tests.support.tiny import FAMILY_SHAPES
from tests.unit.convert.exporting import lively_stage, save_stage
from tests.unit.convert.test_universal import saved


@pytest.mark.extended
@pytest.mark.parametrize(("form", "depth"), [("huggingface", 200), ("universal", 30)])
def test_tables_are_built_as_often_for_many_layers_as_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, depth: int
) -> None:
    built: Counter[str] = Counter()

    def watch(owner: Any, name: str) -> None:
        build = getattr(owner, name)

        def counted(*given: Any) -> Any:
            built[name] += 1
            return build(*given)

        monkeypatch.setattr(owner, name, counted)

    watch(parameters, "model_parameters")
    watch(TensorNames, "tensors")
    command = {"huggingface": "export", "universal": "universal"}[form]
    counts = {}
    for layers in (2, depth):
        folder = tmp_path / str(layers)
        # Transposed tensors, which are read whole.
        shape = replace(FAMILY_SHAPES["gpt2"], num_hidden_layers=layers)
        if form == "universal":
            checkpoint = saved(folder / "run", shape)
        else:
            checkpoint = save_stage(folder / "run", shape, lively_stage(shape, scale=1.0))
        built.clear()
        assert convert.run([command, str(checkpoint), str(folder / "left")]) == 0
        counts[layers, "export"] = dict(built)
        built.clear()
        assert convert.run(["import", str(folder / "left"), str(folder / "back")]) == 0
        counts[layers, "import"] = dict(built)
    for way in ("export", "import"):
        assert counts[depth, way] == counts[2, way]
        assert max(counts[depth, way].values()) < 10
