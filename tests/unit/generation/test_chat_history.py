"""The messages of a conversation within the context of a model."""

from collections.abc import Mapping, Sequence

import pytest

from megalite.errors import ConfigError
from megalite.generation.chat_history import ChatHistory


def words(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A token for each word, and one for each message."""
    return [0] * sum(1 + len(message["content"].split()) for message in messages)


def test_the_oldest_exchanges_go_until_an_answer_fits() -> None:
    history = ChatHistory(words, context=40, max_tokens=10)
    asked = []
    for turn in range(5):
        asked.append(history.ask(f"question {turn} x x"))
        history.answer(f"answer {turn} x x")
    lengths = [(len(ids), room, dropped) for ids, room, dropped in asked]
    assert lengths == [(5, 10, 0), (15, 10, 0), (25, 10, 0), (25, 10, 1), (25, 10, 1)]
    assert [each["content"][:10] for each in history.messages[:2]] == ["question 2", "answer 2 x"]
    ids, room, dropped = history.ask("x " * 20)
    assert (len(ids), room, dropped) == (21, 10, 3), "all others go for a long message"
    history.answer("x")
    assert [each["role"] for each in history.messages] == ["user", "assistant"]
    history.clear()
    assert len(history.ask("one")[0]) == 2


def test_an_answer_is_limited_to_what_fits() -> None:
    history = ChatHistory(words, context=40, max_tokens=100)
    assert history.ask("x " * 9)[1] == 30
    assert history.ask("x " * 38)[1] == 1, "a message alone may leave less than a quarter"


def test_a_message_that_does_not_fit_alone_changes_nothing() -> None:
    history = ChatHistory(words, context=40, max_tokens=10)
    history.ask("one")
    history.answer("two")
    before = list(history.messages)
    refused = (
        r"the message: has 40 tokens with the chat template, and the context has 40.*write a shorter one"
    )
    with pytest.raises(ConfigError, match=refused):
        history.ask("x " * 39)
    history.ask("never sent")
    assert history.messages == before
