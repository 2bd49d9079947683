"""Which generated texts end in the answer."""

import pytest

from megalite.evaluate.exact_match import matches

MATCHES = [
    ("She makes 9 * 2 = <<9*2=18>>18.\n#### 18", "18", True, True),
    ("so she has 18 dollars.", "18", True, False),
    ("#### 1,018", "1018", True, True),
    ("It costs $1,018.", "1,018", True, False),
    ("#### 17\n18", "18", True, False),
    ("#### 18\n17", "18", False, True),
    ("-5 is left", "-5", True, False),
    ("5 is left", "-5", False, False),
    ("nothing", "18", False, False),
    ("", "18", False, False),
    (" Tom\nQuestion", "Tom", True, True),
    (" Tom and Lily", "Tom", False, False),
]


@pytest.mark.parametrize(("text", "final", "last", "strict"), MATCHES)
def test_the_last_number_and_the_marked_one(text: str, final: str, last: bool, strict: bool) -> None:
    assert matches(text, final) is last
    assert matches(text, final, strict=True) is strict
