"""Other bytes in the place of right ones, as hypothesis draws them."""

import contextlib
import json
import random
from typing import Any

from hypothesis import strategies as st

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def spoiled_json(content: Any, value: Any, rng: random.Random) -> Any:
    """The content with one of its values, at any depth, replaced."""
    if isinstance(content, dict) and content and rng.random() < 0.9:
        key = rng.choice(list(content))
        return {**content, key: spoiled_json(content[key], value, rng)}
    if isinstance(content, list) and content and rng.random() < 0.9:
        at = rng.randrange(len(content))
        return [*content[:at], spoiled_json(content[at], value, rng), *content[at + 1 :]]
    return value


def spoiled(content: bytes, data: st.DataObject) -> bytes:
    """Other bytes altogether, some others, fewer, more; of JSON another value in its place."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    how = data.draw(st.sampled_from(["json", "json", "bytes", "changed", "cut", "repeated"]))
    if how == "json":
        with contextlib.suppress(ValueError):
            lines = content.decode().splitlines()
            one = len(lines) > 1 and lines[1].startswith("{")  # .jsonl
            parsed = spoiled_json(json.loads(lines[1] if one else content), data.draw(values), rng)
            return json.dumps(parsed).encode()
    if how == "changed" and content:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 8)):
            # Rather at the beginning, where sizes and kinds stand.
            changed[rng.randrange(rng.choice([min(64, len(changed)), len(changed)]))] = rng.randrange(256)
        return bytes(changed)
    if how == "cut":
        return content[: rng.randrange(len(content) + 1)]
    if how == "repeated":
        at = rng.randrange(len(content) + 1)
        return content[:at] + content[rng.randrange(at + 1) : at] * 3 + content[at:]
    return data.draw(st.binary(max_size=200))
