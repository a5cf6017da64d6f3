"""A command of ``raytorchrpc`` as a user meets it: an exit code, an output, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

from tests.programs import Program

ROOT = Path(__file__).parents[2]


class Command:
    """Starts a command with a mark in its environment, which every process of its Ray inherits."""

    def __init__(self, name: str) -> None:
        self.name, self.mark = name, f"{name}-test-{uuid.uuid4().hex}"
        self.warm = False
        """Whether a Ray that it starts is to be one of ``local_ray``."""
        self.process: Program | subprocess.Popen[str] | None = None

    def start(self, *options: str, folder: Path = ROOT) -> Program:
        before = ["-m", "tests.ray.local_ray"] if self.warm else []
        env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "COMMAND_TEST_MARK": self.mark}
        return self.begin(*before, "-m", "raytorchrpc.cli", self.name, *options, folder=folder, env=env)

    def begin(self, *command: str, folder: Path, env: dict[str, str]) -> Program:
        """As Python takes it. The kernel shows a fork with the environment of its template, so its id counts too."""
        self.process = program = Program(*command, cwd=folder, env=env)
        return program

    def run(self, *options: str, folder: Path = ROOT, timeout: float = 250) -> tuple[int, str, str]:
        process = self.start(*options, folder=folder)
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out, err

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal does it."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> list[int]:
        """Everything alive that this command started, itself included."""
        found = [] if self.process is None or self.process.poll() is not None else [self.process.pid]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = self.mark.encode() in (entry / "environ").read_bytes()
                except OSError:
                    continue  # gone, or another user's
                if marked and int(entry.name) not in found:
                    found.append(int(entry.name))
        return found

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def end(self) -> None:
        """Whatever is left of it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.communicate(timeout=10)
