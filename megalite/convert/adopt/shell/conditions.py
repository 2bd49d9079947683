"""Answer a shell script's conditions whose operands are known: `[ "$TP" -gt 1 ]`, `[[ $X == fp8 ]]`, `-z`, `-n`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from megalite.convert.adopt.shell.expand import Variables, is_known, joined
from megalite.convert.adopt.shell.tokens import Token

_NUMBERS = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
}


def is_test(words: Sequence[str]) -> bool:
    return bool(words) and words[0] in ("[", "[[", "test")


def condition(tokens: Sequence[Token], variables: Variables) -> bool | None:
    """Return the truth of a list of tests joined by && and ||; None where only a run of the script would know."""
    result: bool | None = None
    joint = ""
    part: list[str] = []
    for token in [*tokens, Token("operator", "", 0)]:
        if token.kind == "word":
            part.append(token.text)
            continue
        if token.text not in ("&&", "||", ";", "\n", ""):
            return None
        if part:
            answer = test(part, variables)
            result = answer if not joint else _joined(result, joint, answer)
            part = []
        joint = token.text if token.text in ("&&", "||") else joint
    return result


def test(words: Sequence[str], variables: Variables) -> bool | None:
    """Return the truth of one `[ ... ]`, `[[ ... ]]`, `test ...`, `true` or `false`; None if unknown."""
    if words and words[0] == "!":
        answer = test(words[1:], variables)
        return None if answer is None else not answer
    if list(words) in (["true"], [":"], ["false"]):
        return words[0] != "false"
    if not is_test(words):
        return None
    inner = list(words[1:-1] if words[-1] in ("]", "]]") else words[1:])
    negated = bool(inner) and inner[0] == "!"
    answer = _plain(inner[negated:], variables)
    return answer if answer is None or not negated else not answer


def _plain(inner: Sequence[str], variables: Variables) -> bool | None:
    texts = [_operand(word, variables) for word in inner]
    if len(texts) == 2 and inner[0] in ("-z", "-n"):
        known = texts[1] is not None
        return (texts[1] == "") == (inner[0] == "-z") if known else None
    if len(texts) == 1:
        return None if texts[0] is None else bool(texts[0])
    if len(texts) != 3 or texts[0] is None or texts[2] is None:
        return None
    left, right = texts[0], texts[2]
    if inner[1] in ("=", "==", "!="):
        return fnmatchcase(left, right) == (inner[1] != "!=")
    compare = _NUMBERS.get(inner[1])
    try:
        return None if compare is None else bool(compare(int(left), int(right)))
    except ValueError:
        return None


def _operand(word: str, variables: Variables) -> str | None:
    text = joined(word, variables)
    return text if is_known(text) else None


def _joined(left: bool | None, joint: str, right: bool | None) -> bool | None:
    decisive = joint == "||"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive
