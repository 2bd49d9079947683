"""The container files: every copied path exists, and all that runs in the image is a script of the project.

No image is built here: there is no container program. `launch/container.sh` is what both files run.
"""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
INSTALL = "bash launch/container.sh"


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments, in order."""
    text = re.sub(r"^#.*\n", "", (LAUNCH / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def sections() -> dict[str, list[str]]:
    """Return the lines of the definition file by section, "" for its header."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in (LAUNCH / "megalite.def").read_text().splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            found[name] = []
        elif line.strip() and not line.lstrip().startswith("#"):
            found[name].append(line.strip())
    return found


def arguments(lines: list[str]) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in lines)


def copied() -> set[str]:
    """Return what the Dockerfile copies, relative to the root."""
    paths: set[str] = set()
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            assert target.startswith("./") and (len(sources) > 1 or target in ("./", f"./{sources[0]}"))
            paths |= set(sources)
    return paths


def test_the_dockerfile_runs_scripts_of_the_project_alone() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "CMD"}
    assert names.count("FROM") == 1 and names[names.index("FROM") - 1] == "ARG"
    assert [rest for name, rest in instructions() if name == "FROM"] == ["${BASE}"]
    runs = [rest for name, rest in instructions() if name == "RUN"]
    assert runs == [INSTALL, "useradd --create-home --user-group megalite"]
    # The command runs without rights, and the virtual environment of the set-up is the one in PATH.
    [user] = [rest for name, rest in instructions() if name == "USER"]
    assert user == "megalite" and names.index("USER") > max(
        i for i, name in enumerate(names) if name == "RUN"
    )
    assert ("ENV", "PATH=/opt/megalite/.venv/bin:$PATH") in instructions()


def test_the_copied_paths_exist_and_hold_all_that_the_set_up_reads() -> None:
    assert all((ROOT / path).exists() for path in copied())
    read = (ROOT / "examples/setup.sh").read_text() + (ROOT / "pyproject.toml").read_text()
    for name in ("setup.py", "pyproject.toml", "constraints.txt", "megalite/csrc"):
        assert name in read and name.split("/")[0] in copied()
    assert {"build_backend.py", "README.md", "LICENSE", "examples", "launch", "megalite"} <= copied()


def test_the_image_of_apptainer_is_made_alike() -> None:
    made = sections()
    assert made[""] == ["Bootstrap: docker", "From: {{ BASE }}"]
    files = {}
    for line in made["files"]:
        source, target = line.split()
        files[source] = target
    assert files == {path: f"/opt/megalite/{path}" for path in copied()}
    commands = [shlex.split(line) for line in made["post"]]
    assert commands[-1] == ["bash", "/opt/megalite/launch/container.sh"]
    assert {command[0] for command in commands[:-1]} == {"export", "rm"}
    # A build argument that only one of the two knows, or with another default, would be a surprise.
    of_docker = arguments([rest for name, rest in instructions() if name == "ARG"])
    for name, value in arguments(made["arguments"]).items():
        assert of_docker[name] == value, name
        assert name == "BASE" or f"{{{{ {name} }}}}" in "\n".join(made["post"])


@pytest.mark.parametrize("file", ["Dockerfile", "megalite.def", "container.sh"])
def test_no_host_is_named_and_the_base_is_pinned(file: str) -> None:
    text = (LAUNCH / file).read_text()
    assert "://" not in text and "latest" not in text
    for image in re.findall(r"BASE=(\S+)", text):
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*", image), image


def test_a_library_of_this_machine_stays_out() -> None:
    ignored = (LAUNCH / "Dockerfile.dockerignore").read_text().split()
    assert {".venv", "**/*.so", "megalite/ops/libmegalite.json"} <= set(ignored)
    assert any("libmegalite" in line for line in sections()["post"] if line.startswith("rm "))
