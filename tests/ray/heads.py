"""A Ray head as ``ray start`` makes one, with a job server and token authentication, for tests that submit jobs."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.ray.commands import ROOT, Command

JOB = ROOT / "examples" / "job"
TOKEN = "0123456789abcdef" * 4
#: Until the head says where its job server is (seconds): about five, more on a busy machine.
START_S = 90.0


class Head(NamedTuple):
    address: str
    """Where jobs are submitted."""
    environment: dict[str, str]
    """What a program needs to be let in."""

    def run(self, *command: str, timeout: float = 200, **variables: str | None) -> subprocess.CompletedProcess[str]:
        """A Python program in the job's folder; ``variables`` on top of the environment, None takes one away."""
        merged: dict[str, str | None] = {**self.environment, **variables}
        environment = {name: value for name, value in merged.items() if value is not None}
        return subprocess.run(
            [sys.executable, *command], cwd=JOB, env=environment, capture_output=True, text=True, timeout=timeout
        )


@contextmanager
def head() -> Iterator[Head]:
    """The kernel chooses all its ports, so it stands beside any other Ray. It ends with the block."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST"))}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"  # a job says "python"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**kept, **token, "PYTHONPATH": str(ROOT), "PATH": programs}
    folder = tempfile.mkdtemp(prefix="rtr-")  # Ray's sockets lie in it, so its path has to be short
    started = Command("head")
    command = ["ray", "start", "--head", "--block", "--num-cpus=4", "--object-store-memory=100000000"]
    ports = [f"--{port}=0" for port in ("port", "dashboard-port", "dashboard-agent-listen-port")]
    try:
        started.process = subprocess.Popen(
            [*command, *ports, "--include-dashboard=true", f"--temp-dir={folder}"],
            env={**environment, "COMMAND_TEST_MARK": started.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        yield Head(_address(started.process), environment)
    finally:
        started.end()
        shutil.rmtree(folder, ignore_errors=True)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    until, said = time.monotonic() + START_S, ""
    while select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
        line = os.read(process.stdout.fileno(), 1 << 16).decode()
        if not line:
            break
        said += line
        if found := re.search(r"RAY_API_SERVER_ADDRESS='(http://[^']+)'", said):
            return found[1]
    raise AssertionError(f"the head did not start:\n{said}")
