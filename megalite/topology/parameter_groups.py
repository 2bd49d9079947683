"""Parameter groups: other learning rates and weight decays for parameters chosen by name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megalite.topology.parameters import Parameter


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group. A parameter belongs to the first group that it matches.

    pattern: a glob over canonical names, such as "*.mlp.*", or over the names in the family's files.
    learning_rate_ratio: the factor on the scheduled learning rate.
    weight_decay: None: the default weight decay of the parameter.
    """

    pattern: str
    learning_rate_ratio: float = 1.0
    weight_decay: float | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Canonical name -> the names of its tensor in the family's files."""

    def takes(self, name: str) -> bool:
        """Whether the pattern fits a canonical name, or one of the names that the family's files have for it."""
        return any(fnmatchcase(each, self.pattern) for each in (name, *self.names.get(name, ())))

    def matches(self, parameter: Parameter) -> bool:
        """Return whether all parts of a parameter match; `group_problems` refuses a match of only some parts."""
        return all(self.takes(part.name) for part in parameter.spec.parts)


def group_of(parameter: Parameter, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """Return the group of a parameter, or None for the default group."""
    return next((group for group in groups if group.matches(parameter)), None)


def update_rules(parameters: Iterable[Parameter], groups: Sequence[ParameterGroup]) -> set[tuple[int, bool]]:
    """Return the distinct (index of the group, -1 for none; whether weight decay applies) of the parameters."""
    indices = {group: index for index, group in enumerate(groups)}
    rules = ((group_of(each, groups), each.decay) for each in parameters)
    return {(-1 if group is None else indices[group], decays) for group, decays in rules}


def group_problems(parameters: Sequence[Parameter], groups: Sequence[ParameterGroup]) -> Iterator[str]:
    """Yield the problems of the groups: patterns that match nothing new, and patterns that split a fused parameter."""
    for index, group in enumerate(groups):
        pattern = f'"{group.pattern}"'
        torn = next((each for each in parameters if _is_torn(each, group)), None)
        if torn is not None:
            parts = [part.name for part in torn.spec.parts]
            inside = [name for name in parts if group.takes(name)]
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
    matching = [group.takes(part.name) for part in parameter.spec.parts]
    return any(matching) and not all(matching)
