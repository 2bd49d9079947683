"""Damaged and unfit Hugging Face folders: megalite convert import, and weights to start a run from."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.cli.bad_input.case import Case, train
from tests.cli.bad_input.checkpoints import STEP, checkpoint_of

NORM = "model.norm.weight"


@cache
def _pristine() -> tempfile.TemporaryDirectory[str]:
    """A small Llama as transformers saves it; removed when the process ends."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tempfile.TemporaryDirectory()
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=48,
        intermediate_size=76,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder.name)
    return folder


def folder_of(world: Path) -> Path:
    return Path(shutil.copytree(Path(_pristine().name), world / "hf"))


def importing(spoil: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    """The import of a folder after `spoil`."""

    def make(world: Path) -> list[str]:
        spoil(folder_of(world))
        return ["convert", "import", str(world / "hf"), str(world / "imported")]

    return make


def config(**changes: Any) -> Callable[[Path], list[str]]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return importing(spoil)


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], list[str]]:
    """With what `change` makes of the weights, by name."""

    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        held = load_file(path)
        change(held)
        save_file(held, path, metadata={"format": "pt"})

    return importing(spoil)


def weights(content: bytes) -> Callable[[Path], list[str]]:
    return importing(lambda folder: (folder / "model.safetensors").write_bytes(content))


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index_without_its_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {NORM: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_that_leads_away(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {NORM: "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def import_over_a_run(world: Path) -> list[str]:
    checkpoint_of(world)
    return ["convert", "import", str(folder_of(world)), str(world / "trained")]


def start_from_another_shape(world: Path) -> list[str]:
    return train(world, model__weights=str(folder_of(world)))


def start_from_nowhere(world: Path) -> list[str]:
    return train(world, model__weights=str(world / "nowhere"))


CASES = [
    Case(
        "a Hugging Face folder that is not there",
        lambda world: ["convert", "import", str(world / "no"), str(world / "imported")],
        ("no",),
    ),
    Case(
        "a folder without config.json", importing(lambda hf: (hf / "config.json").unlink()), ("config.json",)
    ),
    Case(
        "a config.json that is no JSON",
        importing(lambda hf: (hf / "config.json").write_text("{")),
        ("config.json",),
    ),
    Case(
        "a config.json that is a list",
        importing(lambda hf: (hf / "config.json").write_text("[]")),
        ("config",),
    ),
    Case("a model that is no decoder", config(model_type="bert"), ("bert", "llama")),
    Case("a hidden size that is a word", config(hidden_size="large"), ("hidden_size",)),
    Case("an activation that there is not", config(hidden_act="relu6"), ("relu6",)),
    Case(
        "a rope scaling that is not known",
        config(rope_parameters={"rope_type": "proportional", "factor": 4.0}),
        ("proportional",),
    ),
    Case(
        "a quantised model",
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        ("quantization",),
    ),
    Case("a vocabulary of another size", config(vocab_size=500), ("embed_tokens",)),
    Case("more layers than there are weights", config(num_hidden_layers=3), ("model.layers.2",)),
    Case("less layers than there are weights", config(num_hidden_layers=1), ("model.layers.1",)),
    Case(
        "a folder without weights",
        importing(lambda hf: (hf / "model.safetensors").unlink()),
        ("safetensors",),
    ),
    Case("a folder with a pickle alone", importing(only_a_pickle), ("model.safetensors", "save it again")),
    Case(
        "an index without its file", importing(index_without_its_file), ("model-00001-of-00002.safetensors",)
    ),
    Case(
        "an index that leads out of the folder",
        importing(index_that_leads_away),
        ("model.safetensors.index.json", "outside"),
    ),
    Case("weights that are no safetensors", weights(b"not at all"), ("model.safetensors",)),
    Case("weights cut short", importing(cut_short), ("model.safetensors",)),
    Case("a tensor that is missing", tensors(lambda held: held.pop(NORM)), (NORM,)),
    Case(
        "a tensor of another shape",
        tensors(lambda held: held.update({NORM: held[NORM][:-1].clone()})),
        (NORM, "48"),
    ),
    Case(
        "a tensor of whole numbers",
        tensors(lambda held: held.update({NORM: held[NORM].int()})),
        (NORM,),
    ),
    Case("an import over another run", import_over_a_run, (STEP, "name another folder")),
    Case("weights of another shape to start from", start_from_another_shape, ("model",)),
    Case("weights from nowhere to start from", start_from_nowhere, ("model.weights", "nowhere")),
]
