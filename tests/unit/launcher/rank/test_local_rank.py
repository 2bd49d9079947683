"""The flag --local_rank of launchers: dropped, and never against the launcher's variables."""

import pytest

from megalite.errors import LaunchError
from megalite.launcher.rank.local_rank import without_local_rank

ONE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
ONE |= {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "flag", [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]]
)
@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_the_flag_is_dropped_wherever_it_stands(flag, place):
    words = ["train", "run.toml", "--training.steps", "1"]
    assert without_local_rank([*words[:place], *flag, *words[place:]], ONE) == words


def test_one_process_alone_may_be_local_rank_0():
    assert without_local_rank(["train", "--local_rank=0"], {}) == ["train"]


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--local_rank=2"], ONE, "^--local_rank is 2, but the variables of the environment say 1; leave"),
        (["--local_rank=1", "--local-rank", "0"], ONE, "^--local_rank is 0, but"),
        (["--local_rank", "1"], {}, "^--local_rank is 1, but LOCAL_RANK is not set"),
        (["--local_rank"], ONE, "^--local_rank '' is not a whole number"),
        (["--local-rank=one"], ONE, "^--local_rank 'one' is not a whole number"),
    ],
)
def test_a_flag_against_the_variables_is_an_error(flags, environ, message):
    with pytest.raises(LaunchError, match=message):
        without_local_rank(["train", *flags], environ)
