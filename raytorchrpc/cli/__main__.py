"""``python -m raytorchrpc.cli``: the command where the script is not on the path."""

from raytorchrpc.cli import main

main()
