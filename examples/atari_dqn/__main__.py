"""``python -m examples.atari_dqn``, from the root of the tree."""

import sys

from .train import main

if __name__ == "__main__":
    sys.exit(main())
