"""What the command shows before it does anything: help at 80 columns, and why it cannot start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from raytorchrpc.cli import main
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


def test_the_demo_at_an_address_where_nothing_answers() -> None:
    pytest.importorskip("sklearn")
    ran = CliRunner().invoke(app, ["demo", "--address", "127.0.0.1:1"])
    assert ran.exit_code == 1
    assert ran.stderr.startswith("raytorchrpc demo: no Ray cluster answers at 127.0.0.1:1"), ran.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra_one_line_names_the_command(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("raytorchrpc.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        main()
    # Python prints it on stderr, and the exit code is 1.
    assert ended.value.code == f"raytorchrpc: the command line needs {missing}: pip install '.[cli]' in a checkout"
