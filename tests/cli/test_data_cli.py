"""megalite tokenizer and megalite data, as commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite import load_config
from megalite.cli import data, tokenizer
from megalite.config.sections.schema import RunConfig
from megalite.data.ensure import ensure_data
from megalite.data.files.prepared import prepared_facts
from megalite.data.files.token_file import TokenFile, bin_path
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.errors import DataError
from tests.support.tiny import tiny_corpus


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index, each in enumerate(tiny_corpus()):
        (folder / f"{index:03}.txt").write_text(each)
    return folder


def test_from_text_to_a_token_file(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tok, out = str(tmp_path / "tok"), str(tmp_path / "corpus" / "tiny")
    source = ["--source", str(text), "--pattern", "*.txt", "--end-of-document", "</s>"]
    assert tokenizer.run(["train", *source, "--vocab-size", "320", "--output", tok]) == 0
    assert "320 ids from 40 files" in capsys.readouterr().out

    prepare = ["prepare", *source, "--tokenizer", tok, "--output", out, "--workers", "1"]
    assert data.run(prepare) == 0
    file = TokenFile.open(out)
    printed = capsys.readouterr()
    assert (
        f"40 documents, {file.num_tokens:,} tokens of uint16\n{file.num_tokens:,} tokens in " in printed.out
    )
    assert printed.err.startswith("tokenizing 6.7 kB of text (40 files)\n40 documents in ")

    assert data.run(prepare) == 0
    assert "up to date, 40 documents" in capsys.readouterr().out

    assert data.run(["inspect", out, "--documents", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"40 documents, 40 sequences, {file.num_tokens:,} tokens of uint16" in shown
    assert "tok/tokenizer.json (320 ids)" in shown
    assert f"--- document 1, {len(file.document(1))} tokens" in shown
    assert tiny_corpus()[1][:60] in shown and "--- document 2" not in shown


def test_a_sentencepiece_tokenizer_is_trained_and_converted(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, converted = tmp_path / "trained", tmp_path / "converted"
    source = ["--source", str(text), "--vocab-size", "280", "--kind", "unigram"]
    assert tokenizer.run(["train", *source, "--output", str(trained)]) == 0
    assert tokenizer.run(["convert", str(trained / "tokenizer.model"), "--output", str(converted)]) == 0
    assert f"280 ids of {trained / 'tokenizer.model'}" in capsys.readouterr().out
    ids = [load_tokenizer(folder).encode(tiny_corpus()[0]) for folder in (trained, converted)]
    assert ids[0] == ids[1]
    with pytest.raises(DataError, match="no token '</s>'"):
        tokenizer.run(
            ["convert", str(trained), "--end-of-document", "</s>", "--output", str(tmp_path / "other")]
        )


def test_a_tokenizer_is_replaced_on_demand_only(text: Path, tmp_path: Path) -> None:
    tok = tmp_path / "tok"
    train = ["train", "--source", str(text), "--output", str(tok)]
    assert tokenizer.run([*train, "--vocab-size", "280", "--kind", "unigram"]) == 0
    (tok / "special_tokens_map.json").write_text("{}")
    with pytest.raises(DataError, match="--overwrite"):
        tokenizer.run([*train, "--vocab-size", "300"])
    assert load_tokenizer(tok).vocab_size == 280
    assert tokenizer.run([*train, "--vocab-size", "300", "--overwrite"]) == 0
    assert load_tokenizer(tok).vocab_size == 300
    assert {path.name for path in tok.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_a_token_file_without_its_tokenizer_is_shown_as_ids(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tok, out = tmp_path / "tok", str(tmp_path / "x")
    tokenizer.run(["train", "--source", str(text), "--vocab-size", "300", "--output", str(tok)])
    data.run(["prepare", "--source", str(text), "--tokenizer", str(tok), "--output", out, "--workers", "0"])
    (tok / "tokenizer.json").unlink()
    assert data.run(["inspect", out]) == 0
    assert str(TokenFile.open(out).document(0)[:5].tolist())[:-1] in capsys.readouterr().out


def test_parts_by_share_without_short_documents(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tok, out = tmp_path / "tok", tmp_path / "x"
    (text / "short.txt").write_text("a")
    tokenizer.run(["train", "--source", str(text), "--vocab-size", "300", "--output", str(tok)])
    capsys.readouterr()
    prepare = [
        "prepare",
        "--source",
        str(text),
        "--tokenizer",
        str(tok),
        "--output",
        str(out),
        "--workers",
        "0",
    ]
    options = ["--split", "0.5", "0.25", "0.25", "--min-length", "5", "--seed", "3"]
    assert data.run([*prepare, *options]) == 0
    printed = capsys.readouterr().out
    assert "(1 shorter ones skipped)" in printed
    parts = [TokenFile.open(tmp_path / f"x-{name}").num_documents for name in ("train", "validation", "test")]
    assert sum(parts) == 40 and min(parts) > 0
    assert data.run([*prepare, *options]) == 0
    assert capsys.readouterr().out.count("up to date") == 3
    with pytest.raises(SystemExit):
        data.run([*prepare, "--split", "0.5", "0.6"])
    assert "argument --split: [0.5, 0.6] adds up to 1.1, not 1; write for example" in capsys.readouterr().err


def test_a_sentencepiece_model_prepares(text: Path, tmp_path: Path) -> None:
    tok, out = tmp_path / "tok", tmp_path / "out" / "x"
    source = ["--source", str(text)]
    kind = ["--vocab-size", "280", "--kind", "sentencepiece_bpe"]
    tokenizer.run(["train", *source, *kind, "--output", str(tok)])
    model = str(tok / "tokenizer.model")
    data.run(["prepare", *source, "--tokenizer", model, "--output", str(out), "--workers", "0"])
    shown = load_tokenizer(tmp_path / "out" / "x-tokenizer").decode(
        TokenFile.open(out).document(0)[:-1].tolist()
    )
    assert shown == tiny_corpus()[0]


def test_several_sources_in_the_order_given(text: Path, tmp_path: Path) -> None:
    tok, out = str(tmp_path / "tok"), str(tmp_path / "x")
    sources = ["--source", str(text / "007.txt"), "--source", str(text / "002.txt")]
    tokenizer.run(["train", "--source", str(text), "--vocab-size", "300", "--output", tok])
    data.run(["prepare", *sources, "--tokenizer", tok, "--output", out, "--workers", "0"])
    file, loaded = TokenFile.open(out), load_tokenizer(tok)
    shown = [loaded.decode(file.document(index)[:-1].tolist()) for index in range(2)]
    assert shown == [tiny_corpus()[7], tiny_corpus()[2]]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (tokenizer, []),
        (tokenizer, ["train", "--source", "stdlib"]),
        (tokenizer, ["train", "--source", "x", "--vocab-size", "9", "--output", "o", "--kind", "words"]),
        (tokenizer, ["convert", "x"]),
        (data, ["prepare", "--source", "x", "--tokenizer", "t", "--output", "o", "--workers", "-1"]),
        (data, ["inspect"]),
    ],
)
def test_wrong_options_end_with_exit_code_2(command, arguments: list[str], capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as stopped:
        command.run(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: megalite ")


def test_errors_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; prepare the corpus first"):
        data.run(["inspect", str(tmp_path / "x")])
    with pytest.raises(DataError, match="nowhere does not exist"):
        tokenizer.run(
            ["train", "--source", str(tmp_path / "nowhere"), "--vocab-size", "300", "--output", "o"]
        )


@pytest.mark.parametrize("name", ["data", "tokenizer"])
def test_help_loads_nothing_heavy(name: str) -> None:
    script = f"""if True:
        import sys
        from megalite.cli import {name}
        try:
            {name}.run(["--help"])
        except SystemExit:
            heavy = {{"torch", "numpy", "tokenizers", "sentencepiece", "rich"}} & set(sys.modules)
            sys.exit(f"loaded {{heavy}}" if heavy else 0)
    """
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"usage: megalite {name}" in run.stdout


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {n}?", "completion": text[:200]} for n, text in enumerate(tiny_corpus())]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "talks.jsonl"


def of_run(source: Path, tokenizer_path: Path, **settings: dict[str, Any]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "training": {"steps": 1, "sequence_length": 96, "micro_batch_size": 1, "micro_batches": 1},
        "tokenizer": {
            "path": str(tokenizer_path),
            "chat_template": "chatml",
            "add_tokens": ["<|im_start|>", "<|im_end|>"],
        },
        "data": {"kind": "instruct", "source": str(source)},
    }
    for name, values in settings.items():
        both = {**sections[name], **values}
        sections[name] = {key: value for key, value in both.items() if value is not None}
    return load_config(None, **sections)


def test_conversations_are_prepared_as_a_run_prepares_them(
    text: Path, talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tok, out = tmp_path / "tok", tmp_path / "out" / "talks"
    tokenizer.run(["train", "--source", str(text), "--vocab-size", "320", "--output", str(tok)])
    prepare = ["prepare", "--kind", "instruct", "--source", str(talks), "--tokenizer", str(tok)]
    prepare += [
        "--output",
        str(out),
        "--workers",
        "0",
        "--chat-template",
        "chatml",
        "--sequence-length",
        "96",
    ]
    prepare += ["--add-tokens", "<|im_start|>", "<|im_end|>"]
    assert data.run(prepare) == 0
    facts = prepared_facts(out)
    assert facts is not None and facts.truncated_documents > 5
    assert f"40 conversations ({facts.truncated_documents} longer ones cut), " in capsys.readouterr().out

    made = ensure_data(of_run(talks, tok), tmp_path / "run")
    assert (tmp_path / "run" / "data" / "train.bin").read_bytes() == bin_path(out).read_bytes()
    prepared = ensure_data(of_run(out, tok), tmp_path / "second")
    assert prepared.train == (out,) and not (tmp_path / "second" / "data" / "train.bin").exists()
    first, second = (load_tokenizer(each.tokenizer) for each in (made, prepared) if each.tokenizer)
    assert first.sha256 == second.sha256 and first.vocab_size == 322

    with pytest.raises(
        DataError, match=r"train_on = 'answers', and .*; set data\.train_on = \"answers\", or"
    ):
        ensure_data(of_run(out, tok, data={"train_on": "all"}), tmp_path / "second")
    with pytest.raises(
        DataError, match=r"the chat template 'chatml', and that of the run is 'plain'; set token"
    ):
        ensure_data(of_run(out, tok, tokenizer={"chat_template": "plain"}), tmp_path / "second")
    with pytest.raises(
        DataError, match=r"'chatml', and the tokenizer of the run has none; set tokenizer\.chat"
    ):
        ensure_data(of_run(out, tok, tokenizer={"chat_template": None}), tmp_path / "second")
    assert data.run(["inspect", str(out), "--documents", "0"]) == 0
    assert "%), train_on answers, chat template 'chatml'\n" in capsys.readouterr().out


def test_a_bad_conversation_leaves_no_file(text: Path, talks: Path, tmp_path: Path) -> None:
    tok, out = tmp_path / "tok", tmp_path / "out" / "talks"
    tokenizer.run(["train", "--source", str(text), "--vocab-size", "320", "--output", str(tok)])
    lines = talks.read_text().splitlines(keepends=True)
    talks.write_text("".join([*lines[:7], '{"prompt": "Why?", "completion": ""}\n', *lines[7:]]))
    prepare = [
        "prepare",
        "--kind",
        "instruct",
        "--source",
        str(talks),
        "--tokenizer",
        str(tok),
        "--output",
        str(out),
    ]
    with pytest.raises(DataError, match=r"talks.jsonl, line 8: .*completion"):
        data.run([*prepare, "--workers", "0", "--chat-template", "plain", "--sequence-length", "96"])
    assert not list(out.parent.glob("*"))


PAIRS = ["--kind", "preference", "--sequence-length", "9"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--kind", "instruct"],
            "--kind instruct needs --sequence-length, the training.sequence_length of the runs",
        ),
        (["--train-on", "all"], "argument --train-on: has no effect without --kind instruct"),
        (
            ["--kind", "instruct", "--sequence-length", "9", "--text-column", "body"],
            "argument --text-column: has no effect with --kind instruct",
        ),
        (
            ["--kind", "preference"],
            "--kind preference needs --sequence-length, the training.sequence_length of the runs",
        ),
        ([*PAIRS, "--train-on", "all"], "argument --train-on: has no effect with --kind preference"),
        ([*PAIRS, "--min-length", "2"], "argument --min-length: would leave out one answer of a pair"),
        (
            [*PAIRS, "--too-long", "keep"],
            'argument --too-long: keep is for data.packing = "concatenate", not for pairs',
        ),
    ],
)
def test_options_of_another_kind_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        data.run(["prepare", "--source", "x", "--tokenizer", "t", "--output", "o", *options])
    assert end.value.code == 2
    assert f"megalite data: {said}; " in capsys.readouterr().err
