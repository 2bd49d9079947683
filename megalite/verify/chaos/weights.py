"""A callback of the run that flips a bit of a weight when a file asks for it: no other fault needs the job's help."""

import json
import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.train.callbacks import ActiveRun, Callback

CALLBACK = "megalite.verify.chaos.weights:FlipsWeightBit"
_ASKED, _DONE = "chaos-flip.json", "chaos-flipped.json"


def ask_for_flip(run_folder: Path, rank: int, seed: int) -> None:
    """Have a bit flip on a rank, behind the update of the next step."""
    (run_folder / _DONE).unlink(missing_ok=True)
    unfinished = run_folder / f"{_ASKED}.unfinished"
    unfinished.write_text(json.dumps({"rank": rank, "seed": seed}))
    unfinished.rename(run_folder / _ASKED)


def flipped(run_folder: Path) -> dict[str, Any] | None:
    """Return `rank`, `step` and `tensor` of the flip; None before it is done."""
    with suppress(OSError):
        done: dict[str, Any] = json.loads((run_folder / _DONE).read_text())
        return done
    return None


class FlipsWeightBit(Callback):
    """Flips one bit of a weight that another rank has too.

    It is the fifth of the mantissa: the lowest may vanish in the rounding of the next update, and this one shows in no
    loss.
    """

    def on_step_end(self, run: ActiveRun, report: Any) -> None:
        folder = Path(run.config.run.folder)
        with suppress(FileNotFoundError):
            asked = json.loads((folder / _ASKED).read_text())
            if asked["rank"] == run.rank:
                chance = random.Random(asked["seed"])
                name = self._flip(run, chance)
                (folder / _ASKED).unlink()
                unfinished = folder / f"{_DONE}.unfinished"
                unfinished.write_text(json.dumps({"rank": run.rank, "step": report.step, "tensor": name}))
                unfinished.rename(folder / _DONE)

    def _flip(self, run: ActiveRun, chance: random.Random) -> str:
        import torch

        from megalite.topology.parameters import canonical_tensors

        weights = {name: weight for name, weight in run.model.named_parameters() if weight.requires_grad}
        # A self-check names a part of a fused weight, such as v_proj of qkv_proj, by which nobody would know this flip.
        whole = canonical_tensors(run.config.shape(1))
        weights = {name: weight for name, weight in weights.items() if name in whole} or weights
        if run.config.layout.data == 1:  # tensor ranks have copies of vectors alone
            weights = {name: weight for name, weight in weights.items() if weight.dim() == 1} or weights
        name = chance.choice(sorted(weights))
        values = weights[name].detach().view(-1)
        place = chance.choice(values.nonzero().view(-1).tolist())
        bit = round(-math.log2(torch.finfo(values.dtype).eps)) - 5
        values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])[place] ^= (
            1 << bit
        )
        return name
