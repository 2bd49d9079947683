"""Which slot each request has: a random life of a table whose buffers hold the tokens themselves."""

import random

import pytest

from megalite.generation import slots
from megalite.generation.request import GREEDY, Request
from megalite.generation.slots import Running, SlotTable
from tests.support.selection import cases


class Tokens:
    """Buffers that hold token ids and their adapters in place of keys."""

    def __init__(self, count: int):
        self.held: list[list[tuple[str | None, int]]] = [[] for _ in range(count)]
        self.copied = 0

    def swap(self, one: int, other: int, tokens: int) -> None:
        first, second = self.held[one][:tokens], self.held[other][:tokens]
        self.held[one], self.held[other] = second, first

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.held[target] = self.held[source][:tokens]
        self.copied += 1


def keys(running: Running) -> list[tuple[str | None, int]]:
    """Return what the cache must hold of a request."""
    return [(running.request.adapter, each) for each in running.ids]


def run(table: SlotTable, tokens: Tokens, waiting: list[Running], draw: random.Random) -> list[int]:
    """Run one forward; assert that every token is computed behind its own predecessors; return who decoded."""
    plan = table.plan(waiting, len(tokens.held))
    if plan is None:
        return []
    assert sum(piece.count for piece in plan.pieces) <= 7
    computed = list(zip(plan.adapters, plan.ids, strict=True))
    for slot, each in enumerate(plan.decoding):
        assert tokens.held[slot][: each.cached] == keys(each)[:-1]
        tokens.held[slot][each.cached :] = [computed.pop(0)]
    for piece in plan.pieces:
        assert tokens.held[piece.slot][: piece.start] == keys(piece.running)[: piece.start]
        assert table.running[piece.slot] is piece.running
        tokens.held[piece.slot][piece.start :] = computed[: piece.count]
        del computed[: piece.count]
    table.launched(plan)
    rows = [*plan.decoding, *(piece.running for piece in plan.pieces)]
    for row, ends in zip(rows, plan.completes, strict=True):
        if ends:
            row.add(draw.randrange(9))
    assert all(not each.fills for each in table.running[:-1])
    for row in rows:
        if row.new_tokens == row.request.max_tokens or draw.random() < 0.05:
            table.leave(row)
    return [row.number for row in plan.decoding]


@pytest.mark.parametrize("seed", cases(range(12), core=[0, 1]))
def test_every_token_is_computed_behind_its_own(monkeypatch, seed):
    monkeypatch.setattr(slots, "_SHORTEST_REUSE", 2)
    draw, tokens = random.Random(seed), Tokens(4)
    table = SlotTable(tokens, 4, 7, reuse=True)
    # Few different tokens, so that prompts often begin alike.
    prompts = [tuple(draw.randrange(2) for _ in range(draw.randint(1, 20))) for _ in range(40)]
    waiting = [
        Running(
            number,
            Request(prompt, draw.randint(1, 9), GREEDY, frozenset(), adapter=draw.choice([None, "a"])),
        )
        for number, prompt in enumerate(prompts)
    ]
    for _ in range(2000):
        before = list(waiting)
        run(table, tokens, waiting, draw)
        assert waiting == before[len(before) - len(waiting) :], "requests begin in their order"
        if not waiting and not table.running:
            break
    assert not waiting and not table.running
    assert tokens.copied > 3


def test_a_beginning_is_reused_but_its_last_token():
    prompt = tuple(range(20))
    for reuse in (True, False):
        table = SlotTable(Tokens(2), 2, 100, reuse=reuse)
        first = Running(0, Request(prompt, 1, GREEDY, frozenset()))
        plan = table.plan([first], 2)
        assert plan is not None and plan.ids == list(prompt)
        table.launched(plan)
        table.leave(first)
        plan = table.plan([Running(1, Request(prompt, 1, GREEDY, frozenset()))], 2)
        assert plan is not None and plan.ids == ([19] if reuse else list(prompt))
