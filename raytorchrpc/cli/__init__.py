"""The ``raytorchrpc`` command; its dependencies are the extra ``cli``."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``raytorchrpc`` script."""
    try:
        import rich  # noqa: F401  (commands import it later; report its absence now)

        from raytorchrpc.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"click", "rich", "typer", "yaml"}:
            raise
        sys.exit(f"raytorchrpc: the command line needs {error.name}: pip install '.[cli]' in a checkout")
    app()
