"""Wrong flags of megalite serve."""

from pathlib import Path

import pytest

from megalite.cli import serve
from megalite.errors import ConfigError


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a b", "none"])
def test_an_origin_that_no_page_has_is_refused(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.run(["model", "--cors-origin", origin])
    error = capsys.readouterr().err
    assert f"{origin!r} is not the origin of a page: write * or scheme://host[:port]" in error


def test_a_context_longer_than_the_models_is_refused(shared_data: Path) -> None:
    rule = r"--context-length: 513 is longer than model\.max_position_embeddings = 512; use at most 512"
    with pytest.raises(ConfigError, match=rule):
        serve.run([str(shared_data / "stories260K"), "--context-length", "513"])
