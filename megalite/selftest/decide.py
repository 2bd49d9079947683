"""The operators that a run uses on its device, with the reason: by `model.kernels` and the self-tests of its card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, KernelError, Problem
from megalite.ops import extension
from megalite.ops.choice import ALL_COMPILED, COMPILED, PLAIN_TORCH, SLOTS, TORCH, Operators
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest import trust
from megalite.selftest.registry import Case, Workload, cases_of
from megalite.selftest.trust import UNTESTED, Findings, OperatorChoice
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape

Asked = Literal["auto", "fused", "reference"]
FIRST_RUN_SECONDS = 300.0
"""Time limit of the self-test before a run, in seconds."""


def workload_of(config: RunConfig, shape: ModelShape, dtype: torch.dtype) -> Workload:
    """Return the workload of a run's rank with the largest shards."""
    return replace(
        workload_of_model(shape, dtype, config.layout.tensor),
        rows=config.batch.micro_batch_size,
        sequence=config.training.sequence_length,
        documents=config.data.masks_documents,
        dropout=config.model.attention_dropout > 0,
    )


def workload_of_model(shape: ModelShape, dtype: torch.dtype, tensor: int) -> Workload:
    """Return the workload of one token. tensor: the size of the tensor parallel axis."""
    experts = shape.experts if isinstance(shape, MixtureShape) else None
    windows = {shape.window_of(layer) for layer in range(shape.num_hidden_layers)}
    return Workload(
        dtype=dtype,
        sequence=1,
        hidden_size=shape.hidden_size,
        intermediate_size=-(-shape.intermediate_size // tensor),
        heads=max(1, shape.num_attention_heads // tensor),
        key_value_heads=max(1, shape.num_key_value_heads // tensor),
        head_dim=shape.head_dim,
        vocabulary=-(-shape.vocab_size // tensor),
        norm=shape.norm,
        gated=shape.gated_mlp,
        experts_per_token=experts.num_experts_per_tok if experts else 0,
        hidden_act=shape.hidden_act,
        rotary=shape.position_embedding == "rope",
        qk_norm=shape.qk_norm is not None,
        full_attention=None in windows,
        window=shape.sliding_window if windows != {None} else None,
        softcap=shape.attn_logit_softcapping is not None,
    )


@dataclass(frozen=True)
class KernelChoice:
    """The operators that model.kernels stands for on a device; why: the reason, for people.

    name: "mixed" where an accelerator has some operators by torch and some by others.
    """

    name: Literal["fused", "reference", "mixed"]
    why: str
    operators: Operators = PLAIN_TORCH

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose_kernels(
    asked: Asked, device_type: str, choices: Mapping[str, OperatorChoice] | None = None
) -> KernelChoice:
    """Choose the compiled operators. choices: the choice for each of the model's operators on an accelerator.

    Raises ConfigError where compiled operators are asked for and cannot run, or have not proved themselves, here.
    """
    if asked == "reference":
        return KernelChoice("reference", 'model.kernels = "reference"')
    complaint = extension.why_not(device_type)
    if complaint and asked == "fused":
        message = f'"fused": the compiled operators cannot run here: {complaint}'
        raise ConfigError([Problem("model.kernels", message, 'or use "auto" or "reference"')])
    if not trust.needs_proof(device_type):
        if complaint:
            return KernelChoice("reference", f"no compiled operators here: {complaint}")
        record = extension.built()
        compiled = f"compiled for {record.cpu or record.machine} by {record.cxx}"
        return KernelChoice("fused", compiled, ALL_COMPILED)
    if asked == "fused":
        _require_proved(choices or {})
    if not choices:
        untested = UNTESTED if choices is None else "none is tested in this precision"
        return KernelChoice("reference", f"no compiled operators here: {complaint or untested}")
    return _proved(choices)


def _require_proved(choices: Mapping[str, OperatorChoice]) -> None:
    """ConfigError for every compiled operator that failed here or was not tested."""
    remedy = 'use "auto", which has torch compute it, or "reference"'
    messages = [
        f"the compiled {SLOTS[operator].words} ({operator}) cannot be trusted on this card: {fault}"
        for operator, choice in choices.items()
        if (fault := choice.faults.get(COMPILED, ""))
    ]
    if not choices:
        messages = ["no operator is proved on this card"]
        remedy = 'run megalite selftest with this run file, or use "auto"'
    if problems := [Problem("model.kernels", f'"fused": {message}', remedy) for message in messages]:
        raise ConfigError(problems)


def _proved(choices: Mapping[str, OperatorChoice]) -> KernelChoice:
    """One line that names every operator, by whom it is computed, and why torch computes it where it does."""
    groups: dict[tuple[str, str], list[str]] = {}
    for operator, choice in choices.items():
        groups.setdefault((choice.name, choice.why), []).append(operator)
    lines: dict[str, list[str]] = {}
    for (name, why), operators in groups.items():
        lines.setdefault(name, []).append(", ".join(operators) + (f" ({why})" if why else ""))
    torchs = ", ".join(lines.pop(TORCH, []))
    if not lines:
        why = torchs if len(groups) > 1 else f"no compiled operators here: {next(iter(groups))[1]}"
        return KernelChoice("reference", why)
    if torchs:
        lines[TORCH] = [torchs]  # torch's come last
    why = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in lines.items())
    chosen = Operators({operator: choice.name for operator, choice in choices.items()})
    return KernelChoice("mixed", why, chosen)


def used_operators(device_type: str) -> dict[str, str]:
    """Operator -> the form that model.kernels = "auto" uses before any self-test."""
    compiled = choose_kernels("auto", device_type).name == "fused"
    return {
        operator: slot.compiled if compiled and hasattr(torch.ops.megalite, slot.registered) else slot.plain
        for operator, slot in SLOTS.items()
        if slot.registered
    }


def known_kernels(
    config: RunConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> KernelChoice:
    """Return the operators of model.kernels on this device, by earlier self-tests. Raises ConfigError."""
    choices = None
    if needs_choices(config, device):
        cases, findings = _run_cases(workload_of(config, shape, dtype)), trust.read(trust.machine(device))
        choices = choices_of(cases, findings)
    return choose_kernels(config.model.kernels, device.type, choices)


def agreed_kernels(
    config: RunConfig, shape: ModelShape, dtype: torch.dtype, mesh: ParallelMesh, *, leads_node: bool
) -> tuple[KernelChoice, str]:
    """Return the operators of model.kernels, the same on all ranks, and a line about the self-test; collective.

    The ranks that lead a node test what was not tested on its cards, while the others wait. An operator that one
    machine does not trust is used on none. Raises ConfigError, on every rank, as `choose_kernels` does.
    """
    choices, note = None, ""
    if needs_choices(config, mesh.device):
        if leads_node:
            # The other ranks wait in a collective.
            seconds = min(FIRST_RUN_SECONDS, config.launch.collective_seconds / 2)
            choices, note = proved_choices(workload_of(config, shape, dtype), mesh.device, seconds)
        choices = _agreed(choices, mesh)
    return choose_kernels(config.model.kernels, mesh.device.type, choices), note


def _agreed(
    choices: dict[str, OperatorChoice] | None, mesh: ParallelMesh
) -> dict[str, OperatorChoice] | None:
    """Return the choices of all ranks, combined; collective."""
    gathered = mesh.gather_objects((trust.machine(mesh.device), choices))
    together: dict[str, OperatorChoice] | None = mesh.broadcast_object(
        combined(gathered) if gathered is not None else None
    )
    return together


# Attention is left to torch: the self-test compares it without a key-value cache.
_GENERATES = ("norm", "add_norm", "rotary", "glu", "bias_gelu", "expert_rows")


def kernels_without_training(shape: ModelShape, dtype: torch.dtype, mesh: ParallelMesh) -> KernelChoice:
    """Return the operators for generation and evaluation, the same on all ranks; collective.

    On an accelerator they follow from the results that `megalite selftest` or a training run has stored for this card
    and a model of these sizes, whatever the number of tokens; nothing is tested now.
    """
    if not trust.needs_proof(mesh.device.type):
        return choose_kernels("auto", mesh.device.type)
    findings = trust.read(trust.machine(mesh.device))
    cases = _run_cases(workload_of_model(shape, dtype, mesh.tp.size))
    choices = choices_of(
        [case for case in cases if case.entry.operator in _GENERATES], findings, any_tokens=True
    )
    return choose_kernels("auto", mesh.device.type, _agreed(choices, mesh))


def needs_choices(config: RunConfig, device: torch.device) -> bool:
    """Return whether a run's operators on this device depend on self-tests."""
    return config.model.kernels != "reference" and trust.needs_proof(device.type)


def untested(cases: Sequence[Case], findings: Findings) -> list[Case]:
    """Return the cases with an implementation that was not tested."""
    return [
        case
        for case in cases
        if case.entry.candidates.keys() - findings.get(case.entry.operator, {}).get(case.key, {}).keys()
    ]


def choices_of(
    cases: Sequence[Case], findings: Findings, *, any_tokens: bool = False
) -> dict[str, OperatorChoice]:
    """Return the chosen implementation of each operator that has cases.

    any_tokens: a case stands for all that were tested with another number of tokens.
    """
    choices = {}
    for operator in SLOTS:
        if own := [case for case in cases if case.entry.operator == operator]:
            names = [*dict.fromkeys(name for case in own for name in case.entry.candidates)]
            tested = findings.get(operator, {})
            keys = [
                key for case in own for key in (any_tokens and [*filter(case.covers, tested)]) or [case.key]
            ]
            choices[operator] = trust.choose(keys, names, tested)
    return choices


def _run_cases(workload: Workload) -> list[Case]:
    from megalite.selftest.table import ENTRIES  # only a run on an accelerator pays for the import

    return cases_of(ENTRIES, workload)


def proved_choices(
    workload: Workload, device: torch.device, seconds: float | None = None
) -> tuple[dict[str, OperatorChoice], str]:
    """Return the choices after testing the untested cases, and a line about that test (empty if there was none).

    Takes at most `seconds` (FIRST_RUN_SECONDS); torch computes operators whose test failed or was not reached.
    """
    from megalite.selftest.run import prove_all

    seconds = FIRST_RUN_SECONDS if seconds is None else seconds
    facts, cases = trust.machine(device), _run_cases(workload)
    findings = trust.read(facts)
    if not (left := untested(cases, findings)):
        return choices_of(cases, findings), ""
    ran: list[Case] = []
    try:
        new = prove_all(
            left,
            device,
            total_seconds=seconds,
            tell=lambda case, _, finding: ran.append(case) if finding.verdict != "absent" else None,
        )
    except KernelError as error:
        return choices_of(cases, findings), f"{error}; torch computes what is not tested"
    findings = trust.joined(findings, new)
    if not ran and not untested(cases, findings):
        return choices_of(cases, findings), ""  # every candidate is absent: no finding worth keeping
    note = f"tested {len(set(map(id, ran)))} cases of operators on {facts['card']}"
    if rest := untested(cases, findings):
        note += f"; {len(rest)} were not reached in {seconds:.0f} s: run megalite selftest"
    return choices_of(cases, findings), note + _kept(facts, findings)


def _kept(facts: Mapping[str, str], findings: Findings) -> str:
    try:
        return f"; kept in {trust.write(facts, findings)}"
    except OSError as error:
        return f"; not kept ({error.strerror}): set MEGALITE_TRUST_FOLDER to a folder that can be written"


def combined(
    said: Sequence[tuple[Mapping[str, str], Mapping[str, OperatorChoice] | None]],
) -> dict[str, OperatorChoice]:
    """Combine the ranks' choices into one choice for each operator.

    said: for each rank its machine facts and, from one rank per node, the choices for that machine, else None. On a
    machine without choices every operator counts as untested. Empty if there was nothing to choose, as in float64.
    """
    first = next((choices for _, choices in said if choices), {})
    untrusted = OperatorChoice(why=UNTESTED, faults={COMPILED: UNTESTED})
    together: dict[str, list[OperatorChoice]] = {operator: [] for operator in first}
    for facts in {tuple(facts.items()): facts for facts, _ in said}.values():
        tested = [choices for other, choices in said if other == facts and choices]
        for operator, choices in together.items():
            choices += [of_rank[operator] for of_rank in tested] or [untrusted]
    return {operator: trust.agreed(choices) for operator, choices in together.items()}
