"""Drive megalite by --json alone: repeat a command until it works, changing what its errors say to change.

The loop knows no rule of megalite. An error lists problems; a problem says what to `set`, or which `command` to run
first (docs/automation.md). From a text to a trained, measured and served model, in a few minutes on two cores:

    python examples/automation/drive.py book.txt
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MEGALITE = (sys.executable, "-m", "megalite")
ATTEMPTS = 8
STEPS = 100


class Unrepaired(Exception):
    """A command failed, and its error says nothing that a program can do."""


@dataclass
class Command:
    """A command: its words, and its --options and --section.key settings. None: unset or left out; True: a switch."""

    words: list[str]
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, words: Sequence[str]) -> "Command":
        """Return the command of an error, whose words are those of a shell: megalite COMMAND --option=value."""
        named = [word.partition("=") for word in words if word.startswith("--")]
        options = {name: value if equals else True for name, equals, value in named}
        return cls([word for word in words[1:] if not word.startswith("--")], options)

    def line(self) -> list[str]:
        """Return what is typed. A value is JSON, which is TOML too."""
        typed = []
        for name, value in self.options.items():
            is_setting = "." in name
            if is_setting or value not in (None, True):
                text = "unset" if value is None else value if isinstance(value, str) else json.dumps(value)
                typed.append(f"{name}={text}")
            elif value:
                typed.append(name)
        return [*MEGALITE, *self.words, *typed, "--json"]

    def set(self, key: str, value: Any, now: Any) -> None:
        """Set an --option, a section.key, or an argument, which is the word that stands there now."""
        if key.startswith("--"):
            self.options[key] = value
        elif "." in key and key.islower():
            self.options[f"--{key}"] = value
        else:
            self.words[self.words.index(str(now))] = str(value)


def run(command: Command) -> dict[str, Any]:
    """Run a command to its end; return its document."""
    done = subprocess.run(command.line(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def repaired(command: Command, execute: Callable[[Command], dict[str, Any]] = run) -> dict[str, Any]:
    """Return the document of a command that works, after its problems are repaired. Raises Unrepaired."""
    for _ in range(ATTEMPTS):
        document = execute(command)
        if "error" not in document:
            return document
        problems = document["error"]["problems"]
        if not any(problem["set"] or problem["command"] for problem in problems):
            break
        for problem in problems:
            repair(command, problem)
    raise Unrepaired(document["error"]["message"])


def repair(command: Command, problem: Mapping[str, Any]) -> None:
    """Do what a problem says: run its command first, and set what it names."""
    print(
        f"{problem['key']}: {problem['rule']} -> {problem['set'] or ' '.join(problem['command'])}",
        file=sys.stderr,
    )
    if problem["command"]:
        repaired(Command.of(problem["command"]))
    for key, value in problem["set"].items():
        command.set(key, value, problem["value"])


class Server:
    """A server that runs until `stop`; `start` is an `execute` of `repaired`."""

    def start(self, command: Command) -> dict[str, Any]:
        """Start it; return its document, which comes when it listens, or the error of one that ended."""
        self.process = subprocess.Popen(command.line(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        document: dict[str, Any] = json.loads(self.process.stdout.readline())
        if "error" in document:
            self.stop()
        return document

    def stop(self) -> None:
        """End it with SIGTERM, which lets it answer what it has begun."""
        self.process.terminate()
        self.process.communicate()


def complete(url: str, model: str, prompt: str) -> str:
    """Return the continuation of a prompt, by a server's OpenAI interface."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def main(text: str) -> None:
    """Train a small model on a text, measure its perplexity and ask it over HTTP; print all as one JSON object."""
    wanted = {"--data.source": text, "--run.folder": "runs/driven", "--training.steps": STEPS}
    trained = repaired(Command(["train"], wanted))
    measured = repaired(Command(["evaluate", trained["folder"]], {"--data": text}))
    server = Server()
    served = repaired(Command(["serve", trained["folder"]], {"--port": 0}), server.start)
    try:
        answer = complete(served["url"], served["model"], "The")
    finally:
        server.stop()
    print(json.dumps({"folder": trained["folder"], "figures": measured["figures"], "answer": answer}))


if __name__ == "__main__":
    main(*sys.argv[1:])
