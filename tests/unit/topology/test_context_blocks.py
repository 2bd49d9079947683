"""Which tokens of a prompt each context-parallel rank computes."""

import pytest

from megalite.topology.context import uneven_blocks, zig_zag


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [16, 67, 1000])
def test_any_number_of_tokens_is_shared_once_and_about_equally(tokens: int, ranks: int) -> None:
    blocks = uneven_blocks(tokens, ranks)
    assert [place for block in blocks for place in block] == list(range(tokens))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    shares = [[blocks[number] for number in own] for own in zig_zag(ranks)]
    scores = [sum(place + 1 for block in own for place in block) for own in shares]
    # By one token of each of two blocks at most, which sees all tokens before it.
    assert max(scores) - min(scores) <= 2 * tokens
    assert shares[0][-1][-1] == tokens - 1
