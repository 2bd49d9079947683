"""Started as a program by sandbox.py: limits this process and becomes the program under test.

python -I -S limited.py SECONDS BYTES PROGRAM
"""

import os
import resource
import sys

_FILE_BYTES = 1 << 24
_FILES = 64


def limit(seconds: int, memory: int) -> None:
    """Limit CPU time, memory, the size and number of files, and core dumps; the program cannot raise them again."""
    limits = {
        resource.RLIMIT_CPU: seconds + 1,  # after the clock on the wall, whose end has a message
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    # No further processes; the kernel does not count those of root.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


if __name__ == "__main__":
    limit(int(sys.argv[1]), int(sys.argv[2]))
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", sys.argv[3]])
