"""Pairs of preference data: each form, what is said about bad rows, and that pairs stay together down to the batch."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.cli import main
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.conversation_rows import ConversationRows
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.chat.chat_template import load_chat_template
from megalite.data.chat.conversation_corpus import PairCorpus
from megalite.data.chat.conversation_encoding import ChatEncoding
from megalite.data.chat.preference import preference_pair
from megalite.data.files.prepared import prepared_facts
from megalite.data.files.token_file import TokenFile
from megalite.data.files.trained_tokens import ids_of, is_trained
from megalite.data.prepare.prepare import Preparation, prepare_outputs
from megalite.data.prepare.split import Split
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError
from tests.support.jobs import ROOT
from tests.support.museum import exhibit
from tests.support.planted import Planted
from tests.support.tiny import tiny_corpus

WHERE = "a.jsonl, line 3"
ASKED = {"role": "user", "content": "2 + 2?"}
RIGHT, WRONG = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
TERSE = {"role": "system", "content": "Be terse."}
AGAIN = {"role": "user", "content": "Sure?"}
YES, NO = {"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "No."}
HH = "\n\nHuman: 2 + 2?\n\nAssistant: 4\n\nHuman: Sure?\n\nAssistant: "

# A row, the messages of the prompt, and the two answers.
FORMS: list[tuple[dict[str, Any], list[Any], Any, Any]] = [
    ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, [ASKED], [RIGHT], [WRONG]),
    (
        {"question": "2 + 2?", "chosen": "4", "rejected": "5", "system": "Be terse."},
        [TERSE, ASKED],
        [RIGHT],
        [WRONG],
    ),
    ({"prompt": [TERSE, ASKED], "chosen": [RIGHT], "rejected": [WRONG]}, [TERSE, ASKED], [RIGHT], [WRONG]),
    ({"prompt": "2 + 2?", "chosen": [RIGHT], "rejected": [WRONG]}, [ASKED], [RIGHT], [WRONG]),
    (
        {"prompt": "2 + 2?", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG], "score_chosen": 9.0},
        [ASKED],
        [RIGHT],
        [WRONG],
    ),
    (
        {"chosen": [ASKED, RIGHT, AGAIN, YES], "rejected": [ASKED, RIGHT, AGAIN, NO]},
        [ASKED, RIGHT, AGAIN],
        [YES],
        [NO],
    ),
    (
        {"chosen": [ASKED, RIGHT, AGAIN, YES], "rejected": [ASKED, WRONG]},
        [ASKED],
        [RIGHT, AGAIN, YES],
        [WRONG],
    ),
    (
        {
            "chosen": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
            "rejected": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "5"}],
        },
        [ASKED],
        [RIGHT],
        [WRONG],
    ),
    ({"chosen": HH + "Yes.", "rejected": HH + "No."}, [ASKED, RIGHT, AGAIN], [YES], [NO]),
]


@pytest.mark.parametrize(("row", "prompt", "chosen", "rejected"), FORMS)
def test_each_form_has_its_prompt_and_its_answers(row, prompt, chosen, rejected) -> None:
    pair = preference_pair(row, WHERE)
    assert list(pair.chosen.messages) == prompt + chosen
    assert list(pair.rejected.messages) == prompt + rejected
    assert [each.prompt for each in pair.conversations] == [len(prompt)] * 2


def test_the_example_has_pairs() -> None:
    lines = (ROOT / "examples" / "fine-tuning" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    assert (
        len({preference_pair(json.loads(line), WHERE).chosen.messages[-1]["content"] for line in lines})
        == 120
    )


TEXTS = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"prompt": "2 + 2?", "rejected": "5"},
        "chosen is missing; write prompt, chosen and rejected, or remove the row",
    ),
    (TEXTS | {"rejected": None}, "rejected is missing; write prompt, chosen and rejected, or remove the row"),
    (
        TEXTS | {"rejected": "4"},
        "chosen and rejected are equal, so they show no preference; remove the row",
    ),
    (TEXTS | {"chosen": " "}, "chosen is an empty answer; write its text, or remove the row"),
    (TEXTS | {"prompt": ""}, "prompt is an empty prompt; write its text, or remove the row"),
    (
        TEXTS | {"chosen": 4},
        "chosen is a number, but rejected is text; make both texts, or both lists of messages",
    ),
    (
        {"chosen": [ASKED, RIGHT], "rejected": [AGAIN, WRONG]},
        "the prompts of chosen and rejected differ: chosen[0] is the user message '2 + 2?'; give both the same "
        "prompt, or remove the row",
    ),
    (
        {"chosen": [ASKED, RIGHT, AGAIN, YES], "rejected": [ASKED, RIGHT]},
        "rejected has no answer after the messages that both have; write prompt, chosen and rejected, or remove the "
        "row",
    ),
    (
        TEXTS | {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG], "prompt": "3 + 3?"},
        "prompt is '3 + 3?', which is no message of chosen and rejected; correct it, or remove the column prompt",
    ),
    (
        {"chosen": "4", "rejected": "5"},
        'chosen is a text without a prompt column, and does not begin with "Human: "; write prompt, chosen and '
        "rejected, or remove the row",
    ),
    (
        {"prompt": [ASKED], "chosen": "4", "rejected": "5"},
        "prompt is a list of messages, but chosen is text; make both texts, or both lists",
    ),
    (
        {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [{"role": "assistant"}]},
        "rejected[0].content is missing or null; write its text, or remove the row",
    ),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_a_bad_row_is_named_with_its_field_and_a_remedy(row, said) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(f'{WHERE}: {said}')}$"):
        preference_pair(row, WHERE)


def preparation(source: Path, tokenizer: Tokenizer, prefix: Path, length: int, too_long: str) -> Preparation:
    template = load_chat_template(tokenizer.file.parent, "plain", tokenizer.end_of_document)
    chat = ChatEncoding(template, "answers", length, too_long, "preference")  # type: ignore[arg-type]
    return Preparation(
        PairCorpus.open([str(source)]), tokenizer, (prefix,), sequence_length=length, chat=chat
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twenty pairs; the prompt is the first text, and the answers are of different lengths."""
    texts = tiny_corpus(60)
    rows = [
        {"prompt": prompt, "chosen": f"Good: {one}", "rejected": f"Bad: {other}"}
        for prompt, one, other in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl"


def answers(file: TokenFile, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The prompt and the trained text of each document."""
    found = []
    for index in range(file.num_documents):
        tokens = file.document(index)
        trained = is_trained(tokens)
        assert not trained[: int(np.argmax(trained))].any() and trained[int(np.argmax(trained)) :].all()
        found.append(tuple(tokenizer.decode(ids_of(tokens[part]).tolist()) for part in (~trained, trained)))
    return found


def test_documents_are_a_chosen_and_then_a_rejected_answer(source, tokenizer, tmp_path, capsys) -> None:
    prepare_outputs(preparation(source, tokenizer, tmp_path / "pairs", 200, "stop"))
    found = answers(TokenFile.open(tmp_path / "pairs"), tokenizer)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    assert len(found) == 2 * len(rows) == 40
    for place, (prompt, answer) in enumerate(found):
        row = rows[place // 2]
        assert prompt == f"{row['prompt']}\n"
        assert answer.startswith(row["rejected" if place % 2 else "chosen"])
    facts = prepared_facts(tmp_path / "pairs")
    assert facts is not None and facts.kind == "preference"
    assert main(["data", "inspect", str(tmp_path / "pairs"), "--documents", "2"]) == 0
    assert re.search(r"--- pair 0, chosen, .*--- pair 0, rejected, ", capsys.readouterr().out, re.DOTALL)


@exhibit(
    "trl PR#5305",
    subject="preferences",
    there="pairs were padded first and truncated then, so that the answer of a long pair was lost",
    here="an answer is cut at its own end; a prompt that leaves no room for one is refused, a pair dropped whole",
    fault=Planted(
        "megalite.data.chat.conversation_encoding:is_trained",
        lambda _: lambda tokens: np.ones(len(tokens), dtype=bool),
    ),
)
def test_both_answers_are_left_out_or_each_is_cut(source, tokenizer, tmp_path) -> None:
    prepare_outputs(preparation(source, tokenizer, tmp_path / "all", 200, "stop"))
    lengths = TokenFile.open(tmp_path / "all").document_lengths
    length = int(np.sort(lengths)[-8]) - 1
    [dropped] = prepare_outputs(preparation(source, tokenizer, tmp_path / "dropped", length, "drop"))
    pairs = (lengths.reshape(-1, 2) <= length + 1).all(axis=1)
    assert 0 < pairs.sum() < len(pairs) and 2 * pairs.sum() < (lengths <= length + 1).sum()
    kept = TokenFile.open(tmp_path / "dropped").document_lengths
    assert kept.tolist() == lengths.reshape(-1, 2)[pairs].ravel().tolist()
    assert dropped.dropped_documents == 2 * (~pairs).sum()
    [cut] = prepare_outputs(preparation(source, tokenizer, tmp_path / "cut", length, "truncate"))
    assert (
        TokenFile.open(tmp_path / "cut").document_lengths.tolist() == np.minimum(lengths, length + 1).tolist()
    )
    assert cut.truncated_documents == (lengths > length + 1).sum()
    with pytest.raises(DataError, match=r"line \d+: \d+ tokens, more than the \d+ that .*set data.too_long"):
        prepare_outputs(preparation(source, tokenizer, tmp_path / "stopped", length, "stop"))
    with pytest.raises(
        DataError, match=r"pairs.jsonl, line \d+: the prompt has \d+ tokens and leaves no room"
    ):
        prepare_outputs(preparation(source, tokenizer, tmp_path / "prompts", 12, "truncate"))
    assert not list(tmp_path.glob("stopped.bin")) and not list(tmp_path.glob("prompts.bin"))


def test_no_split_divides_a_pair(source, tokenizer, tmp_path) -> None:
    whole = preparation(source, tokenizer, tmp_path / "train", 200, "stop")
    prefixes = (tmp_path / "train", tmp_path / "validation")
    prepare_outputs(replace(whole, outputs=prefixes, split=Split((0.7, 0.3), 3)))
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    sizes = []
    for prefix in prefixes:
        found = answers(TokenFile.open(prefix), tokenizer)
        sizes.append(len(found))
        for (prompt, chosen), (other_prompt, rejected) in zip(found[::2], found[1::2], strict=True):
            assert prompt == other_prompt
            [row] = [
                each for each in rows if chosen.startswith(each["chosen"]) and f"{each['prompt']}\n" == prompt
            ]
            assert rejected.startswith(row["rejected"])
    assert sum(sizes) == 40 and min(sizes) > 2


@pytest.mark.parametrize("dp_size", [1, 2])
def test_the_rows_of_a_pair_stand_in_one_micro_batch(source, tokenizer, tmp_path, dp_size) -> None:
    prepare_outputs(preparation(source, tokenizer, tmp_path / "pairs", 200, "stop"))
    file = TokenFile.open(tmp_path / "pairs")
    loaders = [
        StepLoader(
            [file, file],
            BatchShare(200, 2, 4 // dp_size, rank, dp_size),
            SampleOrder(5, weights=(1.0, 2.0), epochs=0.4875, together=2),
            samples_of=lambda each, length: ConversationRows(each, length, "none", 5),
        )
        for rank in range(dp_size)
    ]
    reference = np.arange(80.0)
    at: dict[int, int] = {}
    for consumed in range(0, 80, 8):
        for loader in loaders:
            loader.reference_losses = reference
            batch = loader.step_batch(consumed)
            ids = batch.sample_ids.tolist()
            assert batch.reference is not None and batch.reference.tolist() == ids
            assert all(
                one % 2 == 0 and other == one + 1 for one, other in zip(ids[::2], ids[1::2], strict=True)
            )
            has_labels = (batch.labels != -100).any(dim=1).tolist()
            # 0.4875 epochs are 39 rows: half a pair more.
            assert has_labels == [place < 40 for place in batch.sample_indices.tolist()]
            at |= dict(zip(batch.sample_indices.tolist(), ids, strict=True))
    # The second file is read twice as often, and its pairs are shuffled anew in each epoch.
    seen = [at[place] for place in range(80)]
    first, second = [each for each in seen if each < 40], [each for each in seen if each >= 40]
    assert (len(first), len(second)) in ((26, 54), (28, 52)) and len(set(first)) == len(first)
    assert sorted(second[:40]) == list(range(40, 80)) != second[:40] != second[40:]


@pytest.mark.parametrize("row", [each[0] for each in FORMS])
def test_columns_that_a_pair_does_not_read_are_named(row) -> None:
    row = {key: value for key, value in row.items() if key != "score_chosen"}
    assert preference_pair(row, WHERE).unused == ()
    assert preference_pair(row | {"foo": 1}, WHERE).unused == ("foo",)
    with pytest.raises(DataError, match=f"{WHERE}: train is false"):
        preference_pair(row | {"train": False}, WHERE)


def test_an_answer_says_itself_whether_it_is_trained() -> None:
    row = {"prompt": [ASKED], "chosen": [RIGHT | {"weight": 1}], "rejected": [WRONG | {"weight": 0}]}
    pair = preference_pair(row, WHERE)
    assert (pair.chosen.marks, pair.rejected.marks) == ({1: True}, {1: False})
    both = [ASKED | {"weight": 0}, RIGHT], [ASKED, WRONG]
    assert preference_pair({"chosen": both[0], "rejected": both[1]}, WHERE).chosen.prompt == 1
