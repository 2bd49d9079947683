"""The notebook of the examples, and a training that is interrupted, in a real Jupyter kernel."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, Job, running
from tests.support.waiting import PATIENCE, wait_until

nbformat = pytest.importorskip("nbformat", reason="jupyter is not installed: pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="jupyter is not installed: pip install nbclient ipykernel")

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
# Outputs, pictures included, that a reader of the page on the web loads.
MOST_BYTES = 60_000


def text_of(cell: Any) -> str:
    """Return what a cell has written, and its results as text."""
    outputs = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(outputs)


def client(notebook: Any, folder: Path) -> Any:
    resources = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", resources=resources)


def test_the_committed_notebook_is_small_and_was_run_from_top_to_bottom() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert not any(word in NOTEBOOK.read_text() for word in ("Traceback", "/tmp/", "/home/"))


@pytest.mark.extended
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    client(notebook, tmp_path).execute()  # raises at the first cell that fails
    by_head = {cell.source.splitlines()[0]: cell for cell in notebook.cells if cell.cell_type == "code"}
    [training] = [cell for head, cell in by_head.items() if "SVG" in head]
    first, last = (float(loss) for loss in text_of(training).splitlines()[-1].split(" -> "))
    assert last < first - 0.5
    [picture] = [output for output in training.outputs if "image/svg+xml" in output.get("data", {})]
    assert "step 60: loss" in picture.data["image/svg+xml"]
    [divided] = [cell for head, cell in by_head.items() if head.startswith("short = ")]
    assert text_of(divided).endswith("True\n") and "2 processes" in text_of(divided)


def interrupted(folder: Path, data: int) -> Any:
    """Return a notebook whose first cell, a training of `data` ranks, was interrupted; the others were run."""
    job = Job.write(folder, tensor=1, pipeline=1, data=data)
    settings = {"run": {"folder": "run"}, "deepspeed": {"zero_optimization": {"stage": 0}}}
    sources = [
        f"""
import os
from megalite import Trainer, load_config
from megalite.launcher.process import descendants
settings = {settings!r}
run_file = {str(job.run_file)!r}
Trainer(load_config(run_file, training={{"steps": 100000}}, **settings)).train()
""",
        "print(descendants(os.getpid()))",
        'result = Trainer(load_config(run_file, training={"steps": 1}, **settings)).train()\nprint(result.checkpoint)',
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    kernel = client(notebook, folder)
    kernel.allow_errors = True

    async def run() -> None:
        execution = asyncio.ensure_future(kernel.async_execute())
        while re.search(r"step +3/", text_of(notebook.cells[0])) is None:
            assert not execution.done(), notebook.cells[0].outputs
            await asyncio.sleep(0.05)
        await kernel.km.interrupt_kernel()
        await execution

    asyncio.run(run())
    return notebook


@pytest.mark.extended
@pytest.mark.parametrize("data", [1, 2])
def test_an_interrupted_cell_saves_and_leaves_no_process(
    tmp_path: Path, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    training, left, again = interrupted(tmp_path, data).cells
    assert training.outputs[-1].ename == "KeyboardInterrupt"
    said = text_of(training)
    assert "stopped after step " in said and "saved step-" in said and "Traceback" not in said
    processes = json.loads(text_of(left))
    wait_until(lambda: not running(processes), "processes of the cell run on")
    assert "nothing left to train" in text_of(again) and "step-" in text_of(again)
