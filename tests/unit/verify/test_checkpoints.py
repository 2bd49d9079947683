"""Two checkpoints are told apart: what differs is named with its size, and nothing else is."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.folder import find_latest
from megalite.checkpoint.regions import index_in
from megalite.checkpoint.tensor_file import DTYPES
from megalite.checkpoint.weights import BLOCK_ELEMENTS, WeightReader
from megalite.cli import main
from megalite.convert.foreign.streamed import ImportedRun, write_streamed
from megalite.convert.huggingface.export import as_family_tensor
from megalite.convert.torch_dcp.load import halves_of_heads
from megalite.errors import CheckpointError
from megalite.families.registry import family_tensors, hf_config
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import MASTER, WEIGHT, state_tensors
from megalite.verify.chaos.equality import compare
from megalite.verify.checkpoints import CheckpointComparison, compare_checkpoints
from tests.support.adapters import adapter_run, peft_folder
from tests.support.engine_folders import EngineFolder, random_states
from tests.support.foreign import import_folder
from tests.support.megatron_writer import Written, write_megatron
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES, tiny_shape
from tests.unit.checkpoint.worlds import World

SHAPE = tiny_shape(layers=2)
KEYS = (WEIGHT, "exp_avg", "exp_avg_sq")
QUERY, KEY = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
FIRST_NORM, SECOND_NORM = (f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention"))
Content = dict[str, dict[str, Tensor]]


class HeldTensors(WeightReader):
    """Tensors in memory, by state key and canonical name."""

    def __init__(self, content: Content):
        self._content = content

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        whole = self._content[state_key][name]
        return whole[index_in(region, TensorSlice((0,) * whole.dim(), tuple(whole.shape)))]

    def close(self) -> None:
        """Nothing is open."""


def random_content(shape: ModelShape = SHAPE, keys: tuple[str, ...] = KEYS) -> Content:
    generator = torch.Generator().manual_seed(3)
    return {
        key: {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
        for key, sizes in state_tensors(shape, keys).items()
    }


def written(
    folder: Path,
    content: Content,
    shape: ModelShape = SHAPE,
    *,
    dtype: str = "float32",
    state: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
) -> Path:
    """One checkpoint of one process, of run folder `folder`."""
    run = ImportedRun(
        shape,
        {"optimizer": {"name": "adamw", "learning_rate": 0.1}},
        DTYPES[dtype],
        tuple(content),
        {"step": 3, "samples": 24, "tokens": 96, **(state or {})},
        optimizer or {"step": 3.0},
    )
    write_streamed(folder, run, HeldTensors(content))
    return folder


def exported(folder: Path, weights: Mapping[str, Tensor], shape: ModelShape, dtype: torch.dtype) -> Path:
    """A Hugging Face folder with these canonical weights."""
    folder.mkdir()
    tensors = {
        tensor.name: as_family_tensor(tensor, [weights[part] for part in tensor.parts]).to(dtype)
        for tensor in family_tensors(shape)
    }
    save_file(tensors, folder / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(hf_config(shape, name, {})))
    return folder


def compared(one: Path, other: Path, tolerance: float = 0.0) -> CheckpointComparison:
    return compare_checkpoints(str(one), str(other), tolerance=tolerance)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("sound") / "run", random_content())


def changed(key: str, name: str, change: Callable[[Tensor], Any]) -> Content:
    """The content of `sound` after `change` has worked on one tensor in place."""
    content = random_content()
    change(content[key][name])
    return content


@pytest.mark.parametrize(
    ("layout", "cuts"),
    [(Layout(tensor=2, pipeline=2, data=2), (0.3, 0.6, 0.9)), (Layout(tensor=4, data=3), (0.1, 0.2, 0.5))],
)
def test_checkpoints_of_any_layout_with_the_same_content_are_identical(
    tmp_path: Path, layout: Layout, cuts: tuple[float, ...]
) -> None:
    shape = tiny_shape(tied=False)
    [one, *_] = World(shape, Layout()).save(tmp_path / "one")
    [other, *_] = World(shape, layout, cuts=cuts).save(tmp_path / "other")
    result = compared(one, other)
    assert result.verdict == "identical" and not result.tensors and not result.not_compared
    assert result.compared.keys() == set(KEYS) and result.scalars_compared
    [newer, *_] = World(shape, layout, cuts=cuts).save(tmp_path / "newer", version=1)
    assert len(compared(one, newer).differing) == 3 * len(canonical_tensors(shape))


@pytest.mark.parametrize("key", KEYS)
def test_one_flipped_element_is_named(tmp_path: Path, sound: Path, key: str) -> None:
    def flip(tensor: Tensor) -> None:
        tensor[5, 7] = torch.nextafter(tensor[5, 7], torch.tensor(math.inf))

    other = written(tmp_path / "other", changed(key, QUERY, flip))
    result = compared(sound, other)
    [found] = result.differing
    assert (found.state, found.name, found.differing, found.first) == (key, QUERY, 1, (5, 7))
    assert found.ulp == 1 and 0 < found.norm < found.relative < FLOAT32_RTOL
    assert not found.reordered and result.verdict == "different" and result.exit_code == 1
    assert compared(sound, other, tolerance=FLOAT32_RTOL).verdict == "within tolerance"


def test_elements_behind_the_first_block_have_their_own_index(tmp_path: Path) -> None:
    rows = 2 * BLOCK_ELEMENTS // SHAPE.hidden_size + 3
    shape = replace(SHAPE, vocab_size=rows, num_hidden_layers=1, tie_word_embeddings=True)
    content = random_content(shape, (WEIGHT,))
    one = written(tmp_path / "one", content, shape)
    table = content[WEIGHT]["model.embed_tokens.weight"]
    table[rows - 2, 1] += 1
    table[rows // 2 + 1, 3] -= 2
    [found] = compared(one, written(tmp_path / "other", content, shape)).differing
    assert (found.differing, found.first) == (2, (rows // 2 + 1, 3))
    assert_close(found.max_absolute, 2.0, rtol=FLOAT32_RTOL)


def test_a_wrong_permutation_of_query_rows_is_called_one(tmp_path: Path, sound: Path) -> None:
    """Rotated pairs instead of halves: nanotron#241."""
    heads = SHAPE.num_attention_heads
    other = changed(WEIGHT, QUERY, lambda query: query.copy_(halves_of_heads(query.clone(), heads)))
    [found] = compared(sound, written(tmp_path / "other", other)).differing
    assert found.name == QUERY and found.reordered


