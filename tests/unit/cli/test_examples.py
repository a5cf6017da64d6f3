"""The examples that come with the package: every one is listed, a copy is whole, and a wheel has them all."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.unit import command_line

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples"


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_every_example_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ran = command_line.run("examples", "list")
    there = {path.stem for path in FOLDER.iterdir()} - {"README", "__pycache__"}
    lines = ran.stdout.splitlines()
    assert ran.exit_code == 0 and {line.split()[0] for line in lines if line[0] != " "} == there
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("file", "there", "command"),
    [("kv_cache.py", ".", "python kv_cache.py"), ("tutorial", "tutorial", "python train.py")],
)
def test_a_copy_is_whole_and_names_what_runs_it(file: str, there: str, command: str, tmp_path: Path) -> None:
    ran = command_line.run("examples", "copy", Path(file).stem, str(tmp_path / "my own"))
    assert ran.exit_code == 0
    assert ran.stdout.endswith(f"next:\n\n    cd '{tmp_path / 'my own' / there}'\n    {command}\n")
    source, made = FOLDER / file, tmp_path / "my own" / file
    assert (files(made) == files(source)) if source.is_dir() else (made.read_bytes() == source.read_bytes())
    assert list((tmp_path / "my own").iterdir()) == [made]


def test_a_copy_overwrites_nothing(tmp_path: Path) -> None:
    mine = tmp_path / "kv_cache.py"
    mine.write_text("mine")
    ran = command_line.run("examples", "copy", "kv_cache", str(tmp_path))
    assert (ran.exit_code, mine.read_text()) == (2, "mine")
    assert "kv_cache.py exists; name another folder" in ran.stderr


def test_an_unknown_name_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    ran = command_line.run("examples", "copy", "kv_cash")
    assert ran.exit_code == 2 and "there is no example 'kv_cash'; there are tutorial, " in ran.stderr
    (tmp_path / "file").touch()
    ran = command_line.run("examples", "copy", "kv_cache", str(tmp_path / "file"))
    assert ran.exit_code == 2 and "file is not a folder; name another one" in ran.stderr


def test_a_wheel_has_all_examples(tmp_path: Path) -> None:
    wheels = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = wheels.WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    assert files(tmp_path / "installed" / "raytorchrpc" / "_examples") == files(FOLDER)
