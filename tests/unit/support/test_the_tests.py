"""Rules that every test keeps: it asserts something, and it has no tolerance of its own.

Each rule is a function from the modules of tests/ to complaints; it is held against them all, and against planted
examples that break it.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
# The comparisons and their tolerances, and the test of them, which stands at their edges.
OF_PARITY = ("support/parity.py", "unit/support/test_parity.py")
# They raise where something is wrong; CHECKS are functions that run in a worker, each of which is itself a test here.
ASSERTING = {
    "pytest.raises",
    "pytest.fail",
    "pytest.warns",
    "torch.library.opcheck",
    "check_coverage",
    "CHECKS",
}
ASSERTING_NAME = re.compile(r"(assert|require)(_\w+)?")
# Functions of torch, numpy, math and pytest that compare with a tolerance.
COMPARING = re.compile(
    r"(.*\.)?(allclose|isclose|approx|assert_allclose|assert_almost_equal\w*|testing\.assert_\w+)"
)
TOLERANCE_ARGUMENT = re.compile(r"rtol|atol|rel_tol|abs_tol|rel|tolerance")
TOLERANCE_NAME = re.compile(r"(.*_)?(rtol|atol|tol|tolerance|margin|difference)", re.IGNORECASE)
# Below it a number that bounds something from above is taken for a tolerance.
SMALL = 0.05


@dataclass(frozen=True)
class TestModule:
    """A Python file: its path under tests/ and its text."""

    __test__ = False
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def dotted(self) -> str:
        return "tests." + self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """By name, methods and nested functions too."""
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Name here -> module and name there, of what is imported from other tests."""
        return {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.")
            for alias in node.names
        }  # type: ignore[misc]


def modules() -> list[TestModule]:
    return [
        TestModule(file.relative_to(TESTS).as_posix(), file.read_text(encoding="utf-8"))
        for file in sorted(TESTS.rglob("*.py"))
    ]


