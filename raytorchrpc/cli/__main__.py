"""``python -m raytorchrpc.cli``: the command for a Python whose script directory is not on the path."""

from raytorchrpc.cli import main

main()
