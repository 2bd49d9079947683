"""The cases that a run needs proved on its device, those already known, and the implementation of each operator."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megalite.config.sections.schema import RunConfig
from megalite.errors import KernelError
from megalite.ops import trust
from megalite.ops.choice import COMPILED, NAMES
from megalite.ops.trust import Findings, OperatorChoice
from megalite.selftest.registry import Case, Workload, cases_of
from megalite.selftest.run import prove_all
from megalite.selftest.table import ENTRIES
from megalite.topology.shape import ModelShape

FIRST_RUN_SECONDS = 300.0
"""Time limit of the self-test before a run, in seconds."""
LIKE_LLAMA = Workload(
    dtype=torch.float32,
    rows=1,
    sequence=1024,
    hidden_size=1024,
    intermediate_size=2816,
    heads=16,
    key_value_heads=4,
    head_dim=64,
    vocabulary=32000,
)
"""The default workload without a run file; its dtype is replaced by the requested one."""


def workload_of(config: RunConfig, shape: ModelShape, dtype: torch.dtype) -> Workload:
    """Return the workload of a run's rank with the largest shards."""
    model, tensor = config.model, config.layout.tensor
    windows = {shape.window_of(layer) for layer in range(shape.num_hidden_layers)}
    return Workload(
        dtype=dtype,
        rows=config.batch.micro_batch_size,
        sequence=config.training.sequence_length,
        hidden_size=shape.hidden_size,
        intermediate_size=-(-shape.intermediate_size // tensor),
        heads=max(1, shape.num_attention_heads // tensor),
        key_value_heads=max(1, shape.num_key_value_heads // tensor),
        head_dim=shape.head_dim,
        vocabulary=-(-shape.vocab_size // tensor),
        norm=shape.norm,
        gated=shape.gated_mlp,
        hidden_act=shape.hidden_act,
        rotary=shape.position_embedding == "rope",
        full_attention=None in windows,
        window=shape.sliding_window if windows != {None} else None,
        documents=config.data.masks_documents,
        dropout=model.attention_dropout > 0,
        softcap=shape.attn_logit_softcapping is not None,
    )


def untested(cases: Sequence[Case], found: Findings) -> list[Case]:
    """Return the cases with an implementation that was not tested."""
    return [
        case
        for case in cases
        if case.entry.candidates.keys() - found.get(case.entry.operator, {}).get(case.key, {}).keys()
    ]


def choices_of(cases: Sequence[Case], found: Findings) -> dict[str, OperatorChoice]:
    """Return the chosen implementation of each operator that has cases."""
    choices = {}
    for operator in NAMES:
        of_it = [case for case in cases if case.entry.operator == operator]
        names = dict.fromkeys(name for case in of_it for name in case.entry.candidates)
        if of_it:
            choices[operator] = trust.choose([case.key for case in of_it], [*names], found.get(operator, {}))
    return choices


def known_choices(workload: Workload, device: torch.device) -> dict[str, OperatorChoice]:
    """Return the choices that follow from earlier tests on this machine."""
    return choices_of(cases_of(ENTRIES, workload), trust.read(trust.machine(device)))


def proved_choices(workload: Workload, device: torch.device) -> tuple[dict[str, OperatorChoice], str]:
    """Return `known_choices` after testing the untested cases, and a line about that test (empty if there was none).

    Takes at most FIRST_RUN_SECONDS; torch computes operators whose test failed or was not reached.
    """
    facts, cases = trust.machine(device), cases_of(ENTRIES, workload)
    found = trust.read(facts)
    if not (left := untested(cases, found)):
        return choices_of(cases, found), ""
    ran: list[Case] = []
    try:
        new = prove_all(
            left,
            device,
            total_seconds=FIRST_RUN_SECONDS,
            tell=lambda case, _, finding: ran.append(case) if finding.verdict != "absent" else None,
        )
    except KernelError as error:
        return choices_of(cases, found), f"{error}; torch computes what is not tested"
    found = trust.joined(found, new)
    if not ran and not untested(cases, found):
        return choices_of(cases, found), ""  # every candidate is absent: no finding worth keeping
    note = f"tested {len(set(map(id, ran)))} cases of operators on {facts['card']}"
    if rest := untested(cases, found):
        note += f"; {len(rest)} were not reached in {FIRST_RUN_SECONDS:.0f} s: run megalite selftest"
    return choices_of(cases, found), note + _kept(facts, found)


def _kept(facts: Mapping[str, str], found: Findings) -> str:
    try:
        path: Path = trust.write(facts, found)
    except OSError as error:
        return f"; not kept ({error.strerror}): set MEGALITE_TRUST_FOLDER to a folder that can be written"
    return f"; kept in {path}"


def combined(
    said: Sequence[tuple[Mapping[str, str], Mapping[str, OperatorChoice] | None]],
) -> dict[str, OperatorChoice]:
    """Combine the ranks' choices into one choice for each operator.

    said: for each rank its machine facts and, from one rank per node, the choices for that machine, else None. On a
    machine without choices every operator counts as untested. Empty if there was nothing to choose, as in float64.
    """
    tested = {
        tuple(facts.items()): [choices for other, choices in said if other == facts and choices]
        for facts, _ in said
    }
    every: list[Mapping[str, OperatorChoice]] = []
    first = next((choices for _, choices in said if choices), {})
    for of_machine in tested.values():
        nothing = {
            name: OperatorChoice(why=trust.UNTESTED, faults={COMPILED: trust.UNTESTED}) for name in first
        }
        every += of_machine or [nothing]
    return {operator: trust.agreed([choices[operator] for choices in every]) for operator in first}
