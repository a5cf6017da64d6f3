"""Who strikes: signals for processes, and for hosts a pulled cable, a network in two parts, a power cut.

A test that runs on the one host there is has ``Here``. One that runs on one of several hosts can neither see the
others' processes nor touch its own cable: it has ``FromOutside``, and asks whoever built the hosts (``on_hosts``).
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

#: What can be done to a host. "boot" also takes it back into Ray.
Deed = Literal["pull", "plug in", "part", "join", "power off", "boot"]
#: A host that boots starts its Ray (seconds).
PATIENCE_S = 120.0


class Hand(Protocol):
    """Each method returns when it struck (``time.monotonic``, one clock for all hosts of a machine)."""

    def signal(self, host: str, pid: int, number: int) -> float:
        """To one process of a host, by its pid there; one that has ended already is no error."""
        ...

    def do(self, deed: Deed, host: str) -> float:
        """Blocks until it is done."""
        ...


class Here:
    """For processes of this host."""

    def signal(self, host: str, pid: int, number: int) -> float:
        now = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return now

    def do(self, deed: Deed, host: str) -> float:
        raise RuntimeError(f"{deed} {host}: there is one host alone; see tests.faults.on_hosts")


class FromOutside:
    """Asks, by a socket in a directory that all hosts see."""

    def __init__(self, directory: Path) -> None:
        self._path = str(socket_in(directory))

    def signal(self, host: str, pid: int, number: int) -> float:
        return self._ask("signal", host, pid, number)

    def do(self, deed: Deed, host: str) -> float:
        return self._ask("do", deed, host)

    def _ask(self, *what: Any) -> float:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self._path)
            with sock.makefile("rw") as lines:
                lines.write(json.dumps(what) + "\n")
                lines.flush()
                answer = json.loads(lines.readline())
        if "error" in answer:
            raise RuntimeError(f"{what}: {answer['error']}")
        return float(answer["at"])


def socket_in(directory: Path) -> Path:
    """Where whoever built the hosts listens."""
    return directory / "hand"
