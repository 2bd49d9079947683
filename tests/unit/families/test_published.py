"""Published models: each config.json gives the published number of parameters, or a refusal that says why."""

import json
from pathlib import Path

import pytest

from megalite.config.sources.huggingface import shape_of_folder
from megalite.errors import ConfigError
from megalite.topology.parameters import parameter_count
from tests.support.published_configs import PUBLISHED


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_configuration_gives_its_model_or_a_reason(model: str, tmp_path: Path) -> None:
    config, expected = PUBLISHED[model]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if isinstance(expected, int):
        assert parameter_count(shape_of_folder(str(tmp_path))) == expected
    else:
        with pytest.raises(ConfigError) as refused:
            shape_of_folder(str(tmp_path))
        assert len(refused.value.problems) == 1 and expected in str(refused.value)


def test_the_corpus_is_large_and_of_every_kind() -> None:
    outcomes = [expected for _, expected in PUBLISHED.values()]
    assert len(outcomes) >= 60 and sum(isinstance(each, str) for each in outcomes) >= 8
