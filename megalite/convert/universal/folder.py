"""Find DeepSpeed universal checkpoints, and name their files. No torch.

TAG/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt, TAG/zero/optimizer_state.pt, TAG/*_model_states.pt, and next to
TAG the file latest_universal with its name.
"""

from pathlib import Path

from megalite.convert.foreign.places import named_by
from megalite.errors import CheckpointError
from megalite.topology.optimizers import OPTIMIZERS

LATEST_UNIVERSAL = "latest_universal"
ZERO = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
STEP = "step.pt"
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Files that DeepSpeed's engine reads first: under ZeRO 0 to 2, and under ZeRO 3."""
WEIGHTS = "fp32"
MOMENTS = OPTIMIZERS["adamw"].keys
STATE_FILES = (WEIGHTS, *MOMENTS)
"""Names of a parameter's files, without .pt."""


def find_universal(folder: Path) -> Path | None:
    """Return the TAG folder: `folder` itself, or the one its latest_universal names; None for another kind of folder.

    Raises CheckpointError for a pointer to a TAG folder that is not whole.
    """
    if (folder / ZERO).is_dir():
        return folder
    tag = named_by(folder / LATEST_UNIVERSAL)
    if tag is not None and (folder / tag / ZERO).is_dir():
        return folder / tag
    if tag is not None:
        raise CheckpointError(
            f"{folder / LATEST_UNIVERSAL} names {tag}, which has no {ZERO} folder; write or fetch it again"
        )
    return None
