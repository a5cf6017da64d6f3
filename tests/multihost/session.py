"""A driver on one of the hosts, asked from outside: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.multihost.rig import Host, read_line, stop

TIMEOUT_S = 60.0


class Driver:
    """Answers the tasks of ``tests.multihost.drivers``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self, timeout_s: float = TIMEOUT_S) -> Any:
        return json.loads(read_line(self._process, timeout_s))

    def ask(self, name: str, *args: Any, timeout_s: float = TIMEOUT_S) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *args]) + "\n")
        self._process.stdin.flush()
        return self.answer(timeout_s)

    def await_news(self, *kinds: str, timeout_s: float = TIMEOUT_S) -> tuple[str, list[str], str, float]:
        """The next change of one of these kinds: (kind, members, cause, when)."""
        until = time.monotonic() + timeout_s
        while True:
            change = self.ask("news", max(0.0, until - time.monotonic()))
            assert change is not None, f"no news of {kinds} within {timeout_s:g} s"
            if change[0] in kinds:
                return change


@contextmanager
def driver(host: Host) -> Iterator[Driver]:
    """On this host, which is the head of Ray."""
    command = [sys.executable, "-m", "tests.multihost.drivers"]
    process = host.start(command, {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{host.address}:6379"})
    try:
        yield Driver(process)
    finally:
        try:
            process.communicate(timeout=TIMEOUT_S)  # closes its stdin: it ends the group and then itself
        except subprocess.TimeoutExpired:
            stop(process)
            process.communicate(timeout=TIMEOUT_S)
            raise
        finally:
            stop(process)
