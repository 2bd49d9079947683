"""`python -m megalite` is the command `megalite`."""

import sys

from megalite.cli import main

if __name__ == "__main__":
    sys.exit(main())