def test_swapped_norms_are_named_by_each_other(tmp_path: Path, sound: Path) -> None:
    content = random_content()
    weights = content[WEIGHT]
    weights[FIRST_NORM], weights[SECOND_NORM] = weights[SECOND_NORM], weights[FIRST_NORM]
    result = compared(sound, written(tmp_path / "other", content))
    assert result.like == {(WEIGHT, FIRST_NORM): SECOND_NORM, (WEIGHT, SECOND_NORM): FIRST_NORM}


def test_an_export_that_rounds_is_equal_and_one_wrong_rounding_is_not(tmp_path: Path, sound: Path) -> None:
    weights = random_content()[WEIGHT]
    result = compared(sound, exported(tmp_path / "bf16", weights, SHAPE, torch.bfloat16))
    assert result.verdict == "rounded" and result.exit_code == 0
    assert {found.rounded for found in result.differing} == {"B"}
    assert compared(tmp_path / "bf16", sound).differing[0].rounded == "A"
    assert any("exp_avg of A" in line for line in result.not_compared)
    weights[KEY] = weights[KEY].clone()
    weights[KEY][0, 1] *= 1.01
    result = compared(sound, exported(tmp_path / "wrong", weights, SHAPE, torch.bfloat16))
    assert result.verdict == "different" and result.differing[0].name == KEY
    assert [found.name for found in result.differing if found.rounded is None] == [KEY]


@pytest.mark.parametrize("shape", [*FAMILY_SHAPES.values(), *MIXTURE_SHAPES.values()])
def test_a_folder_of_every_family_equals_its_checkpoint(tmp_path: Path, shape: ModelShape) -> None:
    content = random_content(shape, (WEIGHT,))
    one = written(tmp_path / "run", content, shape)
    result = compared(one, exported(tmp_path / "export", content[WEIGHT], shape, torch.float32))
    assert result.verdict == "identical", [*result.scalars, *result.differing]


