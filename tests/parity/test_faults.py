"""Planted faults: the comparison that guards against a mistake fails when the mistake is made."""

from functools import cache

import pytest

from tests.support.matrix.axes import AXES
from tests.support.matrix.rows import illegal
from tests.support.matrix.train import Matrix
from tests.support.museum import exhibit
from tests.support.mutations import FAULTS
from tests.support.ranks import RankFailed, RanksHung
from tests.support.selection import cases

PLAIN = {name: next(iter(axis.values)) for name, axis in AXES.items()}


@pytest.fixture(scope="module")
def matrix(ranks):
    return Matrix(ranks)


@pytest.fixture(scope="module")
def require_equal_without_fault(matrix):
    """Several faults are shown by the same run, which is made once."""

    @cache
    def require(shown_by: tuple[tuple[str, str], ...]) -> None:
        matrix.run({**PLAIN, **dict(shown_by)}).require()

    return require


def test_there_are_many_and_each_is_shown_by_a_legal_run():
    assert len(FAULTS) >= 15
    reasons = {name: illegal({**PLAIN, **fault.shown_by}) for name, fault in FAULTS.items()}
    assert {name: reason for name, reason in reasons.items() if reason} == {}


@exhibit(
    "torchtitan#514",
    subject="layouts",
    there="the same initial weights in every layout were held to be practically impossible",
    here="a weight is drawn from its name and place in the whole tensor: layouts begin alike",
    fault="weights initialised alike on two shards",
    case="weights initialised alike on two shards",
)
@exhibit(
    "Megatron-LM#6858",
    subject="layouts",
    there="ranks that resumed took over the random state of another rank",
    here="there is no random state: a mask follows from the number of the sample, not from the rank",
    fault="dropout keyed by the rank's own samples",
    case="dropout keyed by the rank's own samples",
)
@exhibit(
    "OLMo-core#828",
    also=("DeepSpeed#6811",),
    subject="layouts",
    there="recomputed layers drew new dropout masks, so that gradients belonged to another forward",
    here="a mask follows from seed, site, step and place: recomputed layers have that of the forward",
    fault="fresh dropout in recompute",
    case="fresh dropout in recompute",
)
@exhibit(
    "Automodel#3530",
    subject="gradients",
    there="with pipeline stages only the gradients of the last micro batch were kept",
    here="every micro batch counts",
    fault="only the last micro batch kept",
    case="only the last micro batch kept",
)
@exhibit(
    "transformers PR#34191",
    also=("transformers#35203", "transformers#37766", "transformers PR#40610"),
    subject="gradients",
    there="accumulated gradients were means of means: micro batches with few tokens counted too much",
    here="the loss is a sum over all tokens of the global batch, divided once, however it is split",
    fault="loss normalised by the rank's own tokens",
    case="loss normalised by the rank's own tokens",
)
@exhibit(
    "Megatron-LM#656",
    also=("Megatron-LM#4641", "Megatron-Bridge#954"),
    subject="gradients",
    there="the copies of a tied embedding on the first and the last stage went apart",
    here="their gradients are summed, and the copies stay equal",
    fault="tied copies that drift",
    case="tied copies that drift",
)
@exhibit(
    "DeepSpeed PR#6550",
    also=("DeepSpeed#1488",),
    subject="gradients",
    there="with offloading, ZeRO lost the gradients of all micro batches but one",
    here="the gradients of all micro batches count in every stage",
    fault="a ZeRO stage that drops micro steps",
    case="a ZeRO stage that drops micro steps",
)
@exhibit(
    "DeepSpeed#7837",
    also=("DeepSpeed#7718",),
    subject="gradients",
    there="the norm of the gradients was another one in another stage of ZeRO",
    here="the norm is that of one process in every stage",
    fault="DeepSpeed's norm counts replicas",
    case="DeepSpeed's norm counts replicas",
)
@exhibit(
    "TransformerEngine#715",
    subject="gradients",
    there="weights that every tensor-parallel rank has whole counted once a rank in the norm",
    here="they count once",
    fault="replicated norms counted once a tensor rank",
    case="replicated norms counted once a tensor rank",
)
@exhibit(
    "Megatron-LM#7227",
    subject="gradients",
    there="the norm counted a tied head twice, on the first and on the last stage",
    here="each element counts once in the norm, and the norm is that of one process",
    fault="tied head counted twice in the norm",
    case="tied head counted twice in the norm",
)
@exhibit(
    "Megatron-LM#7452",
    subject="gradients",
    there="label smoothing took the mean over a rank's part of the vocabulary; nothing failed",
    here="label smoothing is over the whole vocabulary in every layout",
    fault="label smoothing over the shard's vocabulary",
    case="label smoothing over the shard's vocabulary",
)
# Every second one in the core: each kind of mistake (gradients, norms, dropout, loss, ZeRO) stands several times.
@pytest.mark.parametrize("name", cases(FAULTS, core=list(FAULTS)[::2]))
def test_a_planted_fault_departs_from_one_process(matrix, require_equal_without_fault, name):
    row = {**PLAIN, **FAULTS[name].shown_by}
    require_equal_without_fault(tuple(sorted(FAULTS[name].shown_by.items())))
    with pytest.raises(AssertionError) as departed:
        matrix.run(row, fault=name).require()
    # A crash or a deadlock would be noticed by anybody: what is guarded against is a run that goes on.
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value
