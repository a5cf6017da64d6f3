"""The help of every command at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from raytorchrpc.cli.app import app


def commands() -> Iterator[tuple[str, ...]]:
    def below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, each in getattr(command, "commands", {}).items():
            yield from below(each, (*path, name))

    return below(get_command(app), ())


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: " ".join(words) or "raytorchrpc")
def test_help_shows_no_types_of_python_and_fits_80_columns(words: tuple[str, ...]) -> None:
    ran = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1"}).invoke(app, [*words, "--help"])
    assert ran.exit_code == 0 and "--help" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80
    for name in ("bool", "str", "int", "float", "list", "path"):
        assert f"<{name}" not in ran.stdout.lower()
