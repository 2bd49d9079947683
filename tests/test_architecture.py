"""The rules of ARCHITECTURE.md that a parser can see: who imports whom, who owns what, how long files are.

Each rule is a function from a module to complaints; one test holds them against the package, another against a
line that breaks them.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megalite"

# A module imports only from a lower row, or from its own package.
ROWS = {
    "errors": 0,
    "version": 0,
    "csrc": 0,  # setup.py loads its only module, without megalite
    "topology": 1,
    "families": 2,
    "launcher": 2,
    "config": 3,
    "ops": 3,
    "parallel": 4,
    "monitor": 4,
    "model": 5,
    "data": 5,
    "planner": 5,
    "checkpoint": 6,
    "selftest": 6,
    "convert": 7,
    "generation": 8,
    "evaluate": 9,
    "serve": 9,
    "report": 10,
    "train": 10,
    "studies": 10,
    "verify": 11,
    "cli": 12,
    "__main__": 13,
    "__init__": 13,
}
# Within a package of wings: a wing or a file beside the wings -> what it may import of the package besides itself.
WINGS: dict[str, dict[str, set[str]]] = {
    "launcher": {
        "local": {"control", "rank", "process", "exit_codes"},
        "hosts": {"control", "rank", "process", "exit_codes"},
        "control": {"rank", "process", "exit_codes"},
        "rank": {"process"},
        "machine_report": {"process"},
    },
    "config": {
        "smaller_layout": {"load", "flags", "sections"},
        "load": {"rules", "sources", "deepspeed", "sections", "validate", "flags", "first_run"},
        "flags": {"sections", "foreign_flags"},
        "rules": {"sections", "peft_names"},
        "sources": {"sections", "peft_names"},
        "deepspeed": {"sections"},
        "output": {"sections"},
        "validate": {"sections"},
        "first_run": {"sections"},
    },
    "data": {
        "ensure": {"prepare", "batches", "chat", "tokenizers", "files", "text"},
        "prepare": {"chat", "tokenizers", "files", "text"},
        "batches": {"tokenizers", "files", "text"},
        "chat": {"tokenizers", "files", "text"},
        "tokenizers": {"files", "text"},
        "files": {"text"},
    },
    "train": {
        "run": {
            "callbacks",
            "inputs",
            "interruption",
            "local_restarts",
            "meet_ranks",
            "optimizer",
            "rank",
            "run_folder",
            "start",
            "time_budget",
        },
        "rank": {
            "callbacks",
            "checkpoints",
            "inputs",
            "interruption",
            "loaders",
            "loop",
            "optimizer",
            "out_of_memory",
            "report",
            "run_folder",
            "shared_inputs",
            "start",
            "start_record",
            "step",
            "time_budget",
            "validation",
        },
        "loop": {"callbacks", "checkpoints", "interruption", "report", "step", "time_budget", "validation"},
        "local_restarts": {"run_progress"},
        "meet_ranks": {"start"},
        "out_of_memory": {"interruption"},
        "shared_inputs": {"inputs", "run_folder"},
        "inputs": {"checkpoints", "run_folder"},
        "loaders": {"validation"},
        "report": {"step"},
        "start_record": {"run_folder", "step"},
        "callbacks": {"step"},
        "validation": {"step"},
        "checkpoints": {"step"},
        "step": {"assemble", "optimizer"},
        "assemble": {"optimizer"},
        "optimizer": set(),
    },
}
# They take numbers, tensors and groups, so that they can be used without a run's configuration.
WITHOUT_CONFIG = ("parallel", "ops")
TORCH_FREE = ("__init__", "errors", "version", "topology", "families", "config", "launcher", "planner")
# Imported name -> the files that may import it. The longest matching name decides.
OWNERS = {
    "torch.distributed": ("parallel/",),
    "torch.distributed.checkpoint": ("checkpoint/",),
    "deepspeed": tuple(f"train/optimizer/deepspeed{part}.py" for part in ("", "_experts", "_gather", "_ops")),
    "pickle": ("convert/foreign/plain_pickle.py",),  # its unpickler knows listed opcodes and stand-ins only
    "marshal": (),
    "shelve": (),
    "dill": (),
}
PRINTERS = ("cli/", "__main__.py", "monitor/console.py")
ENVIRONMENT = ("launcher/rank/detect.py", "launcher/rank/environment.py")
OPERATOR_FLAGS = {"fused"}
VAGUE_NAMES = re.compile(r"(utils?|helpers?|misc|common|.*_(part\d*|helpers?|utils?))\.py")
FILE_LINES, FUNCTION_LINES, TEST_LINES, CSRC_LINES = 400, 60, 600, 800
PARAMETERS = 6
# Functions with more parameters: their signature is another's, which they hand on.
MIRRORS = {"ops/packed_attention.py:packed_attention": "the compiled operator's schema, csrc/attention.h"}
# A sentence whose first word is neither its subject nor its verb.
INVERTED = re.compile(r"(?:^|[.!?] )((?:Of|What) [a-z]\w*)")


@dataclass(frozen=True)
class Module:
    """A Python file: its path under megalite/ and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """The first name after megalite in the module's own."""
        return self.path.split("/")[0].removesuffix(".py")

    def under(self, places: Iterable[str]) -> bool:
        return any(self.path.startswith(place) for place in places)


