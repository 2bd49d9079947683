"""Evaluates a model on tasks of lm_eval."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.evaluate.calls import follow, release
from megalite.generation.loaded import LoadedModel

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task


@dataclass(frozen=True)
class TaskEvaluation:
    """How a model is asked.

    num_fewshot: solved examples before each question; None: as the task says. limit: only the first questions of each
    task. gen_kwargs: settings of generation, in lm_eval's form KEY=VALUE,... chat: asks in the chat template, each
    example a message and its answer; chat_template: its name, None: that of training. seed: of examples and samples;
    None: lm_eval's own. batch_size: sequences of a forward pass, and answers generated at a time.
    """

    num_fewshot: int | None = None
    limit: int | None = None
    gen_kwargs: str | None = None
    chat: bool = False
    chat_template: str | None = None
    seed: int | None = None
    batch_size: int = 8


def evaluate_tasks(
    loaded: LoadedModel, tasks: "Sequence[Task | Group]", request: TaskEvaluation
) -> dict[str, Any] | None:
    """Return lm_eval's results on rank 0 of the model's mesh, None on other ranks. Collective over the world.

    tasks: of `task_list.load_tasks`, on rank 0. It alone asks them and makes the figures; the others compute with it.
    """
    if loaded.replica.mesh.rank != 0:
        follow(loaded)
        return None
    try:
        return _results(loaded, tasks, request)
    finally:
        release(loaded)


def results_table(results: dict[str, Any]) -> str:
    """Return lm_eval's table of tasks and, if there are any, of groups."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    return "\n".join([*tables, make_table(results, "groups")] if results.get("groups") else tables).rstrip()


def _results(loaded: LoadedModel, tasks: "Sequence[Task | Group]", request: TaskEvaluation) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from megalite.evaluate.harness import MegaliteLM

    model = MegaliteLM(loaded, batch_size=request.batch_size, seed=request.seed or 0, leads=True)
    if request.chat:
        model.chat_template(request.chat_template or True)
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model,
        tasks=list(tasks),
        task_manager=TaskManager(include_defaults=False),  # of its own it would read all of its tasks
        num_fewshot=request.num_fewshot,
        limit=request.limit,
        gen_kwargs=request.gen_kwargs,
        batch_size=request.batch_size,
        apply_chat_template=request.chat,
        fewshot_as_multiturn=request.chat,
        log_samples=False,
        confirm_run_unsafe_code=True,  # load_tasks has asked
        **({} if request.seed is None else dict.fromkeys(seeds, request.seed)),
    )
    return results
