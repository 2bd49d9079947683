"""How chat templates end answers, and what is said before training where other programs would not stop."""

import shlex
import tomllib
from pathlib import Path

import pytest

from megalite.cli import main
from megalite.config.sections.text_sections import TokenizerConfig
from megalite.data.chat.chat_template import BUILT_IN, ChatTemplate
from megalite.data.chat.turn_end import TurnEnd, turn_end, turn_end_notes
from megalite.data.files.prepared import prepared_facts
from megalite.data.tokenizers.tokenizer import Tokenizer, add_special_tokens, load_tokenizer, save_tokenizer

END = "<|endoftext|>"
SPECIAL = (("bos_token", END), ("eos_token", END))
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
SPACED = "{% for m in messages %}{{ m.content }}{{ ' \n' + eos_token if m.role == 'assistant' else '|' }}{% endfor %}"
STRICT = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + GEMMA
UNTRAINED = GEMMA.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
NOTHING = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def marked(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer with the marks of Gemma's template."""
    folder = tmp_path_factory.mktemp("marked")
    save_tokenizer(tokenizer.backend, folder, END)
    add_special_tokens(folder, ["<start_of_turn>", "<end_of_turn>"])
    return load_tokenizer(folder)


def template(text: str) -> ChatTemplate:
    return ChatTemplate("a.jinja", text, SPECIAL)


@pytest.mark.parametrize("text", [GEMMA, STRICT, UNTRAINED])
def test_a_turn_ends_in_a_token_or_in_text(tokenizer: Tokenizer, marked: Tokenizer, text: str) -> None:
    end = turn_end(template(text), marked)
    assert end == TurnEnd(frozenset([marked.backend.token_to_id("<end_of_turn>")]), trained=text != UNTRAINED)
    marks = ("<start_of_turn>", "<end_of_turn>")
    assert turn_end(template(text), tokenizer) == TurnEnd(
        frozenset(), "<end_of_turn>", marks, trained=text != UNTRAINED
    )


@pytest.mark.parametrize("text", [BUILT_IN["plain"], BUILT_IN["alpaca"], SPACED])
def test_a_turn_may_end_as_a_document(tokenizer: Tokenizer, text: str) -> None:
    assert turn_end(template(text), tokenizer) == TurnEnd(frozenset([tokenizer.end_of_document_id]))


def test_a_turn_may_end_in_nothing(tokenizer: Tokenizer) -> None:
    assert turn_end(template(NOTHING), tokenizer) == TurnEnd()
    assert turn_end(template("{{ raise_exception('no') }}"), tokenizer) == TurnEnd()


def test_what_is_said(tokenizer: Tokenizer, marked: Tokenizer) -> None:
    def said(text: str, of: Tokenizer, **options: bool) -> str:
        return "".join(
            turn_end_notes(template(text), of, **{"may_add_tokens": True, "workers": 0, **options})
        )

    assert said(GEMMA, marked) == said(BUILT_IN["plain"], tokenizer) == ""
    line = said(GEMMA, tokenizer)
    assert "spells <start_of_turn>, <end_of_turn> of the chat template a.jinja in pieces" in line
    # The remedy is the line of a RUN.toml.
    toml = line[line.index("tokenizer.add_tokens") : line.index(" gives them tokens")]
    settings = TokenizerConfig.model_validate(tomllib.loads(toml)["tokenizer"])
    assert settings.add_tokens == ("<start_of_turn>", "<end_of_turn>")
    assert 'tokenizer.chat_template = "plain" ends answers in a token' in said(
        GEMMA, tokenizer, may_add_tokens=False
    )
    assert "a.jinja leaves the end of an answer out of {% generation %}" in said(UNTRAINED, marked)


def test_the_remedy_of_data_prepare_works(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the tensor?", "completion": "waits"}')
    folder = tmp_path / "tokenizer"
    save_tokenizer(tokenizer.backend, folder, END)
    command = [
        "data",
        "prepare",
        "--kind",
        "instruct",
        "--source",
        str(tmp_path / "rows.jsonl"),
        "--workers",
        "0",
    ]
    command += ["--tokenizer", str(folder), "--sequence-length", "99", "--chat-template", "chatml"]
    assert main([*command, "--output", str(tmp_path / "first")]) == 0
    note = next(line for line in capsys.readouterr().err.splitlines() if "in pieces" in line)
    flags = shlex.split(note[note.index("--add-tokens") : note.index(" gives them tokens")])
    assert main([*command, "--output", str(tmp_path / "second"), *flags]) == 0
    assert "in pieces" not in capsys.readouterr().err
    first, second = (prepared_facts(tmp_path / name) for name in ("first", "second"))
    assert first is not None and second is not None
    assert (second.vocab_size, first.tokens > second.tokens) == (first.vocab_size + 2, True)
