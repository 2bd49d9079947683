"""megalite generate as a user calls it: sampling flags, files of requests, chat."""

import io
import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.cli import generate
from megalite.cli.generate_chat import _lines
from megalite.cli.generate_run import GenerationJob
from megalite.errors import CheckpointError, ConfigError, DataError
from megalite.topology.axes import Layout
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}<|endoftext|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint and its tokenizer, which has a chat template."""
    run = tmp_path_factory.mktemp("run")
    (run / "tokenizer").mkdir()
    tiny_tokenizer(run / "tokenizer")
    (run / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    shape = replace(tiny_shape(layers=2), vocab_size=384, max_position_embeddings=256)
    save_stage(run, shape, lively_stage(shape, scale=8.0))
    return run


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert generate.run(arguments) == 0
    return capsys.readouterr().out


def lines_of(file: Path, *rows: object) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_flags_change_the_text(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = [str(run_folder), "--prompt", "one rank", "--tokens", "20"]
    drawn = [*plain, "--temperature", "1.5", "--seed", "3"]
    flags = {"--min-p": "0.5", "--repetition-penalty": "2", "--presence-penalty": "2"}
    texts = [printed(capsys, *drawn), *(printed(capsys, *drawn, *flag) for flag in flags.items())]
    assert len(set(texts)) == 4
    whole = printed(capsys, *plain).removesuffix("\n")
    stop = whole[-6:-4]
    assert printed(capsys, *plain, "--stop", stop, "--stop", "never") == whole[: whole.index(stop)] + "\n"
    assert printed(capsys, *plain, "--dtype", "bfloat16").startswith("one rank")
    told = printed(capsys, *plain, "--logprobs", "2").removeprefix(whole + "\n").splitlines()
    assert len(told) == 20
    chosen, _, rest = told[0].partition("   ")
    assert rest.startswith(chosen), "a greedy token is the most likely one"


def test_a_file_of_requests_runs_in_its_order(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "one rank waits for the weights", "max_tokens": 30, "id": "long"},
        "",
        {"prompt": "a pipeline", "max_tokens": 3, "logprobs": 1},
        {
            "messages": [{"role": "user", "content": "the tensor"}],
            "temperature": 1.1,
            "seed": 4,
            "top_p": 0.9,
        },
        {"prompt": "one", "stop": ["zzzz"], "min_p": 0.1, "temperature": 0.7},
        {"prompt": "one", "json_schema": {"enum": ["the rank", 5]}, "max_tokens": 40},
        {"prompt": "one", "json_object": True, "max_tokens": 5},
    ]
    file = lines_of(tmp_path / "requests.jsonl", *rows)
    output = tmp_path / "results.jsonl"
    flags = ["--batch", str(file), "--tokens", "9"]
    said = printed(capsys, str(run_folder), *flags)
    results = [json.loads(line) for line in said.splitlines()]
    assert [each["line"] for each in results] == [1, 3, 4, 5, 6, 7] and results[0]["id"] == "long"
    assert [each["new_tokens"] for each in results][:2] == [30, 3] and results[2]["new_tokens"] <= 9
    alone = printed(capsys, str(run_folder), "--prompt", rows[0]["prompt"], "--tokens", "30")
    assert rows[0]["prompt"] + results[0]["text"] + "\n" == alone
    assert json.loads(results[4]["text"]) in ("the rank", 5) and results[5]["text"].startswith("{")
    assert len(results[1]["logprobs"]) == 3 and results[1]["logprobs"][0]["logprob"] <= 0
    [most_likely] = results[1]["logprobs"][0]["top"]
    assert results[1]["logprobs"][0] == {**most_likely, "top": [most_likely]}
    assert "".join(each["token"] for each in results[1]["logprobs"]) == results[1]["text"]
    printed(capsys, str(run_folder), *flags, "--output", str(output), "--max-requests", "1")
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["text"] for each in again] == [each["text"] for each in results]


@pytest.mark.parametrize("flags", [["--beams", "4"], ["--length-penalty=0.5"]])
def test_beam_search_is_sent_to_transformers(run_folder: Path, flags: list[str]) -> None:
    sentence = r"beam search is the job of transformers; megalite convert export .*generate\(num_beams=N\)"
    with pytest.raises(ConfigError, match=rf"has 1 problem\n  --beams, --length-penalty: {sentence}"):
        generate.run([str(run_folder), "--prompt", "one rank", *flags])


def test_every_bad_line_is_named_before_anything_runs(run_folder: Path, tmp_path: Path) -> None:
    file = lines_of(
        tmp_path / "bad.jsonl",
        {"prompt": "fine"},
        "{not json",
        [1],
        {"promt": "a"},
        {"prompt": "a", "messages": []},
        {"prompt": "a", "max_tokens": 0, "temperature": -1},
        {"prompt": "a", "seed": 1.5, "top_k": True},
        {"prompt": "a", "stop": [1]},
        {"prompt": "a " * 300},
        {"messages": [{"role": "user"}]},
        {"prompt": "a", "json_schema": {"not": {}}},
        {"prompt": "a", "json_schema": {}, "json_object": True},
        {"prompt": "a", "json_schema": [], "json_object": 1},
        {"prompt": "a", "json_object": True, "stop": "}"},
    )
    with pytest.raises(ConfigError) as refused:
        generate.run([str(run_folder), "--batch", str(file), "--output", str(tmp_path / "none.jsonl")])
    told = str(refused.value)
    for place in (
        "2: the line: is not JSON",
        "3: the line: is not a JSON object",
        "4: promt: is no field of a request; did you mean prompt?",
        "5: prompt: has to be given, or messages, and not both",
        "6: max_tokens: 0 is no number of new tokens",
        "6: temperature: -1 is not a temperature",
        "7: seed: 1.5 is not a whole number",
        "7: top_k: true is not a whole number",
        "8: stop: has values that are no strings",
        "9: max_tokens: ",
        "10: messages: ",
        '11: json_schema: llguidance: Unimplemented keys: ["not"]; change the schema',
        "12: json_schema: says more than json_object, which is given too; leave one of them",
        "13: json_schema: [] is not an object",
        "13: json_object: 1 is not true or false",
        "14: stop: may cut the JSON of json_schema",
    ):
        assert f"{file}:{place}" in told
    assert not (tmp_path / "none.jsonl").exists() and f"{file}:1:" not in told
    with pytest.raises(ConfigError, match="has no request"):
        generate.run([str(run_folder), "--batch", str(lines_of(tmp_path / "empty.jsonl"))])
    with pytest.raises(DataError, match="cannot be read"):
        generate.run([str(run_folder), "--batch", str(tmp_path / "absent.jsonl")])
    with pytest.raises(ConfigError, match="--output: is for --batch"):
        generate.run([str(run_folder), "--prompt", "a", "--output", "x"])


def test_a_conversation_goes_on_until_the_input_ends(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one rank\n\nand then?\n" + "x " * 300 + "\nlast\n"))
    capsys.readouterr()
    assert generate.run([str(run_folder), "--chat", "--tokens", "12"]) == 0
    said = capsys.readouterr()
    prompt = "user: one rank\nassistant:"
    alone = printed(capsys, str(run_folder), "--prompt", prompt, "--tokens", "12")
    assert said.out.startswith(alone.removeprefix(prompt))
    assert "the message: has 6" in said.err and "and the context has 256, at least 1" in said.err
    assert "write a shorter one" in said.err and "forgotten" not in said.err, "what does not fit is left out"
    assert said.out.count("\n") >= 3


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_full_context_forgets_the_oldest_exchange(run_folder: Path, tensor: int) -> None:
    turns = [f"one rank waits for turn {turn} " + "x " * 40 for turn in range(4)]
    flags = ["--chat", "--tokens", "12", "--repetition-penalty", "1.2", "--tensor", str(tensor)]
    said = subprocess.run(
        [sys.executable, "-m", "megalite", "generate", str(run_folder), *flags],
        input="\n".join([*turns, "/clear", turns[0], ""]),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "error" not in said.stderr and said.stderr.count("(the conversation is forgotten)") == 1
    full = "(the context of 256 tokens is full: the oldest exchange is forgotten)"
    assert 1 <= said.stderr.count(full) <= 3
    assert said.stdout.count(said.stdout[:12]) >= 2, "a cleared conversation begins as the first one did"


def test_the_end_of_input_at_a_terminal_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    typing, keyboard = pty.openpty()
    job = GenerationJob("chat", None, Layout(pipeline=2), "float32", None, keyboard=keyboard)
    os.write(typing, b"hello\n\x04")
    assert list(_lines(job, int, 0.01)) == ["hello"]
    assert capsys.readouterr().out == "> > \n"
    os.close(typing)
    os.close(keyboard)


def test_chat_takes_empty_steps_while_it_waits_for_the_keyboard() -> None:
    reading, writing = os.pipe()
    job = GenerationJob("chat", None, Layout(pipeline=2), "float32", None, keyboard=reading)
    steps: list[float] = []

    def idle() -> None:
        steps.append(time.monotonic())
        if len(steps) == 3:
            os.write(writing, "two lines\nat önce\n".encode())
        elif len(steps) == 6:
            os.write(writing, b"half ")
        elif len(steps) == 9:
            os.write(writing, b"a line")
            os.close(writing)

    assert list(_lines(job, idle, 0.01)) == ["two lines", "at önce", "half a line"]
    assert len(steps) == 9
    os.close(reading)


def test_a_tokenizer_without_a_template_chats_with_a_named_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer").mkdir()
    tiny_tokenizer(tmp_path / "tokenizer")
    shape = replace(tiny_shape(layers=1), vocab_size=384)
    save_stage(tmp_path, shape, lively_stage(shape))
    with pytest.raises(
        DataError, match=r"has no chat template; set --chat-template to one of chatml, alpaca"
    ):
        generate.run([str(tmp_path), "--chat"])
    file = lines_of(tmp_path / "requests.jsonl", {"messages": [{"role": "user", "content": "one rank"}]})
    flags = [str(tmp_path), "--batch", str(file), "--tokens", "4"]
    with pytest.raises(
        ConfigError, match=r"requests.jsonl:1: messages: .* set --chat-template to one of chatml"
    ):
        generate.run(flags)
    with pytest.raises(
        DataError, match=r"the chat template 'chatmk' is neither .* set --chat-template to one"
    ):
        generate.run([*flags, "--chat-template", "chatmk"])
    with pytest.raises(ConfigError, match="--chat-template: is for --chat and --batch; leave it out"):
        generate.run([str(tmp_path), "--prompt", "a", "--chat-template", "chatml"])
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    told = [
        json.loads(printed(capsys, *flags, "--chat-template", name))
        for name in ("plain", str(tmp_path / "mine.jinja"))
    ]
    assert told[0]["prompt_tokens"] < told[1]["prompt_tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO("one rank\n"))
    asked = printed(capsys, str(tmp_path), "--chat", "--tokens", "4", "--chat-template", "plain")
    assert asked == told[0]["text"] + "\n"


def test_a_path_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(CheckpointError) as error:
            generate.run([str(path), "--prompt", "a"])
        return str(error.value)

    folder, text = tmp_path / "weights", tmp_path / "text.txt"
    folder.mkdir()
    text.write_text("a")
    lacks = "has manifest.json, a Hugging Face folder config.json and *.safetensors; name one of them"
    assert all(lacks in refused(each) for each in (folder, text))
    (folder / "model.safetensors").write_bytes(b"")
    assert f"{folder} has weights but no config.json; copy" in refused(folder)
    (folder / "config.json").write_text("{")
    assert f"{folder / 'config.json'} cannot be read (Expecting property name" in refused(folder)
    (folder / "config.json").write_text("[]")
    assert f"{folder / 'config.json'} holds no JSON object; fetch it again" in refused(folder)
    assert "does not exist" in refused(tmp_path / "absent")
