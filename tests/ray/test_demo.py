"""``raytorchrpc demo`` as a user meets it: an exit code, an output, and no process left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.commands import ROOT, Command


@pytest.fixture
def demo() -> Iterator[Command]:
    demo = Command("demo")
    yield demo
    demo.end()


def without_waits(err: str) -> str:
    """What was said, but for whom a busy machine made ``init_group`` wait."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith("group 'default', after "))


def test_reaches_the_accuracy_and_shows_what_the_calls_cost(demo: Command) -> None:
    demo.warm = True
    code, out, err = demo.run("--quick")
    assert code == 0, out + err

    accuracies = [float(text) for text in re.findall(r"test accuracy ([\d.]+)%", out)]
    assert accuracies[-1] >= 95, out
    for heading in ("Routes", "Statistics", "Direct or through Ray"):
        assert heading in out
    medians = {route: float(ms) for route, ms in re.findall(r"(direct|object store)\W+([\d.]+)", out)}
    assert medians.keys() == {"direct", "object store"}, out
    assert all(value > 0 for value in medians.values())
    assert demo.gone_within(40)


def make(*arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)


def test_make_demo_ends_with_commands_to_go_on_with(tmp_path: Path) -> None:
    program = tmp_path / "bin/raytorchrpc"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho given: $*\n")
    program.chmod(0o755)
    ran = make("-o", f"{tmp_path}/.installed", "demo", f"VENV={tmp_path}", "ARGS=--workers 3")
    assert ran.returncode == 0, ran.stderr
    before, _, after = ran.stdout.partition("\nNext:\n")
    assert before == "given: demo --workers 3\n"
    following = [line.split() for line in after.splitlines()]
    assert len(following) == 3
    for name, argument, *_ in following:
        assert Path(name).parent == program.parent
        assert os.access(Path(sys.prefix, "bin", Path(name).name), os.X_OK)
        assert argument in ("doctor", "bench") or (ROOT / argument).is_file()


@pytest.mark.parametrize("succeeds", [True, False])
def test_make_shows_that_pip_works_and_whether_it_failed(succeeds: bool, tmp_path: Path) -> None:
    pip, printed = tmp_path / "bin" / "python", tmp_path / "printed"
    pip.parent.mkdir()
    until_two_dots = f"for _ in $(seq 600); do grep -q ' [.][.]' {printed} && break; sleep 0.1; done"
    pip.write_text(
        f"#!/bin/sh\ncase $* in *--version) ;; *torch==*) {until_two_dots}; {str(succeeds).lower()} ;; esac\n"
    )
    pip.chmod(0o755)
    with printed.open("w") as file:
        ran = make("env", f"VENV={tmp_path}", "DOT_S=0.1", stdout=file)
    assert (ran.returncode == 0, (tmp_path / ".installed").exists()) == (succeeds, succeeds), ran.stderr
    assert re.search(r"^\[env 2/3\] installing torch==.* \.{2,}$", printed.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["Starting", "Training"])
def test_ctrl_c_leaves_no_process_behind(demo: Command, moment: str) -> None:
    process = demo.start("--target", "1.0")
    assert process.stdout is not None
    while not process.stdout.readline().startswith(moment):
        assert process.poll() is None, process.communicate()
    time.sleep(1)  # into the middle of it
    demo.interrupt()
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert without_waits(err) == ""
    assert time.monotonic() - start < 40
    assert demo.gone_within(40)