def test_masters_are_compared_with_the_weights_of_a_run_without(tmp_path: Path, sound: Path) -> None:
    content = random_content(keys=(*KEYS, MASTER))
    content[MASTER] = random_content()[WEIGHT]
    content[WEIGHT] = {name: tensor.bfloat16() for name, tensor in content[MASTER].items()}
    for key in KEYS[1:]:
        content[key] = random_content()[key]
    with_masters = written(tmp_path / "other", content)
    result = compared(sound, with_masters)
    assert result.compared.keys() == {*KEYS, MASTER}
    assert {found.state for found in result.differing} == {WEIGHT}
    folder = exported(tmp_path / "export", content[MASTER], SHAPE, torch.float32)
    assert compared(with_masters, folder).verdict == "identical"


def test_an_adapter_is_compared_alone_or_merged_into_its_base(tmp_path: Path) -> None:
    weights = random_content()[WEIGHT]
    base = exported(tmp_path / "base", weights, SHAPE, torch.float64)
    lora = Lora(3, 6.0, ("q_proj",))
    run, folder = adapter_run(tmp_path / "run", base, lora), peft_folder(tmp_path / "peft", base, lora)
    assert compared(run, folder).verdict == "identical"
    result = compared(folder, base)
    assert {found.name for found in result.differing} == {QUERY, QUERY.replace("1", "0")}
    other = peft_folder(tmp_path / "other", base, replace(lora, alpha=3.0), seed=1)
    result = compared(run, other)
    assert [(each.name, each.a, each.b) for each in result.scalars] == [("adapter.alpha", 6.0, 3.0)]
    assert len(result.differing) == 2 * SHAPE.num_hidden_layers


def test_values_beside_the_tensors_count(tmp_path: Path, sound: Path) -> None:
    other = written(
        tmp_path / "other",
        random_content(),
        state={"samples": 32},
        optimizer={"step": 3.0, "loss_scale": 512.0},
    )
    result = compared(sound, other)
    assert not result.differing and result.verdict == "different"
    assert [(each.name, each.a, each.b) for each in result.scalars] == [
        ("samples", 24, 32),
        ("optimizer.loss_scale", None, 512.0),
    ]
    assert compared(sound, other, tolerance=FLOAT32_RTOL).verdict == "different"


def test_nan_equals_nan_in_its_place_only(tmp_path: Path) -> None:
    content = changed(WEIGHT, QUERY, lambda tensor: tensor[2].fill_(math.nan))
    one = written(tmp_path / "one", content)
    result = compared(one, written(tmp_path / "other", content))
    assert result.verdict == "identical" and result.both_nan == {f"weight of {QUERY}": SHAPE.hidden_size}
    content[WEIGHT][QUERY][2, 1], content[WEIGHT][QUERY][0, 3] = 0.0, math.inf
    [found] = compared(one, written(tmp_path / "third", content)).differing
    assert (found.differing, found.max_absolute, found.first) == (2, math.inf, (0, 3))
    assert found.both_nan == SHAPE.hidden_size - 1


def test_states_and_tensors_of_one_side_are_named(tmp_path: Path, sound: Path) -> None:
    alone = written(tmp_path / "weights", {WEIGHT: random_content()[WEIGHT]})
    result = compared(sound, alone)
    assert result.verdict == "different" and f"exp_avg of {QUERY}" in result.only["A"]
    tied = replace(SHAPE, tie_word_embeddings=True)
    content = random_content(tied, (WEIGHT,))
    result = compared(alone, written(tmp_path / "tied", content, tied))
    assert result.only == {"A": ["weight of lm_head.weight"], "B": []}
    assert [each.name for each in result.scalars] == ["model.tie_word_embeddings"]


def test_a_disturbed_run_without_a_weight_is_not_equal(tmp_path: Path, sound: Path) -> None:
    tied = replace(SHAPE, tie_word_embeddings=True)
    disturbed = written(tmp_path / "tied", random_content(tied, (WEIGHT,)), tied)
    for folder in (disturbed, sound):
        (folder / "metrics.jsonl").touch()
    result = compare(disturbed, sound, find_latest(sound / "checkpoints"), bitwise=False)
    assert "lm_head.weight after step 3: inf" in result.different