Rule = Callable[[Module], Iterator[str]]


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of all that is imported anywhere in a module; `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_rows(module: Module) -> Iterator[str]:
    importer = module.package
    for line, name in imports(module.tree):
        if name.startswith("."):
            yield f"{line}: relative import of {name}; name the module from megalite on"
        if not name.startswith("megalite."):
            continue
        imported = name.split(".")[1]
        if imported not in ROWS:
            yield f"{line}: {name} is of no known package"
        elif imported != importer and ROWS[imported] >= ROWS.get(importer, -1):
            yield f"{line}: {importer} (row {ROWS.get(importer)}) imports {name} (row {ROWS[imported]})"
        elif imported == "config" and importer in WITHOUT_CONFIG:
            yield f"{line}: {importer} imports {name}"


def wing_arrows(module: Module) -> Iterator[str]:
    package, _, inner = module.path.partition("/")
    if package not in WINGS or inner == "__init__.py":
        return
    importer = inner.split("/")[0].removesuffix(".py")
    for line, name in imports(module.tree):
        parts = name.split(".")
        if parts[:2] == ["megalite", package] and len(parts) > 2:
            allowed = WINGS[package].get(importer, set()) | {importer}
            if parts[2] not in allowed:
                yield f"{line}: {package}/{importer} imports {name}"


def sole_owners(module: Module) -> Iterator[str]:
    for line, name in imports(module.tree):
        fitting = [owned for owned in OWNERS if f"{name}.".startswith(f"{owned}.")]
        if fitting and not module.under(OWNERS[max(fitting, key=len)]):
            yield f"{line}: imports {name}"
    for node in ast.walk(module.tree):
        used = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        if used and not module.under(("parallel/", "checkpoint/")):
            yield f"{node.lineno}: uses torch.distributed"


def environment(module: Module) -> Iterator[str]:
    names = {f"os.{name}" for name in ("environ", "environb", "getenv", "putenv", "unsetenv")}
    used = [
        (node.lineno, ast.unparse(node)) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)
    ]
    for line, name in [*used, *imports(module.tree)]:
        if name in names and not module.under(ENVIRONMENT):
            yield f"{line}: {name}"


def calls(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "print" and not module.under(PRINTERS):
            yield f"{node.lineno}: print"
        if name in ("eval", "exec"):
            yield f"{node.lineno}: {name}"
        if name == "torch.load" and keywords.get("weights_only") != "True":
            yield f"{node.lineno}: torch.load without weights_only=True"
        if keywords.get("trust_remote_code", "False") != "False":
            yield f"{node.lineno}: trust_remote_code"
        if name.endswith(("new_group", "init_process_group")) and "timeout" not in keywords:
            yield f"{node.lineno}: {name} without timeout has the limits of torch, not launch.collective_seconds"


def torch_free(module: Module) -> Iterator[str]:
    if module.package in TORCH_FREE or module.path in ("cli/__init__.py", "cli/commands.py"):
        for line, name in imports(module.tree):
            if name.split(".")[0] in ("torch", "transformers", "deepspeed"):
                yield f"{line}: imports {name}"


def annotated(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef) or (node.name.startswith("_") and node.name != "__init__"):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [each.arg for each in arguments if each.annotation is None and each.arg not in ("self", "cls")]
        if node.returns is None and node.name != "__init__":
            bare.append("return")
        if bare:
            yield f"{node.lineno}: {node.name} has no type for {', '.join(bare)}"


def sizes(module: Module) -> Iterator[str]:
    counted = code_lines(module)
    if len(counted) > FILE_LINES:
        yield f"{len(counted)} lines, of at most {FILE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = len(counted.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
            if length > FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {length} lines, of at most {FUNCTION_LINES}"


def parameters(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > PARAMETERS and f"{module.path}:{node.name}" not in MIRRORS:
            yield f"{node.lineno}: {node.name} has {count} parameters, of at most {PARAMETERS}: use a record"


def code_lines(module: Module) -> set[int]:
    """The lines that count: no blank ones, docstrings nor tables of data."""
    lines = {line for line, text in enumerate(module.text.splitlines(), start=1) if text.strip()}
    docstrings = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    tables = [
        node
        for node in module.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_literal(node.value)
    ]
    for node in docstrings + tables:
        lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def operators_without_flags(module: Module) -> Iterator[str]:
    """Which implementation of an operator is used is decided in ops/choice.py alone."""
    if module.path == "ops/choice.py":
        return
    for node in ast.walk(module.tree):
        typed: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            typed = [(each.arg, each.annotation) for each in arguments]
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            typed = [(ast.unparse(each.target), each.annotation) for each in fields]
        names = {name for name, hint in typed if hint is None or ast.unparse(hint) == "bool"}
        for name in OPERATOR_FLAGS.intersection(names):
            yield f"{node.lineno}: {name}"


def plain_sentences(module: Module) -> Iterator[str]:
    """A sentence begins with its subject or its verb, not with "Of ..." or "What ..."."""
    texts = [
        (node.lineno, node.value.value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    texts += [
        (token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT
    ]
    for line, text in texts:
        for found in INVERTED.finditer(" ".join(text.split())):
            yield f"{line}: a sentence begins with {found[1]!r}"


RULES: list[Rule] = [
    import_rows,
    wing_arrows,
    sole_owners,
    environment,
    calls,
    torch_free,
    annotated,
    sizes,
    parameters,
    operators_without_flags,
    plain_sentences,
]


@cache
def modules(folder: Path = PACKAGE) -> tuple[Module, ...]:
    """Return the modules of a folder; to parse them takes seconds, and every rule reads the same trees."""
    files = sorted(folder.rglob("*.py"))
    return tuple(
        Module(file.relative_to(folder).as_posix(), file.read_text(encoding="utf-8")) for file in files
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule: Rule) -> None:
    complaints = [f"megalite/{module.path}:{each}" for module in modules() for each in rule(module)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_every_exemption_from_the_number_of_parameters_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the table would hide a function that grows later."""
    exempt = set(MIRRORS)
    monkeypatch.setattr(sys.modules[__name__], "MIRRORS", {})
    long = {
        f"{module.path}:{complaint.split()[1]}" for module in modules() for complaint in parameters(module)
    }
    assert exempt == long


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_tests_and_benchmarks_speak_plainly(folder: str) -> None:
    complaints = [
        f"{folder}/{module.path}:{each}"
        for module in modules(ROOT / folder)
        for each in plain_sentences(module)
    ]
    assert not complaints, "\n" + "\n".join(complaints)


BROKEN = [
    (import_rows, "data/batches/loader.py", "from megalite.train.step.train_step import TrainStep"),
    (import_rows, "monitor/jsonl.py", "import megalite.parallel.mesh"),
    (import_rows, "parallel/mesh.py", "from megalite.config import schema"),
    (import_rows, "ops/norms.py", "def late():\n    from megalite.config.sections.schema import RunConfig"),
    (import_rows, "errors.py", "from megalite.topology.axes import Layout"),
    (import_rows, "model/mlp.py", "from .norms import RMSNorm"),
    (import_rows, "model/mlp.py", "from megalite.extras import x"),
    (wing_arrows, "launcher/rank/detect.py", "from megalite.launcher.control.member import Member"),
    (wing_arrows, "launcher/control/member.py", "def late():\n    import megalite.launcher.local"),
    (wing_arrows, "launcher/process.py", "from megalite.launcher import local"),
    (wing_arrows, "config/sections/schema.py", "from megalite.config.rules import every"),
    (wing_arrows, "config/rules/layout.py", "from megalite.config.output.summary import shape_line"),
    (wing_arrows, "train/step/train_step.py", "from megalite.train.checkpoints.saving import RunSaver"),
    (wing_arrows, "train/optimizer/torch.py", "from megalite.train.step.state import StepReport"),
    (wing_arrows, "data/text/corpus.py", "from megalite.data.chat.messages import Message"),
    (wing_arrows, "data/batches/loader.py", "from megalite.data.prepare.prepare import prepare"),
    (sole_owners, "train/trainer.py", "import torch.distributed as dist"),
    (sole_owners, "train/trainer.py", "from torch import distributed"),
    (sole_owners, "train/trainer.py", "import torch\nworld = torch.distributed.get_world_size()"),
    (sole_owners, "parallel/mesh.py", "import torch.distributed.checkpoint"),
    (sole_owners, "train/optimizer.py", "from deepspeed.ops import adam"),
    (sole_owners, "checkpoint/manifest.py", "import pickle"),
    (environment, "cli/train.py", "import os\nrank = os.environ['RANK']"),
    (environment, "launcher/hosts/commands.py", "from os import getenv"),
    (calls, "train/trainer.py", "print('loss')"),
    (calls, "config/load.py", "eval('1')"),
    (calls, "checkpoint/load.py", "torch.load(path)"),
    (calls, "checkpoint/load.py", "torch.load(path, weights_only=False)"),
    (calls, "convert/huggingface/export.py", "AutoModel.from_pretrained(path, trust_remote_code=True)"),
    (calls, "parallel/mesh.py", "dist.new_group([0, 1])"),
    (torch_free, "config/rules/check.py", "def late():\n    import torch"),
    (torch_free, "cli/__init__.py", "from transformers import AutoConfig"),
    (annotated, "data/batches/loader.py", "def load(path) -> None: ..."),
    (annotated, "data/batches/loader.py", "def load(path: str): ..."),
    (parameters, "model/mlp.py", "def run(a, b, c, d, *, e, f, g): ..."),
    (parameters, "model/mlp.py", "class MLP:\n    async def run(self, a, b, c, d, e, f, g): ..."),
    (sizes, "data/batches/loader.py", "\n".join(f"call({line})" for line in range(FILE_LINES + 1))),
    (sizes, "data/batches/loader.py", "def long():\n" + "    call()\n" * FUNCTION_LINES),
    (operators_without_flags, "ops/norms.py", "def norm(x: Tensor, *, fused: bool) -> Tensor: ..."),
    (operators_without_flags, "model/options.py", "class Options:\n    fused: bool = False"),
    (plain_sentences, "data/batches/loader.py", '"""Of a batch, its rows."""'),
    (plain_sentences, "data/batches/loader.py", "rows = 1  # Read once. What is left stays."),
]


@pytest.mark.parametrize(("rule", "path", "source"), BROKEN)
def test_a_broken_rule_is_seen(rule: Rule, path: str, source: str) -> None:
    assert list(rule(Module(path, source)))


KEPT = [
    (import_rows, "checkpoint/save.py", "from megalite.topology.axes import Layout"),
    (import_rows, "cli/__init__.py", "from megalite.version import __version__"),
    (sole_owners, "checkpoint/save.py", "import torch.distributed.checkpoint as dcp"),
    (calls, "model/stages.py", "stage.eval()"),
    (calls, "parallel/mesh.py", "dist.new_group([0, 1], timeout=limit)"),
    (plain_sentences, "data/batches/loader.py", '"""Return the rows of a batch."""'),
    (operators_without_flags, "ops/choice.py", "class Operators:\n    fused: bool = False"),
    (sizes, "config/tables.py", "KEYS = [\n" + '    "key",\n' * (FILE_LINES + 1) + "]"),
    (
        sizes,
        "data/batches/loader.py",
        'def short():\n    """' + "words\n\n" * FUNCTION_LINES + '    """\n    call()\n',
    ),
]


@pytest.mark.parametrize(("rule", "path", "source"), KEPT)
def test_what_is_allowed_passes(rule: Rule, path: str, source: str) -> None:
    assert not list(rule(Module(path, source)))


def imported_modules(package: Sequence[Module]) -> dict[str, set[str]]:
    """Each module's dotted name -> those of the modules that it imports, at its top or within a function."""
    names = {dotted_name(module): module for module in package}
    return {
        importer: {
            target
            for _, name in imports(module.tree)
            if (target := name if name in names else name.rpartition(".")[0]) in names and target != importer
        }
        for importer, module in names.items()
    }


def dotted_name(module: Module) -> str:
    return f"megalite/{module.path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_circles(package: Sequence[Module]) -> list[list[str]]:
    """Groups of modules each of which imports all others of its group, through whatever modules."""
    graph = imported_modules(package)
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[start] = seen
    circles = {
        tuple(sorted(each for each in seen if start in reached[each])) for start, seen in reached.items()
    }
    return [list(circle) for circle in sorted(circles) if circle]


def test_no_modules_import_each_other() -> None:
    assert not import_circles(modules())


def test_a_circle_of_imports_is_seen() -> None:
    circle = [
        Module("config/sections/schema.py", "def late():\n    from megalite.config.load import load_config"),
        Module("config/load.py", "from megalite.config.rules import every"),
        Module("config/rules/every.py", "from megalite.config.sections.schema import RunConfig"),
        Module("cli/config.py", "from megalite.config.load import load_config"),
    ]
    named = ["megalite.config.load", "megalite.config.rules.every", "megalite.config.sections.schema"]
    assert import_circles(circle) == [named]


def test_the_other_files_are_short_too() -> None:
    long = [
        f"{folder}/{module.path}"
        for folder in ("tests", "benchmarks")
        for module in modules(ROOT / folder)
        if len(code_lines(module)) > TEST_LINES
    ]
    long += [str(file) for file in compiled_sources() if len(file.read_text().splitlines()) > CSRC_LINES]
    assert not long


def compiled_sources() -> list[Path]:
    files = (PACKAGE / "csrc").rglob("*.*")
    return sorted(file for file in files if file.suffix in (".cpp", ".cu", ".cuh", ".h"))


def test_files_are_named_for_what_they_hold() -> None:
    assert VAGUE_NAMES.fullmatch("utils.py") and VAGUE_NAMES.fullmatch("trainer_part2.py")
    assert not [module.path for module in modules() if VAGUE_NAMES.fullmatch(Path(module.path).name)]


def class_names(package: Sequence[Module]) -> dict[str, list[str]]:
    """Return each public class -> the modules that define a class of this name."""
    places: dict[str, list[str]] = {}
    for module in package:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.path)
    return places


def test_a_class_name_stands_once() -> None:
    twice = [Module("data/a.py", "class Piece: ..."), Module("ops/b.py", "def f():\n    class Piece: ...")]
    assert class_names(twice) == {"Piece": ["data/a.py", "ops/b.py"]}
    assert not {name: paths for name, paths in class_names(modules()).items() if len(paths) > 1}


def test_every_package_has_its_row() -> None:
    found = {module.package for module in modules()} - {"__init__"}
    assert found <= ROWS.keys(), f"without a row: {sorted(found - ROWS.keys())}"


def test_command_line_config_topology_and_launcher_load_no_torch() -> None:
    names = [dotted_name(module) for module in modules() if module.package in TORCH_FREE] + ["megalite.cli"]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print(*sorted({'torch', 'transformers', 'deepspeed', 'tokenizers'} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip() == ""
