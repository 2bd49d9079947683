"""Parameters that are updated in another way than the rest, chosen by patterns over canonical names."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megalite.topology.parameters import Parameter


@dataclass(frozen=True)
class ParameterGroup:
    """pattern: a glob over canonical names, "*.mlp.*"; a parameter belongs to the first group that it matches.

    learning_rate_ratio: times the schedule's rate. weight_decay: None leaves a parameter its own.
    """

    pattern: str
    learning_rate_ratio: float = 1.0
    weight_decay: float | None = None

    def matches(self, parameter: Parameter) -> bool:
        """Whether all parts of a parameter match: `group_problems` refuses what matches only some."""
        return all(fnmatchcase(part.name, self.pattern) for part in parameter.spec.parts)


def group_of(parameter: Parameter, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """The group that a parameter belongs to; None: the rest."""
    return next((group for group in groups if group.matches(parameter)), None)


def update_rules(parameters: Iterable[Parameter], groups: Sequence[ParameterGroup]) -> set[tuple[int, bool]]:
    """The rules by which the parameters are updated: the place of the group, -1 for none, and whether they decay."""
    places = {group: place for place, group in enumerate(groups)}
    found = ((group_of(each, groups), each.decay) for each in parameters)
    return {(-1 if group is None else places[group], decays) for group, decays in found}


def group_problems(parameters: Sequence[Parameter], groups: Sequence[ParameterGroup]) -> Iterator[str]:
    """What is wrong with the groups of a model: patterns without effect, and those that cut a fused parameter."""
    for index, group in enumerate(groups):
        pattern = f'"{group.pattern}"'
        torn = next((each for each in parameters if _is_torn(each, group)), None)
        if torn is not None:
            parts = [part.name for part in torn.spec.parts]
            inside = [name for name in parts if fnmatchcase(name, group.pattern)]
            outside = [name for name in parts if name not in inside]
            yield (
                f"{pattern} matches {', '.join(inside)} and not {', '.join(outside)},"
                f" which are one parameter ({torn.name})"
            )
        elif not (matched := [each for each in parameters if group.matches(each)]):
            yield f"{pattern} matches no parameter"
        elif all(group_of(each, groups[:index]) is not None for each in matched):
            yield f"{pattern} matches only parameters that belong to an earlier group"


def _is_torn(parameter: Parameter, group: ParameterGroup) -> bool:
    matching = [fnmatchcase(part.name, group.pattern) for part in parameter.spec.parts]
    return any(matching) and not all(matching)
