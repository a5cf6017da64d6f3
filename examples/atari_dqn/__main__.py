"""Entry point of ``python -m examples.atari_dqn``, to be run from the root of the repository."""

import sys

from .train import main

if __name__ == "__main__":
    sys.exit(main())