def references(function: ast.FunctionDef) -> Iterator[str]:
    """All names that a function mentions, dotted as they stand, and the last part of each method's."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
            yield node.attr


def asserts_itself(function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Raise) and node.exc and "AssertionError" in ast.unparse(node.exc):
            return True
    return any(name in ASSERTING or ASSERTING_NAME.fullmatch(name) for name in references(function))


class Asserting:
    """Whether a function asserts, itself or in what it mentions, followed through the modules of the tests."""

    def __init__(self, tests: Sequence[TestModule]) -> None:
        self._modules = {module.dotted: module for module in tests}
        self._known: dict[tuple[str, str], bool] = {}

    def of(self, module: TestModule, name: str) -> bool:
        key = module.dotted, name
        if key not in self._known:
            self._known[key] = False  # of one that calls itself
            function = module.functions[name]
            self._known[key] = asserts_itself(function) or any(
                self._elsewhere(module, each) for each in references(function) if each != name
            )
        return self._known[key]

    def _elsewhere(self, module: TestModule, name: str) -> bool:
        if name in module.functions:
            return self.of(module, name)
        where, there = module.imported.get(name, ("", ""))
        other = self._modules.get(where)
        return other is not None and there in other.functions and self.of(other, there)


def without_an_assertion(tests: Sequence[TestModule]) -> Iterator[str]:
    asserting = Asserting(tests)
    for module in tests:
        for name, function in module.functions.items():
            checked = any(ast.unparse(decorator) == "check" for decorator in function.decorator_list)
            if (name.startswith("test_") or checked) and not asserting.of(module, name):
                yield f"{module.path}:{function.lineno}: {name} asserts nothing"


def own_tolerances(tests: Sequence[TestModule]) -> Iterator[str]:
    for module in tests:
        if module.path in OF_PARITY:
            continue
        for node in ast.walk(module.tree):
            if reason := tolerance(node):
                line = getattr(node, "lineno", 0)
                yield f"{module.path}:{line}: {reason}; name it in tests/support/parity.py"


def tolerance(node: ast.AST) -> str | None:
    """Return why this node is a tolerance; None if it is not."""
    if isinstance(node, ast.Call):
        if COMPARING.fullmatch(name := ast.unparse(node.func)):
            return name
        for keyword in node.keywords:
            if TOLERANCE_ARGUMENT.fullmatch(keyword.arg or "") and has_number(keyword.value):
                return ast.unparse(keyword)
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        if any(map(TOLERANCE_NAME.fullmatch, names)) and has_number(node.value):
            return ast.unparse(node)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
            above = {ast.Lt: right, ast.LtE: right, ast.Gt: left, ast.GtE: left}.get(type(operator))
            if above is not None and 0 < (number(above) or 0) < SMALL:
                return ast.unparse(node)
    return None


def has_number(value: ast.expr) -> bool:
    """One other than 0, which asks for equality, stands in it."""
    return any(
        isinstance(each, ast.Constant) and isinstance(each.value, int | float) and each.value != 0
        for each in ast.walk(value)
    )


def number(value: ast.expr) -> float | None:
    """Return the value of a literal, a signed literal, or arithmetic on literals."""
    match value:
        case ast.Constant(value=int() | float() as literal):
            return float(literal)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = number(operand)
            return None if found is None else -found
        case ast.BinOp(left=left, op=operator, right=right):
            one, two = number(left), number(right)
            if one is None or two is None:
                return None
            match operator:
                case ast.Pow():
                    return one**two
                case ast.Mult():
                    return one * two
                case ast.Div():
                    return one / two
    return None


@pytest.mark.parametrize("rule", [without_an_assertion, own_tolerances], ids=lambda rule: rule.__name__)
def test_every_test_keeps(rule) -> None:
    assert not list(rule(modules()))


@pytest.mark.parametrize(
    "text",
    [
        "def test_it(): run()",
        "def test_it():\n    helper()\ndef helper(): return 1",
        "from tests.support.other import quiet\ndef test_it(): quiet()",
        "def test_it(): test_it()",
        "@check\ndef a_copy_arrives(): copy()",
    ],
)
def test_one_that_asserts_nothing_is_seen(text: str) -> None:
    other = TestModule("support/other.py", "def quiet(): return 1")
    assert list(without_an_assertion([TestModule("unit/test_it.py", text), other]))


@pytest.mark.parametrize(
    "text",
    [
        "def test_it(): assert run()",
        "def test_it():\n    with pytest.raises(ValueError): run()",
        "def test_it(): self.helper()\ndef helper(self): assert self",
        "def test_it(ranks): ranks.run(on_a_rank)\ndef on_a_rank(): assert True",
        "from tests.support.other import loud\ndef test_it(): loud()",
        "def test_it(): torch.library.opcheck(add, (1, 2))",
    ],
)
def test_one_that_asserts_is_left_alone(text: str) -> None:
    other = TestModule("support/other.py", "def loud():\n    raise AssertionError")
    assert not list(without_an_assertion([TestModule("unit/test_it.py", text), other]))


@pytest.mark.parametrize(
    "text",
    [
        "assert torch.allclose(one, two)",
        "torch.testing.assert_close(one, two)",
        "assert math.isclose(one, two)",
        "assert rate == pytest.approx(0.1)",
        "assert_close(one, two, rtol=1e-5)",
        "assert_close(one, two, rtol=100 * rtol)",
        "assert_close(one, two, rtol=LAYOUT_RTOL if exact else 1e-3)",
        "RTOL, OTHER = 1e-6, 2",
        "LARGEST_LOSS_DIFFERENCE: float = 2e-3",
        "assert error < 1e-5",
        "assert (one - two).abs().max() <= 2.0**-7",
        "assert 1e-3 > error",
    ],
)
def test_a_tolerance_of_its_own_is_seen(text: str) -> None:
    assert list(own_tolerances([TestModule("unit/test_it.py", text)]))
    assert not list(own_tolerances([TestModule("support/parity.py", text)]))


@pytest.mark.parametrize(
    "text",
    [
        "assert_close(one, two)",
        "assert_close(one, two, rtol=0)",
        "assert_close(one, two, rtol=max(rtol, ZERO_RTOL if stage else 0))",
        "assert torch.equal(one, two)",
        "assert loss < 5.0 and seconds < 0.5",
        "assert abs(trained - untrained) > 1e-4",
    ],
)
def test_a_named_or_exact_comparison_is_left_alone(text: str) -> None:
    assert not list(own_tolerances([TestModule("unit/test_it.py", text)]))
