"""A command of ``raytorchrpc`` as a user meets it: an exit code, an output, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Command:
    """Starts a command with a mark in its environment, which every process of its Ray inherits."""

    def __init__(self, name: str) -> None:
        self.name, self.mark = name, f"{name}-test-{uuid.uuid4().hex}"
        self.warm = False
        """Whether a Ray that it starts is to be one of ``local_ray``."""
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str, folder: Path = ROOT) -> subprocess.Popen[str]:
        before = ["-m", "tests.ray.local_ray"] if self.warm else []
        self.process = subprocess.Popen(
            [sys.executable, *before, "-m", "raytorchrpc.cli", self.name, *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "COMMAND_TEST_MARK": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.process

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
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = self.mark.encode() in (entry / "environ").read_bytes()
                except OSError:
                    continue  # gone, or another user's
                if marked:
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
