"""Low-rank adapters of experts in PEFT's files: PEFT's model on transformers' one computes ours."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from megalite.checkpoint.folder import find_checkpoint
from megalite.config.peft_names import beyond_transformers_5
from megalite.config.sources.peft import adapter_of_folder
from megalite.convert.huggingface.export import export
from megalite.convert.peft.export import export_adapter
from megalite.generation.loaded import load
from megalite.topology.adapter import PROJECTIONS, Lora
from tests.support.adapters import adapter_run
from tests.support.parity import FLOAT32_RTOL, assert_close, relative_error
from tests.support.selection import cases
from tests.support.tiny import MIXTURE_SHAPES, tiny_tokenizer
from tests.unit.families.test_mixtures import their_model

VOCABULARY = 384
EXPERTS = ("*.experts.*.gate_proj", "*.experts.*.up_proj", "*.experts.*.down_proj")
LORAS = {
    "all": Lora(3, 6.0, PROJECTIONS),
    "rslora": Lora(4, 3.0, PROJECTIONS, rslora=True),
    "one layer": Lora(2, 4.0, ("q_proj", *(f"*.2.mlp.{name[2:]}" for name in EXPERTS))),
    "down": Lora(2, 4.0, ("*.experts.*.down_proj",)),
}
CASES = [(family, name) for family in ("mixtral", "qwen3_moe", "olmoe") for name in LORAS]
CORE = [("mixtral", "all"), ("qwen3_moe", "rslora"), ("olmoe", "one layer")]


def adapted(folder: Path, family: str, lora: Lora) -> Path:
    """Write a base, a run of its adapter and the adapter's export into a folder; return the run."""
    base = folder / "base"
    base.mkdir()
    their_model(replace(MIXTURE_SHAPES[family], vocab_size=VOCABULARY), base).save_pretrained(base)
    tiny_tokenizer(folder)
    run = adapter_run(folder / "run", base, lora)
    export_adapter(find_checkpoint(run), folder / "adapter", None)
    return run


@pytest.mark.parametrize(("family", "name"), cases(CASES, core=CORE))
def test_peft_computes_the_logits_of_our_export(family: str, name: str, tmp_path: Path) -> None:
    run = adapted(tmp_path, family, LORAS[name])
    words = tmp_path / "tokenizer.json"
    input_ids = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(4))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        before = base(input_ids).logits
        expected = PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids).logits
    assert relative_error(before, expected) > 0.1
    for source in (run, tmp_path / "adapter"):
        ours = load(source, tokenizer=words).logits(input_ids)
        assert_close(ours, expected, rtol=FLOAT32_RTOL, what=source.name)
    merged = export(find_checkpoint(run), tmp_path / "merged", None)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(merged.folder)(input_ids).logits
    assert_close(logits, expected, rtol=FLOAT32_RTOL, what="merged")


def test_thousands_of_experts_are_named_by_words(tmp_path: Path) -> None:
    adapted(tmp_path, "mixtral", LORAS["all"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj", "w1", "w3", "w2"]
    again = adapter_of_folder(tmp_path / "adapter", "mixtral")
    assert isinstance(again, Lora) and sorted(again.targets) == sorted(PROJECTIONS[:7])


def test_an_expert_named_by_mixtral_is_ours(tmp_path: Path) -> None:
    named = {"target_modules": ["model.layers.2.block_sparse_moe.experts.11.w3"], "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(named))
    adapter = adapter_of_folder(tmp_path, "mixtral")
    assert isinstance(adapter, Lora) and adapter.targets == ("model.layers.2.mlp.experts.11.up_proj",)


@pytest.mark.parametrize(
    ("family", "targets", "lost"),
    [
        ("mixtral", PROJECTIONS, None),
        ("mixtral", ("gate_proj",), "model.layers.0.mlp.experts.0.gate_proj"),
        ("qwen3_moe, dense layers, windows, biases", PROJECTIONS, "model.layers.0.mlp.gate_proj"),
        ("qwen3_moe, dense layers, windows, biases", ("q_proj",), None),
    ],
)
def test_what_peft_loses_beside_transformers_5(
    family: str, targets: tuple[str, ...], lost: str | None
) -> None:
    shape = replace(MIXTURE_SHAPES[family], adapter=Lora(2, 4.0, targets))
    assert beyond_transformers_5(shape) == lost
