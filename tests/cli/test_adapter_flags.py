"""--adapter of megalite generate and serve: files of requests, and each adapter that cannot stand beside MODEL."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import megalite
from megalite.cli import generate, main, serve
from megalite.convert.huggingface.export import export
from megalite.errors import CheckpointError, ConfigError
from megalite.topology.adapter import Lora, Prefix
from tests.support.adapters import adapter_run, peft_folder
from tests.support.tiny import FAMILY_SHAPES, tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

A = Lora(2, 4.0, ("q_proj", "down_proj"))
B = Lora(5, 4.0, ("o_proj", "up_proj"), rslora=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, its adapters `a` (PEFT's) and `b` (a run), other weights in `other`, and requests."""
    folder = tmp_path_factory.mktemp("place")
    shape = replace(tiny_shape(layers=2), vocab_size=384, max_position_embeddings=256)
    for name, scale in (("base", 8.0), ("other", 7.0)):
        run = save_stage(folder / f"run-{name}", shape, lively_stage(shape, scale=scale))
        export(run, folder / name, None)
        tiny_tokenizer(folder / name)
    peft_folder(folder / "a", folder / "base", A, seed=1)
    adapter_run(folder / "b", folder / "base", B, seed=2)
    rows = [{"prompt": "one rank", "adapter": name} for name in ("a", "b", "a")]
    lines = [json.dumps(row) for row in ({"prompt": "one rank"}, *rows)]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    return folder


def test_each_line_of_a_file_names_its_adapter(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapters = ["--adapter", f"a={place / 'a'}", "--adapter", f"b={place / 'b'}"]
    batch = ["--batch", str(place / "requests.jsonl"), "--tokens", "12"]
    assert generate.run([str(place / "base"), *batch, *adapters]) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    tokenizer = place / "base" / "tokenizer.json"
    alone = [
        megalite.generate(megalite.load(place / name, tokenizer=tokenizer), "one rank", tokens=12)
        for name in ("base", "a", "b", "a")
    ]
    assert ["one rank" + text for text in texts] == alone and len(set(texts)) == 3
    loaded = megalite.load(place / "base", adapters={"a": place / "a", "b": place / "b"})
    again = [megalite.generate(loaded, "one rank", tokens=12, adapter=each) for each in (None, "a", "b", "a")]
    assert again == alone
    with pytest.raises(ConfigError, match=r"adapter: 'x' is not one of the model's adapters; use a or b, or"):
        megalite.generate(loaded, "one rank", adapter="x")


def test_a_line_with_an_unknown_adapter_is_named_before_anything_runs(place: Path) -> None:
    batch = [str(place / "base"), "--batch", str(place / "requests.jsonl"), "--adapter", f"a={place / 'a'}"]
    with pytest.raises(
        ConfigError, match=r"requests.jsonl:3: adapter: 'b' is not one of the model's adapters"
    ):
        generate.run(batch)
    with pytest.raises(ConfigError, match=r":2: adapter: .* leave it out: no adapter is loaded"):
        generate.run(batch[:3])


def test_flags_that_cannot_be(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, one = str(place / "base"), f"a={place / 'a'}"
    with pytest.raises(ConfigError, match=rf"--adapter: is for --batch; name .* merges it: {place / 'a'}"):
        generate.run([base, "--prompt", "x", "--adapter", one])
    absent = f"a={place / 'absent'}"
    with pytest.raises(ConfigError, match=rf"--adapter: is for --batch; .*; {place / 'absent'} is no folder"):
        generate.run([base, "--prompt", "x", "--adapter", absent])
    with pytest.raises(ConfigError, match="'a' is the name of the base model, too"):
        serve.run([base, "--model-name", "a", "--adapter", one])
    for wrong, told in (("a", "is not of the form NAME=FOLDER"), ("=x", "is not of the form")):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", base, "--adapter", wrong])
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["serve", base, "--adapter", one, "--adapter", "a=elsewhere"])
    assert f"another adapter has this name, {place / 'a'}; rename one" in capsys.readouterr().err


def refused(model: Path, adapter: Path) -> str:
    """Return the error of a server, which is one line."""
    with pytest.raises(CheckpointError) as error:
        serve.run([str(model), "--adapter", f"mine={adapter}"])
    assert "\n" not in str(error.value)
    return str(error.value)


PECULIAR = {
    "DoRA's magnitudes": replace(A, dora=True),
    "whole modules (model.norm)": replace(A, modules_to_save=("model.norm",)),
    "trained biases (bias = 'all')": replace(A, bias="all"),
}


@pytest.mark.parametrize("told", PECULIAR)
def test_an_adapter_of_more_than_low_ranks_is_refused(place: Path, tmp_path: Path, told: str) -> None:
    folder = peft_folder(tmp_path / "peft", place / "base", PECULIAR[told])
    message = refused(place / "base", folder)
    assert (
        message.startswith(f"the adapter mine: {folder} has {told}, ")
        and "as MODEL, which merges it" in message
    )
    run = adapter_run(tmp_path / "run", place / "base", PECULIAR[told])
    message, checkpoint = refused(place / "base", run), run / "checkpoints" / "step-000001"
    assert f"merge it (megalite convert export {checkpoint} OUTPUT) and name OUTPUT as MODEL" in message


def test_a_prefix_and_a_whole_model_are_refused(place: Path, tmp_path: Path) -> None:
    run = adapter_run(tmp_path / "run", place / "base", Prefix(3))
    assert "is a prefix, which stands in front of every request" in refused(place / "base", run)
    for whole in (place / "run-other", place / "other"):
        assert "holds a whole model, not an adapter; name it as MODEL" in refused(place / "base", whole)
    assert "does not exist" in refused(place / "base", tmp_path / "absent")


def test_an_adapter_of_other_weights_is_refused(place: Path, tmp_path: Path) -> None:
    told = f"was trained on other weights ({place / 'base'}) than those of {place / 'other'}; name the model that"
    assert told in refused(place / "other", place / "b")
    # PEFT's folder has no fingerprint unless megalite wrote it.
    (tmp_path / "theirs").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "theirs" / name).symlink_to(place / "a" / name)
    base = json.dumps({"weights": "elsewhere", "fingerprint": "0" * 64})
    (tmp_path / "theirs" / "megalite_base.json").write_text(base)
    assert "was trained on other weights (elsewhere)" in refused(place / "base", tmp_path / "theirs")


