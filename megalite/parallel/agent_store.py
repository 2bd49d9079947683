"""The store of torchrun's agents, through which ranks find their coordinator."""

from datetime import timedelta

from torch.distributed import DistError, TCPStore

from megalite.launcher.rank.detect import RankInfo

_SECONDS = 60.0  # the agent's store is there before it starts a rank


class TorchrunStore:
    """Texts that all ranks of a torchrun job see, also those of earlier attempts.

    Raises OSError if the agent does not answer.
    """

    def __init__(self, info: RankInfo):
        try:
            self._store = TCPStore(
                info.master_addr,
                info.master_port,
                is_master=False,
                timeout=timedelta(seconds=_SECONDS),
                wait_for_workers=False,
            )
        except (DistError, RuntimeError) as error:
            raise OSError(f"the agent's store does not answer: {_first_line(error)}") from error

    def put(self, key: str, text: str) -> None:
        """Set a text for all ranks."""
        self._store.set(key, text)

    def get(self, key: str) -> str:
        """Return a text; OSError if no rank has set it yet."""
        try:
            if self._store.check([key]):
                return self._store.get(key).decode()
        except (DistError, RuntimeError) as error:
            raise OSError(f"the agent's store does not answer: {_first_line(error)}") from error
        raise OSError("rank 0 has not told its address yet")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
