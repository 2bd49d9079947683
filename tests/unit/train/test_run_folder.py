"""A run's folder belongs to one job at a time."""

import pytest

from megalite.errors import ConfigError
from megalite.train.run_folder import RunFolder


def test_a_folder_is_occupied_until_its_job_ends(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "one")
    claim = folder.occupy()
    with pytest.raises(ConfigError, match=r"run\.folder: another job is at work"):
        folder.occupy()
    claim.close()
    folder.occupy().close()


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.folder: .*file cannot be written"):
        RunFolder(tmp_path / "file").occupy()
