"""The ends of a text: of a run on conversations, of its export, and of an adapter, in every command alike."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from megalite.convert.huggingface.export import export
from megalite.convert.huggingface.origin import FOLDER
from megalite.data.tokenizers.tokenizer import END_OF_DOCUMENT, Tokenizer, add_special_tokens, load_tokenizer
from megalite.evaluate.answers import TextPrompt, answers
from megalite.generation import text
from megalite.generation.loaded import LoadedModel, load
from megalite.generation.prompts import prompt_ids
from megalite.generation.request import GREEDY, Request
from megalite.generation.request_file import read_requests
from megalite.generation.source import find_source
from megalite.generation.stops import stops_of
from tests.support.generation import generate_ids
from tests.support.museum import exhibit
from tests.support.planted import Planted
from tests.support.selection import cases
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage
from tests.unit.data.chat.test_turn_end import GEMMA


def saved(folder: Path, *, added: bool, kind: str = "instruct") -> tuple[Path, Tokenizer]:
    """A checkpoint of a run on conversations, whose tokenizer has Gemma's template and maybe its marks."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    tiny_tokenizer(tokenizer)
    config = {"eos_token": END_OF_DOCUMENT, "chat_template": GEMMA}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    if added:
        add_special_tokens(tokenizer, ["<start_of_turn>", "<end_of_turn>"])
    loaded = load_tokenizer(tokenizer)
    shape = replace(tiny_shape(tied=False, layers=2), vocab_size=loaded.vocab_size)
    return save_stage(folder, shape, lively_stage(shape), {"data": {"kind": kind}}), loaded


@exhibit(
    "axolotl#3754",
    also=("axolotl PR#3756",),
    subject="conversations",
    there="a chat template ended turns with another token than `eos_token`, and the model went on behind it",
    here="the turn's own end stops `generate`, and stands in the export's `generation_config.json`",
    fault=Planted("megalite.data.chat.turn_end:_first_token", lambda _: lambda behind, tokenizer: None),
)
@pytest.mark.parametrize("kind", cases(["instruct", "preference", "text"], core=["instruct"]))
def test_the_end_of_a_turn_ends_the_text_of_a_run_and_of_its_export(tmp_path: Path, kind: str) -> None:
    checkpoint, tokenizer = saved(tmp_path, added=True, kind=kind)
    export(checkpoint, tmp_path / "export", tmp_path / "tokenizer")
    end, turn = tokenizer.end_of_document_id, tokenizer.backend.token_to_id("<end_of_turn>")
    expected = [end] if kind == "text" else [end, turn]
    written = GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id
    assert written == (end if kind == "text" else expected)
    for path in (tmp_path, checkpoint, tmp_path / "export"):
        stops = stops_of(find_source(path), tokenizer)
        assert (stops.ids, stops.texts) == (frozenset(expected), ())


def test_marks_without_tokens_end_it_as_text(tmp_path: Path) -> None:
    checkpoint, tokenizer = saved(tmp_path, added=False)
    export(checkpoint, tmp_path / "export", tmp_path / "tokenizer")
    for path in (tmp_path, tmp_path / "export"):
        stops = stops_of(find_source(path), tokenizer)
        assert (stops.ids, stops.texts) == ({tokenizer.end_of_document_id}, ("<end_of_turn>",))
    lines = [{"prompt": "a"}, {"prompt": "a", "stop": "b"}, {"messages": [{"role": "user", "content": "a"}]}]
    (tmp_path / "requests").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first = Request((), 4, GREEDY, frozenset())
    source = find_source(tmp_path)
    found = [each.request.stop for each in read_requests(tmp_path / "requests", first, source, tokenizer)]
    assert found == [("<end_of_turn>",), ("b", "<end_of_turn>"), ("<end_of_turn>",)]


def test_ids_of_the_weights_that_a_run_began_with_end_it_too(tmp_path: Path) -> None:
    checkpoint, tokenizer = saved(tmp_path, added=True)
    end, turn = tokenizer.end_of_document_id, tokenizer.backend.token_to_id("<end_of_turn>")
    (tmp_path / FOLDER).mkdir()
    for ids, expected in (([end, 5], {end, 5, turn}), ([5, 6], {end, turn})):  # [5, 6]: of another tokenizer
        content: dict[str, Any] = {"model_type": "llama", "eos_token_id": ids}
        for name in ("config.json", "generation_config.json"):
            (tmp_path / FOLDER / name).write_text(json.dumps(content))
        assert stops_of(find_source(checkpoint), tokenizer).ids == expected


def test_generate_and_evaluate_stop_there(tmp_path: Path) -> None:
    """A model that would write on stops at what a greedy text of it has as its fifth token."""
    checkpoint, tokenizer = saved(tmp_path, added=True, kind="text")
    free = load(checkpoint)
    ids = list(generate_ids(free.replica, prompt_ids(tokenizer, "the tensor"), new_tokens=12))
    stop = ids[4]
    expected = ids[: ids.index(stop)]
    stopped = LoadedModel(free.replica, free.tokenizer, replace(free.source, end_ids=frozenset([stop, 0])))
    assert text.generate(stopped, "the tensor", tokens=12) == "the tensor" + tokenizer.decode(expected)
    [answer] = answers(stopped, [TextPrompt("the tensor")], 12)
    assert answer == tokenizer.decode(expected)