def test_an_adapter_of_other_sizes_is_refused(place: Path, tmp_path: Path) -> None:
    shape = replace(tiny_shape(layers=2), vocab_size=384, intermediate_size=40)
    export(save_stage(tmp_path / "run", shape, lively_stage(shape)), tmp_path / "small", None)
    tiny_tokenizer(tmp_path / "small")
    message = refused(tmp_path / "small", place / "a")
    assert (
        "mlp.down_proj.lora_A.weight is [2, 76], and the model has [2, 40]; name the model that it" in message
    )
    shape = replace(shape, intermediate_size=76, num_hidden_layers=1)
    export(save_stage(tmp_path / "run", shape, lively_stage(shape), step=21), tmp_path / "short", None)
    tiny_tokenizer(tmp_path / "short")
    assert "has, beyond the model's linears, base_model.model.model.layers.1." in refused(
        tmp_path / "short", place / "a"
    )


def test_a_model_that_is_no_folder_of_weights_is_refused(place: Path) -> None:
    tokenizer = ["--tokenizer", str(place / "base" / "tokenizer.json"), "--adapter", f"b={place / 'b'}"]
    with pytest.raises(CheckpointError, match=r"is an adapter itself; name its base as MODEL: .*base"):
        serve.run([str(place / "a"), *tokenizer])
    with pytest.raises(
        CheckpointError, match="is a checkpoint, and adapters belong to a Hugging Face folder"
    ):
        serve.run([str(place / "run-base"), *tokenizer])


def test_a_folder_of_fused_linears_is_refused(tmp_path: Path) -> None:
    shape = FAMILY_SHAPES["gpt2"]
    export(save_stage(tmp_path, shape, lively_stage(shape)), tmp_path / "base", None)
    tiny_tokenizer(tmp_path / "base")
    folder = peft_folder(tmp_path / "a", tmp_path / "base", replace(A, targets=("q_proj",)))
    assert "which holds several linears; merge it with PEFT" in refused(tmp_path / "base", folder)
