"""What the command shows before it does anything: help at 80 columns, and why it cannot start."""

from __future__ import annotations

import re
import sys

import pytest

from raytorchrpc.cli import main
from tests.unit import command_line

COMMANDS = {
    "": ("demo", "bench", "doctor", "top", "dashboard", "manifest", "examples"),
    "manifest": ("raycluster", "rayjob"),
    "examples": ("list", "copy"),
}
WORDS = ["", *COMMANDS[""], *(f"{group} {name}" for group in ("manifest", "examples") for name in COMMANDS[group])]


@pytest.mark.parametrize("words", WORDS)
def test_help_shows_no_types_of_options_and_fits_80_columns(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "80", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    ran = command_line.run(*words.split(), "--help")
    assert ran.exit_code == 0 and "--help" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert not re.search(r"--[A-Z]", ran.stdout), "some releases of typer take a metavar like its option for a name"
    for name in ("bool", "str", "int", "float", "list", "path"):
        assert not re.search(rf"--\S+ <{name}", ran.stdout.lower())
    listed = ran.stdout.partition("Commands")[2]
    assert tuple(re.findall(r"^  (\w+)", listed, re.MULTILINE)) == COMMANDS.get(words, ())


@pytest.mark.parametrize(
    ("address", "says"),
    [("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"), ("nonsense", "no Ray cluster at nonsense: ")],
)
def test_the_demo_at_an_address_where_nothing_answers(address: str, says: str) -> None:
    pytest.importorskip("sklearn")
    ran = command_line.run("demo", "--address", address)
    assert ran.exit_code == 2
    assert ran.stderr.startswith(f"raytorchrpc demo: {says}") and ran.stderr.count("\n") == 1, ran.stderr


@pytest.mark.parametrize("missing", ["typer", "rich", "yaml"])
def test_without_the_cli_extra_one_line_names_the_command(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("raytorchrpc.cli.", "raytorchrpc.manifest"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("raytorchrpc.manifest")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        main()
    # Python prints it on stderr, and the exit code is 1.
    assert ended.value.code == f"raytorchrpc: the command line needs {missing}: pip install '.[cli]' in a checkout"
