"""Groups take whole parameters by the names of their parts, the first match first."""

from megalite.topology.parameter_groups import ParameterGroup, group_of, group_problems
from megalite.topology.parameters import EMBEDDING, model_parameters
from tests.support.tiny import tiny_shape

PARAMETERS = model_parameters(tiny_shape(layers=2))


def names_of(pattern: str) -> list[str]:
    return [each.name for each in PARAMETERS if ParameterGroup(pattern).matches(each)]


def test_a_pattern_is_a_glob_over_canonical_names() -> None:
    assert names_of(EMBEDDING) == [EMBEDDING]
    assert names_of("model.layers.1.mlp.*") == [
        "model.layers.1.mlp.gate_up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]
    # By its parts: the name under which it is registered is nobody's.
    assert names_of("*.self_attn.[qkv]_proj.*") == [
        f"model.layers.{i}.self_attn.qkv_proj.weight" for i in (0, 1)
    ]
    assert names_of("*qkv_proj*") == []


def test_the_first_group_that_matches_counts() -> None:
    groups = (ParameterGroup("*.0.*norm*"), ParameterGroup("*norm*"))
    found = {each.name: group_of(each, groups) for each in PARAMETERS}
    assert found["model.layers.0.input_layernorm.weight"] is groups[0]
    assert found["model.layers.1.input_layernorm.weight"] is groups[1]
    assert found[EMBEDDING] is None


def problems(*patterns: str) -> list[str]:
    return list(group_problems(PARAMETERS, [ParameterGroup(each) for each in patterns]))


def test_what_has_no_effect_or_cuts_a_parameter_is_told() -> None:
    assert problems("*norm*", "*.mlp.*", "*.[qkvo]_proj.weight") == []
    assert problems("*norm", "*norm*", "model.norm.*") == [
        '"*norm" matches no parameter',
        '"model.norm.*" matches only parameters that belong to an earlier group',
    ]
    assert problems("*.[qv]_proj.*") == [
        '"*.[qv]_proj.*" matches model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.v_proj.weight and '
        "not model.layers.0.self_attn.k_proj.weight, which are one parameter "
        "(model.layers.0.self_attn.qkv_proj.weight)"
    ]
