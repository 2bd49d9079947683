"""A program for launchers to start: writes what it was started with to a file of the folder it is given. No torch."""

import json
import os
import re
import socket
import sys
from pathlib import Path

# The variables of launchers; others are the machine's own.
OF_LAUNCHERS = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|CROSS|MASTER|TORCH|OMPI|ORTE|OPAL|PMI|PMIX|MPI|MPIR|HYDRA|HYDI|I_MPI|SLURM"
    r"|SBATCH|SRUN|NCCL|GLOO|OMP|CUDA|ROCR|GPU)[A-Z0-9]*(_\w+)?|\w+_RANK|\w+_SIZE"
)
# A random key of the job.
KEYS = ("OMPI_MCA_orte_precondition_transports",)


def main() -> None:
    folder = Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--")))
    names = [name for name in sorted(os.environ) if OF_LAUNCHERS.fullmatch(name) and name not in KEYS]
    seen = {
        "host": socket.gethostname(),
        "arguments": [argument for argument in sys.argv[1:] if argument.startswith("--")],
        "variables": {name: os.environ[name] for name in names},
    }
    path = folder / f"{socket.gethostname()}-{os.getpid()}.json"
    path.with_suffix(".partial").write_text(json.dumps(seen))
    path.with_suffix(".partial").rename(path)


if __name__ == "__main__":
    main()