def test_different_models_get_one_message(tmp_path: Path, sound: Path) -> None:
    wider = replace(SHAPE, intermediate_size=SHAPE.intermediate_size + 8)
    other = written(tmp_path / "other", random_content(wider), wider)
    message = f"different models.* model.intermediate_size is {SHAPE.intermediate_size} and"
    with pytest.raises(CheckpointError, match=message):
        compared(sound, other)
    gpt2 = replace(FAMILY_SHAPES["gpt2"], num_hidden_layers=2)
    other = written(tmp_path / "gpt2", random_content(gpt2), gpt2)
    with pytest.raises(CheckpointError, match=r"model\.family is llama and gpt2"):
        compared(sound, other)


def test_a_damaged_checkpoint_is_refused_by_its_reader(tmp_path: Path, sound: Path) -> None:
    other = written(tmp_path / "other", random_content())
    [file] = other.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="are not those that were written"):
        compared(sound, other)
    folder = exported(tmp_path / "export", random_content()[WEIGHT], SHAPE, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        compared(sound, folder)


def engine_folder(folder: Path, spoil: Callable[[dict[str, dict[str, Tensor]]], Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(SHAPE, "float32", {})))
    states = random_states(SHAPE)
    if spoil is not None:
        spoil(states)
    EngineFolder(states, 2, 3).write(folder)
    return folder


def test_an_engine_of_deepspeed_is_told_from_ours_by_one_moment(tmp_path: Path) -> None:
    folder = engine_folder(tmp_path / "engine")
    import_folder(folder, tmp_path / "run")
    result = compared(folder, tmp_path / "run")
    assert result.verdict == "identical" and result.compared.keys() == set(KEYS)
    assert result.scalars_compared >= 4
    spoilt = engine_folder(
        tmp_path / "spoilt", lambda states: states["model.norm.weight"]["exp_avg"][4].zero_()
    )
    [found] = compared(spoilt, folder).differing
    assert (found.state, found.name, found.first) == ("exp_avg", "model.norm.weight", (4,))


def test_megatron_and_deepspeed_are_compared_by_canonical_names(tmp_path: Path) -> None:
    weights = {name: tensor["fp32"].double() for name, tensor in random_states(SHAPE).items()}
    write_megatron(tmp_path / "megatron", SHAPE, weights, Written(tensor=2, pipeline=2))
    result = compared(tmp_path / "megatron", engine_folder(tmp_path / "engine"))
    assert result.compared.keys() == {WEIGHT} and result.verdict == "identical", result.scalars


def test_the_command_prints_the_worst_first_and_one_document(
    tmp_path: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = random_content()
    content[WEIGHT][KEY][0, 0] += 1e-3
    content[WEIGHT][QUERY][0, 1] += 1.0
    two = ["verify", "--checkpoint", str(sound), str(written(tmp_path / "other", content))]
    assert main(two) == 1
    shown = capsys.readouterr().out
    assert "different: 2 of 63 tensors" in shown and shown.index(QUERY) < shown.index(KEY)
    assert main([*two, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 1 and document["verdict"] == "different"
    assert [each["name"] for each in document["tensors"]] == [QUERY, KEY]
    assert main([*two[:3], str(sound)]) == 0
    assert "identical: 0 of 63 tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (["--vocab-size", "5"], "both checkpoints say that themselves; leave out --vocab-size"),
        (["--training.steps=5"], "unrecognized arguments: --training.steps"),
        (["run.toml"], "run.toml: has no effect with --checkpoint; leave it out"),
        (["--output", "c.json"], "--output: has no effect with --checkpoint; leave it out"),
        (["--tolerance", "0"], "not a number above 0"),
    ],
)
def test_what_belongs_to_another_mode_is_refused(
    sound: Path, capsys: pytest.CaptureFixture[str], beside: list[str], message: str
) -> None:
    try:
        code = main(["verify", *beside, "--checkpoint", str(sound), str(sound)])
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2 and message in capsys.readouterr().err


def test_a_path_without_a_checkpoint_is_named(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--checkpoint", str(sound), f"{sound}-nowhere"]) == 2
    assert "does not exist" in capsys.readouterr().err
