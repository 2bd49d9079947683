"""The text of a request, token by token. No torch."""

from collections.abc import Sequence

from megalite.data.tokenizers.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
# The tokens in front of the new ones that decide how they are decoded, such as whether a leading space stays.
_CONTEXT = 6
# No character has more tokens: what still looks incomplete then is invalid, and will not become a character.
_LONGEST_HOLD = 16


class Detokeniser:
    """Decodes new tokens as `decode` does the whole text: without special tokens, never half a character."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._before = self._decoded(self._ids)
        if self._before.endswith(_INCOMPLETE):  # the prompt ended inside of a character
            self._ids, self._before = [], ""
        self._known = len(self._ids)

    def push(self, token: int) -> str:
        """Return the characters that the token completes; "" within a character."""
        self._ids.append(token)
        text = self._decoded(self._ids)
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._known < _LONGEST_HOLD:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return the text of the tokens that were held back."""
        return self._take(self._decoded(self._ids)) if len(self._ids) > self._known else ""

    def _take(self, text: str) -> str:
        """Return what `text`, that of all kept tokens, adds to the text known before."""
        # A tokenizer may decode tokens before the new ones otherwise when others follow.
        follows = text.startswith(self._before)
        new = text[len(self._before) :] if follows else self._decoded(self._ids[self._known :])
        if new:
            self._ids = self._ids[self._known :]
            text = self._decoded(self._ids)
        self._before, self._known = text, len(self._ids)
        return new

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class StopScan:
    """Passes text on up to the first of several strings; holds back text that may begin one of them."""

    def __init__(self, stop: Sequence[str]):
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown, and whether a stop string has ended it."""
        whole = self._held + text
        places = [place for place in (whole.find(each) for each in self._stop) if place >= 0]
        if places:
            self._held = ""
            return whole[: min(places)], True
        kept = max((_overlap(whole, each) for each in self._stop), default=0)
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept], False

    def finish(self) -> str:
        """Return the text that was held back, as no stop string follows."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
