"""Rules that every test keeps: it asserts something, has no tolerance of its own, and uses no private name of megalite.

Each rule is a function from the modules of tests/ to complaints; it is held against them all, and against planted
examples that break it.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
# The comparisons and their tolerances, and the test of them, which stands at their edges.
OF_PARITY = ("support/parity.py", "unit/support/test_parity.py")
# Private names of megalite that a file uses, and why. A limit in a private constant may be made small anywhere.
_PRIVATE_NAMES: dict[str, dict[str, str]] = {
    "plants a fault inside of a module": {
        "distributed/test_gradient_buckets.py": "_watched",
        "parity/test_generation.py": "_visible",
        "parity/test_prompt_scores.py": "_admit",
        "standin/test_faults.py": "_total",
        "support/mutations.py": "_LossSums _Reduce _as_trained _behind_prefix _counted _fill _lora_parameters _mark"
        " _mask _mesh _seen _this_batch _total _watched",
        "support/verify_faults.py": "_Step _average_weights _compute",
    },
    "stands in for other hosts, for cards, or for what costs minutes": {
        "cli/test_doctor.py": "_connect",
        "cli/test_launch_restarts.py": "_ask _attempt",
        "unit/launcher/control/test_coordinator.py": "_connections _pause _pause_of_probes _socket _watch_silence",
        "unit/launcher/rank/test_mpi.py": "_Probe _reaches",
        "unit/ops/test_attention_backends.py": "_chip _has_flash_kernel",
        "unit/train/test_shared_inputs.py": "_fingerprint",
        "unit/train/optimizer/test_deepspeed_ops.py": "_missing_programs",
        "unit/train/checkpoints/test_resume_check.py": "_places",
        "unit/train/test_start_method.py": "_computes_after_fork",
    },
    "calls a part whose caller needs a terminal, several processes, real launchers, files of the kernel or weights": {
        "cli/test_generate_cli.py": "_lines",
        "unit/checkpoint/test_bijection.py": "_write_weights",
        "unit/convert/test_huggingface.py": "_write_weights",
        "unit/launcher/control/test_launcher_watch.py": "_is_deepspeed _launchers",
        "unit/launcher/test_process.py": "_control_groups _memory_left _quota",
        "unit/train/test_start_method.py": "_start_method",
    },
    "draws many inputs for a part that its caller reaches with few": {
        "unit/checkpoint/test_manifest.py": "_tiling_problem",
    },
    "records which parts work, and in which order": {
        "distributed/test_schedules.py": "_Step _compute",
        "unit/data/test_resuming.py": "_EncodeText",
    },
    "looks at a state that no result shows: which optimizer works, on which device a cache is": {
        "kernels/test_adamw.py": "_masters _optimizer _tensors",
        "kernels/test_apex.py": "_masters _optimizer",
        "unit/generation/test_batch_engine.py": "_caches _engine",
        "unit/train/test_resume.py": "_optimizer",
    },
    "empties a cache of the process": {
        "kernels/test_attention.py": "_tell",
        "standin/test_attention.py": "_compiled",
        "unit/config/test_unknown_keys.py": "_warn_once",
    },
    "breaks a connection as the death of its process does": {"support/members.py": "_left _socket"},
    "names the private fields of DeepSpeed that production stands on, or compares with its function": {
        "distributed/test_deepspeed_fields.py": "_all_gather _engine _zero",
        "unit/train/optimizer/test_deepspeed_gather.py": "_all_gather",
    },
}
PRIVATE_NAMES: dict[str, set[str]] = {}
for _files in _PRIVATE_NAMES.values():
    for _path, _names in _files.items():
        PRIVATE_NAMES.setdefault(_path, set()).update(_names.split())
PRIVATE = re.compile(r"_(?!_)\w*[a-z]\w*")  # not a constant
# Names of torch's operators and options of groups, and of argparse's parsers, that megalite uses too.
OTHERS_PRIVATE_NAMES = {"_schema", "_timeout", "_actions"}
MEGALITE = TESTS.parent / "megalite"
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


@cache
def modules() -> tuple[TestModule, ...]:
    return tuple(
        TestModule(file.relative_to(TESTS).as_posix(), file.read_text(encoding="utf-8"))
        for file in sorted(TESTS.rglob("*.py"))
    )


def dotted(node: ast.expr) -> str:
    """Return the text of a name and its attributes, as `ast.unparse` does in fifty times the time; else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def references(function: ast.FunctionDef) -> Iterator[str]:
    """All names that a function mentions, dotted as they stand, and the last part of each method's."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield dotted(node)
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
        if COMPARING.fullmatch(name := dotted(node.func)):
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


@cache
def private_names_of_megalite() -> frozenset[str]:
    """Return the private names of functions, classes, methods and attributes that megalite defines."""
    names = set[str]()
    for file in MEGALITE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(filter(PRIVATE.fullmatch, names - OTHERS_PRIVATE_NAMES))


def private_names(tests: Sequence[TestModule]) -> Iterator[str]:
    for module in tests:
        own = set(module.functions) | {
            node.attr
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        }
        elsewhere = {
            alias.asname or alias.name
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if not (getattr(node, "module", None) or alias.name).startswith(("megalite", "tests"))
        }
        of_megalite = private_names_of_megalite() - own - PRIVATE_NAMES.get(module.path, set())
        for node in ast.walk(module.tree):
            for name in sorted(private_names_in(node, elsewhere) & of_megalite):
                yield f"{module.path}:{getattr(node, 'lineno', 0)}: {name} is private"


def private_names_in(node: ast.AST, elsewhere: set[str]) -> set[str]:
    """Return the private names that this node imports, asks of an object, or patches.

    elsewhere: the names of what other packages have given, whose private names are their own.
    """
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megalite"):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Attribute):
        owner: ast.expr = node
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        names = [] if isinstance(owner, ast.Name) and owner.id in elsewhere else [node.attr]
    elif isinstance(node, ast.Call) and dotted(node.func) != "Planted":  # a fault stands inside of a module
        # monkeypatch.setattr(module, "_name"), patch("module._name")
        texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
        names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
    else:
        return set()
    return set(filter(PRIVATE.fullmatch, names))


@pytest.mark.parametrize(
    "rule", [without_an_assertion, own_tolerances, private_names], ids=lambda rule: rule.__name__
)
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


@pytest.mark.parametrize(
    "text",
    [
        "from megalite.launcher.process import _quota",
        "from megalite.launcher import process\nassert process._quota(folder)",
        "monkeypatch.setattr(process, '_quota', lambda folder: 1.5)",
        "mock.patch('megalite.launcher.process._quota')",
    ],
)
def test_a_private_name_of_megalite_is_seen(text: str) -> None:
    assert list(private_names([TestModule("unit/test_it.py", text)]))
    assert not list(private_names([TestModule("unit/launcher/test_process.py", text)]))


@pytest.mark.parametrize(
    "text",
    [
        "def _quota(): return 1\nassert thing._quota()",
        "Planted('megalite.launcher.process:Limits._quota', instead(None))",
        "monkeypatch.setattr(member, '_STRANGER_SECONDS', 0.3)",
        "import os\nassert os._exit and os._quota() and pair._replace(one=1)",
        "from os import path\nassert path._quota()",
    ],
)
def test_a_private_name_of_anything_else_is_left_alone(text: str) -> None:
    assert not list(private_names([TestModule("unit/test_it.py", text)]))


def test_every_exception_is_one() -> None:
    """A name that a file no longer uses is taken off the list."""
    known = {module.path: module for module in modules()}
    used = {
        path: {
            complaint.split(": ")[1].split()[0]
            for complaint in private_names([TestModule(f"other/{path}", known[path].text)])
        }
        for path in PRIVATE_NAMES
        if path in known
    }
    assert used == PRIVATE_NAMES
