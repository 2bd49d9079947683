"""No code that runs on an accelerator alone is without a test: what asks for the kind of a device is listed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.device_branches import ON_THE_STANDIN, TESTED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megalite"
MODULES = ("torch.cuda", "torch.accelerator", "torch.version.hip")
KINDS = ("cpu", "cuda", "nccl")


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Each function by its qualified name, with the nodes that are its own; "" for what is outside of functions."""

    def visit(node: ast.AST, name: str, inside: bool) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{name}{child.name}.", False)
            elif isinstance(child, ast.FunctionDef):
                within = f"{name}<locals>.{child.name}" if inside else f"{name}{child.name}"
                yield from ((within, each) for each in own(child))
                yield from visit(child, f"{within}.", True)
            else:
                yield from visit(child, name, inside)

    def own(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef):
                yield from own(child)

    yield from visit(tree, "", False)


def asks_for_a_device(node: ast.AST) -> bool:
    """Whether this is a question for a kind of device, or a call that only an accelerator answers."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or ast.unparse(node).startswith(MODULES)
    if isinstance(node, ast.Compare):
        words = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        asked = ast.unparse(node)
        return any(word in KINDS for word in words) and ("type" in asked or "kind" in asked)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "torch.Stream",
        "torch.Event",
        "torch.device",
    ):
        return any(isinstance(each, ast.Constant) and each.value == "cuda" for each in ast.walk(node))
    return False


def branches(text: str) -> set[str]:
    return {name for name, node in functions(ast.parse(text)) if asks_for_a_device(node)}


def found() -> set[str]:
    return {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in PACKAGE.rglob("*.py")
        if "csrc" not in path.parts
        for name in branches(path.read_text())
    }


def test_every_device_branch_is_run_by_a_test() -> None:
    listed = ON_THE_STANDIN.union(*TESTED.values())
    asking = found()
    assert not asking - listed, "list these in tests/support/device_branches.py, with the test that runs them"
    assert not listed - asking, "these no longer ask for a device"


@pytest.mark.parametrize(("path", "name"), TESTED)
def test_the_listed_tests_exist(path: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("x.is_cuda", True),
        ("torch.cuda.synchronize()", True),
        ("torch.accelerator.device_count()", True),
        ("device.type != 'cpu'", True),
        ("device_type == 'cuda'", True),
        ("query.device.type not in ('cuda', 'meta')", True),
        ("torch.device('cuda', 0)", True),
        ("name == 'cpu'", False),
        ("device.index == 0", False),
    ],
)
def test_a_new_branch_is_seen(line: str, asks: bool) -> None:
    assert branches(f"class A:\n    def f(self):\n        def g(): pass\n        if {line}: pass\n") == (
        {"A.f"} if asks else set()
    )
    assert branches(f"def f():\n    def g(): {line}\n") == ({"f.<locals>.g"} if asks else set())
