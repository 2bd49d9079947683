"""Evaluates a model on a local task file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from megalite.errors import DataError
from megalite.evaluate.choices import multiple_choice
from megalite.evaluate.code import generated, pass_rates, read_samples
from megalite.evaluate.exact_match import exact_match
from megalite.evaluate.few_shot import FewShot
from megalite.evaluate.questions import ChoiceQuestion, CodeProblem, OpenQuestion, Question
from megalite.evaluate.sandbox import DEFAULT_LIMITS, Limits, network_is_cut
from megalite.evaluate.scoring import Advance, ignore
from megalite.evaluate.task_file import TaskFile, questions
from megalite.generation.loaded import LoadedModel
from megalite.generation.prompts import Chat, chat_template
from megalite.generation.request import GREEDY, Sampling


@dataclass(frozen=True)
class CodeEvaluation:
    """How programs are made and run. ks: the k of each pass@k. samples_file: completions, instead of the model's."""

    samples: int = 1
    ks: tuple[int, ...] = (1,)
    sampling: Sampling = GREEDY
    limits: Limits = DEFAULT_LIMITS
    samples_file: Path | None = None


ONE_GREEDY_SAMPLE = CodeEvaluation()


@dataclass(frozen=True)
class TaskEvaluation:
    """The task to evaluate, and how.

    examples: the file of few-shot examples, of which `few_shot` stand before each question, drawn by `seed`. tokens:
    the most new tokens of an answer. batch_size: sequences of a forward pass, and answers generated at a time.
    chat: ask in a chat template, chat_template: its name, None: that of training. few_shot_turns: see FewShot.turns.
    """

    file: TaskFile
    examples: TaskFile | None = None
    few_shot: int = 0
    seed: int = 0
    tokens: int = 256
    batch_size: int = 8
    code: CodeEvaluation = ONE_GREEDY_SAMPLE
    chat: bool = False
    chat_template: str | None = None
    few_shot_turns: bool = False


def evaluate_task(
    loaded: LoadedModel | None, request: TaskEvaluation, advance: Advance = ignore
) -> dict[str, Any]:
    """Return the figures by name: complete on rank 0 of the model's mesh. Collective over the world.

    loaded: None only where the completions of programs are given. kind "code" runs generated programs.
    Raises DataError, with file, line and column; ConfigError for a number of tokens that the model has no room for.
    """
    found = questions(request.file)
    if request.file.kind == "code":
        return _code(loaded, cast(list[CodeProblem], found), request, advance)
    assert loaded is not None
    chat = None
    if request.chat:
        template = chat_template(loaded.source, request.chat_template)
        chat = Chat(loaded.tokenizer, loaded.source.tokenizer, template)
    few_shot = FewShot(_examples(request), request.few_shot, request.seed, chat, request.few_shot_turns)
    if request.file.kind == "multiple_choice":
        choices = cast(list[ChoiceQuestion], found)
        return _named(multiple_choice(loaded, choices, few_shot, request.batch_size, advance))
    asked = cast(list[OpenQuestion], found)
    return _named(exact_match(loaded, asked, few_shot, request.tokens, request.batch_size, advance))


def _named(figures: Any) -> dict[str, Any]:
    return {each.name: getattr(figures, each.name) for each in fields(figures)}


def _examples(request: TaskEvaluation) -> Sequence[Question]:
    if request.examples is None:
        return ()
    found = cast(list[Question], questions(request.examples))
    if len(found) < request.few_shot + 1:
        raise DataError(
            f"{request.examples.flag}: {request.examples.path} has {len(found)} questions, and "
            f"{request.few_shot} are to stand before each one; use --few-shot {max(1, len(found) - 1)}, or another file"
        )
    return found


def _code(
    loaded: LoadedModel | None, problems: list[CodeProblem], request: TaskEvaluation, advance: Advance
) -> dict[str, Any]:
    code = request.code
    if code.samples_file is not None:
        completions = read_samples(code.samples_file, problems)
        fewest = min(map(len, completions))
        if fewest < max(code.ks):
            raise DataError(
                f"--samples-file: {code.samples_file} has {fewest} completions of a problem, fewer than the k of "
                f"pass@{max(code.ks)}; use --k {fewest}"
            )
    else:
        assert loaded is not None
        completions = generated(
            loaded, problems, code.samples, request.tokens, code.sampling, request.batch_size, advance
        )
    if loaded is not None and loaded.replica.mesh.rank != 0:
        return {}
    figures = pass_rates(problems, completions, code.ks, code.limits)
    rates = {f"pass_at_{k}": rate for k, rate in figures.pass_at.items()}
    return {
        "problems": figures.problems,
        "samples": figures.samples,
        **rates,
        "failures": dict(figures.reasons),
        "network": "cut off" if network_is_cut() else "open: unshare is not permitted here",
        "limits": asdict(code.limits),
    }
