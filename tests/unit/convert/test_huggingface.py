"""Exports: what transformers loads is the model that was trained, or there is no export."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.tensor_file import TensorInfo, write_tensor_file
from megalite.convert.average import AveragedWeights
from megalite.convert.huggingface import export as huggingface
from megalite.convert.huggingface.export import Export, export, plan_files, rounded
from megalite.convert.huggingface.model_card import model_card
from megalite.data.text.corpus import DocumentPiece
from megalite.data.tokenizers.sentencepiece_model import PROBE_TEXTS
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.data.tokenizers.tokenizer_training import KINDS, train_into
from megalite.errors import CheckpointError, DataError
from megalite.families.registry import FAMILIES, hf_config
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.tiny import tiny_batch, tiny_corpus, tiny_shape, tiny_tokenizer
from tests.unit.checkpoint.worlds import World
from tests.unit.convert.exporting import lively_stage, our_logits, save_stage


def shape_for(tokenizer_size: int, *, tied: bool) -> ModelShape:
    return replace(
        tiny_shape(tied=tied, layers=2), vocab_size=tokenizer_size, rope_theta=5e5, rms_norm_eps=1e-6
    )


@exhibit(
    "gpt-neox#971",
    also=("gpt-neox#1317",),
    subject="folders",
    there="the exported folder lacked layers",
    here="an export has every tensor and gives the logits of the run",
    fault=faults.A_LAYER_IS_NOT_EXPORTED,
)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_was_trained(tmp_path: Path, tied: bool) -> None:
    shape = shape_for(101, tied=tied)
    stage = lively_stage(shape)
    result = export(save_stage(tmp_path, shape, stage), tmp_path / "export", None)
    assert isinstance(result, Export)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.dtype == torch.float32
    ids = tiny_batch(shape, 3).input_ids
    assert_close(model(ids).logits, our_logits(stage, ids), rtol=FLOAT32_RTOL)
    assert [check.what for check in result.comparisons] == [
        "embedding",
        result.comparisons[1].what,
        "final norm",
        "head",
        "whole model, logits",
    ]
    assert result.comparisons[0].absolute == 0.0
    assert all(check.relative < FLOAT32_RTOL for check in result.comparisons)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "export"}


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 2), Layout(4, 1, 2)])
def test_the_export_is_the_same_whatever_layout_wrote_the_checkpoint(tmp_path: Path, layout: Layout) -> None:
    shape = tiny_shape()
    for name, written_by in (("one", Layout()), ("many", layout)):
        [path, *_] = World(shape, written_by).save(tmp_path / name)
        # Random weights of standard deviation 1 saturate everything: only their bytes are compared here.
        folder = tmp_path / f"{name}-export"
        folder.mkdir()
        with AveragedWeights([path]) as reader:
            huggingface._write_weights(reader, folder, torch.float32, 10**9)
    assert (tmp_path / "one-export" / "model.safetensors").read_bytes() == (
        tmp_path / "many-export" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_after_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    shape = shape_for(101, tied=False)
    stage = lively_stage(shape)
    result = export(save_stage(tmp_path, shape, stage), tmp_path / "export", None, dtype=dtype)
    assert all(check.relative < FLOAT32_RTOL for check in result.comparisons)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.dtype == dtype
    expected = dict(stage.named_parameters())["model.layers.1.mlp.down_proj.weight"].to(dtype)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, expected)


def test_several_files_and_their_index(tmp_path: Path) -> None:
    shape = shape_for(101, tied=False)
    stage = lively_stage(shape)
    result = export(save_stage(tmp_path, shape, stage), tmp_path / "export", None, shard_size_bytes=40_000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(result.files) and len(result.files) > 3
    assert index["weight_map"].keys() == canonical_tensors(shape).keys()
    sizes = [size for size in canonical_tensors(shape).values()]
    assert index["metadata"]["total_size"] == 4 * sum(torch.Size(size).numel() for size in sizes)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "export" / file, framework="pt") as opened:
            assert tuple(opened.get_slice(name).get_shape()) == canonical_tensors(shape)[name]
    ids = tiny_batch(shape, 2).input_ids
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_close(model(ids).logits, our_logits(stage, ids), rtol=FLOAT32_RTOL)


def test_weights_are_rounded_to_nearest_with_ties_to_even() -> None:
    step = 2.0**-7  # of bfloat16 from 1 on
    values = torch.tensor([1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, -1 - step / 2, 65519.0])
    assert rounded(values, torch.bfloat16, "w").tolist() == [1, 1 + 2 * step, 1 + step, -1, 65536]
    assert rounded(values, torch.float16, "w")[-1] == 65504
    wide = torch.tensor([1 + 2**-24, 1 + 3 * 2**-24], dtype=torch.float64)
    assert rounded(wide, torch.float32, "w").tolist() == [1, 1 + 2**-22]


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 65520.0), (torch.bfloat16, -3.4e38)])
def test_a_weight_beyond_the_type_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    shape = shape_for(101, tied=True)
    stage = lively_stage(shape)
    with torch.no_grad():
        dict(stage.named_parameters())["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    checkpoint = save_stage(tmp_path, shape, stage)
    with pytest.raises(CheckpointError) as refused:
        export(checkpoint, tmp_path / "export", None, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    assert f"model.layers.1.mlp.down_proj.weight has the weight {value:g}, but the largest {name} is" in str(
        refused.value
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@exhibit(
    "torchtitan PR#3764",
    subject="folders",
    there="the index of a folder with a tied head named a head that no file had",
    here="the index names the tensors that are in the files, and no tied head",
    fault=faults.INDEX_NAMES_THE_TIED_HEAD,
)
def test_tied_weights_are_written_once_and_a_large_tensor_has_a_file_of_its_own(tmp_path: Path) -> None:
    shape = shape_for(101, tied=True)
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape))
    result = export(checkpoint, tmp_path / "export", None, dtype=torch.bfloat16, shard_size_bytes=5000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert (
        index["weight_map"].keys() == canonical_tensors(shape).keys()
        and "lm_head.weight" not in index["weight_map"]
    )
    sizes = {name: 2 * torch.Size(size).numel() for name, size in canonical_tensors(shape).items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for file in result.files:
        held = [name for name, where in index["weight_map"].items() if where == file]
        assert len(held) == 1 or sum(sizes[name] for name in held) <= 5000, file
    assert max(sizes.values()) > 5000


def test_files_are_planned_by_size_in_order() -> None:
    assert plan_files({"a": 5, "b": 5}, 10) == {"model.safetensors": ["a", "b"]}
    assert plan_files({"a": 5, "b": 30, "c": 5, "d": 5}, 10) == {
        "model-00001-of-00003.safetensors": ["a"],
        "model-00002-of-00003.safetensors": ["b"],
        "model-00003-of-00003.safetensors": ["c", "d"],
    }


def test_the_configuration_says_all_of_the_shape(tmp_path: Path) -> None:
    shape = replace(shape_for(101, tied=True), head_dim=10, max_position_embeddings=77)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, "bfloat16", {"eos_token_id": 3})))
    config = AutoConfig.from_pretrained(tmp_path)
    for name in FAMILIES["llama"].keys:
        assert getattr(config, name) == getattr(shape, name), name
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert (config.bos_token_id, config.eos_token_id) == (None, 3)
    assert config.dtype == torch.bfloat16


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    shape = shape_for(384, tied=False)
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape))
    export(checkpoint, tmp_path / "export", tmp_path / "tokenizer.json")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    text = "das Maß sums the weights.<|endoftext|>每个阶段"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    config = AutoConfig.from_pretrained(tmp_path / "export")
    assert config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    # A whole folder is copied as it is.
    export(checkpoint, tmp_path / "second", tmp_path / "export")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "export" / name).read_bytes()
    assert AutoConfig.from_pretrained(tmp_path / "second").eos_token_id == config.eos_token_id


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_tokenizer_gives_its_ids_from_the_export(tmp_path: Path, kind: str) -> None:
    train_into(
        tmp_path / "tokenizer",
        [DocumentPiece(text, ends_document=True) for text in tiny_corpus()],
        290,
        kind=kind,
        end_of_document="<end>",
    )
    shape = shape_for(290, tied=True)
    config = {"tokenizer": {"end_of_document": "<end>"}}
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape), config)
    export(checkpoint, tmp_path / "export", tmp_path / "tokenizer")
    ours = load_tokenizer(tmp_path / "tokenizer", end_of_document="<end>")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in [*PROBE_TEXTS, *tiny_corpus(), "two<end> <end>documents"]:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert AutoConfig.from_pretrained(tmp_path / "export").eos_token_id == ours.end_of_document_id


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    shape = shape_for(101, tied=False)
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape))
    with pytest.raises(CheckpointError, match="has 355 tokens, but the model only 101"):
        export(checkpoint, tmp_path / "export", tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="does not exist"):
        export(checkpoint, tmp_path / "export", tmp_path / "nowhere")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "tokenizer.json"}


def test_the_card_tells_how_the_model_was_made(tmp_path: Path) -> None:
    shape = shape_for(101, tied=True)
    export(save_stage(tmp_path, shape, lively_stage(shape)), tmp_path / "export", None)
    card = (tmp_path / "export" / "README.md").read_text()
    for fact in ("| steps | 20 |", "| tokens | 1,920 |", "| `data.source` | stdlib |", "tied", "| head |"):
        assert fact in card


@pytest.mark.parametrize(("kind", "is_chat"), [("text", False), ("instruct", True), ("preference", True)])
def test_the_card_asks_as_the_model_was_trained(tmp_path: Path, kind: str, is_chat: bool) -> None:
    shape = shape_for(101, tied=True)
    manifest = read_manifest(save_stage(tmp_path, shape, lively_stage(shape)))
    card = model_card(replace(manifest, config={"data": {"kind": kind}}), "float32", [])
    program = card[card.index("```python") + len("```python") : card.index("```\n\n## Training")]
    compile(program, "card", "exec")
    assert ("apply_chat_template" in program, "tokenizer(" in program) == (is_chat, not is_chat)


def interleaved(values: torch.Tensor, head_dim: int = 6) -> torch.Tensor:
    heads = values.view(-1, 2, head_dim // 2, values.shape[1])
    return heads.transpose(1, 2).reshape(values.shape).contiguous()


def other_weights(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """write_tensor_file with a fault: every tensor is changed on its way."""

    def write(path: Path, infos: dict[str, TensorInfo], read: Callable[[str], Iterator[torch.Tensor]]) -> Any:
        return write_tensor_file(path, infos, lambda name: change(name, torch.cat(list(read(name)))))

    return write


def forget_a_tensor(
    path: Path, infos: dict[str, TensorInfo], read: Callable[[str], Iterator[torch.Tensor]]
) -> Any:
    kept = {name: info for name, info in infos.items() if name != "model.layers.1.mlp.up_proj.weight"}
    return write_tensor_file(path, kept, read)


def swap_norms(
    path: Path, infos: dict[str, TensorInfo], read: Callable[[str], Iterator[torch.Tensor]]
) -> Any:
    swapped = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}

    def other(name: str) -> Iterator[torch.Tensor]:
        for one, two in swapped.items():
            if one in name:
                return read(name.replace(one, two))
        return read(name)

    return write_tensor_file(path, infos, other)


WEIGHT_FAULTS = {
    "query and key rows interleaved": (
        other_weights(lambda name, x: interleaved(x) if "q_proj" in name or "k_proj" in name else x),
        "decoder layers",
    ),
    "norms swapped": (swap_norms, "decoder layers"),
    "one row of the embedding lost": (
        other_weights(lambda name, x: x * (torch.arange(101) != 100).unsqueeze(1) if "embed" in name else x),
        "embedding",
    ),
    "a head that is not a number": (
        other_weights(lambda name, x: x.index_fill(0, torch.tensor([5]), torch.nan) if "lm_head" in name else x),
        "head",
    ),
    "a tensor left out": (forget_a_tensor, "up_proj"),
}  # fmt: skip


@exhibit(
    "torchtitan#1454",
    subject="folders",
    there="the two norms of each layer were exchanged in the exported folder",
    here="exchanged norms are found before the folder appears",
    fault=faults.EXPORTS_ARE_NOT_COMPARED,
    case="5.0-norms swapped",
)
@exhibit(
    "nanotron#241",
    also=("nanotron PR#427", "torchtitan PR#1441"),
    subject="folders",
    there="rows of queries and keys were written in another order; no shape and no name told",
    here="an export whose logits differ is refused, with the part named",
    fault=faults.EXPORTS_ARE_NOT_COMPARED,
    case="1.0-query and key rows interleaved",
)
@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_an_export_with_wrong_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, scale: float
) -> None:
    write, message = WEIGHT_FAULTS[fault]
    monkeypatch.setattr(huggingface, "write_tensor_file", write)
    shape = shape_for(101, tied=False)
    with pytest.raises(CheckpointError, match=message):
        export(save_stage(tmp_path, shape, lively_stage(shape, scale=scale)), tmp_path / "export", None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


CONFIG_FAULTS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rms_norm_eps": 1e-2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("key", CONFIG_FAULTS)
def test_an_export_with_a_wrong_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    real = hf_config
    monkeypatch.setattr(huggingface, "hf_config", lambda *given: real(*given) | {key: CONFIG_FAULTS[key]})
    shape = shape_for(101, tied=False)
    with pytest.raises((CheckpointError, RuntimeError)):
        export(save_stage(tmp_path, shape, lively_stage(shape)), tmp_path / "export", None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_an_earlier_export_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    shape = shape_for(101, tied=False)
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape))
    export(checkpoint, tmp_path / "export", None)
    (tmp_path / "export" / "of-the-first").touch()
    export(checkpoint, tmp_path / "export", None)
    assert not (tmp_path / "export" / "of-the-first").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match="is neither empty nor a Hugging Face export written by megalite"
    ):
        export(checkpoint, tmp_path / "mine", None)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        export(checkpoint, tmp_path / "file", None)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "export", "mine", "file"}
