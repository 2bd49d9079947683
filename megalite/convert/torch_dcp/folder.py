"""Find torch.distributed.checkpoint folders. No torch.

.metadata             names, shapes, chunks, and where each chunk is
__0_0.distcp ...      the chunks, one file or more for each rank
"""

from pathlib import Path

METADATA = ".metadata"


def is_dcp_folder(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this folder."""
    return (folder / METADATA).is_file()
