"""One connection from each member's process to the test: commands go in, moments and results come out.

It belongs to the test alone and has nothing to do with the package or Ray, so it works while those are being broken.
Made when the process starts and kept: a member without a spare descriptor still has it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytorchrpc.process import threads

#: A process that waits at a moment goes on after this, if the test does not let it (seconds).
HOLD_S = 30.0


def start(target: Callable[[], None], name: str) -> threading.Thread:
    """A thread, as soon as the process has the memory for one."""
    while True:
        try:
            return threads.start(target, name=name)  # Python's own waits for ever for one that has no memory to begin
        except (MemoryError, threads.ThreadShortage):
            time.sleep(0.02)


class Died(Exception):
    """The process ended before it answered."""


class Remote:
    """The test's end: one process of a member."""

    def __init__(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        self.name: str = hello["name"]
        self.pid: int = hello["pid"]
        """On its host."""
        self.host: str = hello["host"]
        self.born = time.monotonic()
        self.died: float | None = None
        """When it was seen to have ended."""
        self.killed: float | None = None
        """When it was killed, if the test did that."""
        self._sock, self._lock = sock, threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._count = 0

    def ask(self, command: str, **arguments: Any) -> Future[Any]:
        """Have it do something, on a thread of its own; the future fails with Died if it ends before."""
        future: Future[Any] = Future()
        with self._lock:
            if self.died is not None:
                future.set_exception(Died(self.name))
                return future
            self._count += 1
            number = self._count
            self._asked[number] = future
        self._send({"ask": number, "command": command, "arguments": arguments})
        return future

    def release(self, moment: str) -> None:
        """Let it go on."""
        self._send({"go": moment})

    def _send(self, what: dict[str, Any]) -> None:
        with suppress(OSError), self._lock:  # its reader finds out
            self._sock.sendall(json.dumps(what).encode() + b"\n")

    def read(self, lines: Any, on_moment: Callable[[str, Remote], None]) -> None:
        """Until the process ends, maybe in the middle of a line."""
        with suppress(OSError, ValueError):
            for line in lines:
                came = json.loads(line)
                if "at" in came:
                    on_moment(came["at"], self)
                elif (future := self._asked.pop(came["re"], None)) is not None:
                    if "error" in came:
                        future.set_exception(AssertionError(f"{self.name}: {came['error']}"))
                    else:
                        future.set_result(came["result"])
        with self._lock:
            self.died = time.monotonic()
            asked, self._asked = self._asked, {}
        self._sock.close()
        for future in asked.values():
            future.set_exception(Died(self.name))


class Board:
    """The test's end of them all."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._changed = threading.Condition()
        self.remotes: dict[str, Remote] = {}
        """The latest process of each member."""
        self._moments: dict[str, Remote] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._read, args=(self._socket.accept()[0],), daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        with sock.makefile("rb") as lines:
            remote = Remote(sock, json.loads(lines.readline()))
            self._put(self.remotes, remote.name, remote)
            remote.read(lines, lambda moment, remote: self._put(self._moments, moment, remote))
        with self._changed:
            self._changed.notify_all()

    def _put(self, table: dict[str, Remote], key: str, remote: Remote) -> None:
        with self._changed:
            table[key] = remote
            self._changed.notify_all()

    def await_moment(self, moment: str, seconds: float) -> Remote | None:
        """Whose process has come to it; None after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: moment in self._moments, seconds)
            return self._moments.pop(moment, None)

    def await_process(self, name: str, other_than: Remote | None, seconds: float) -> Remote | None:
        """Another living process of this member; None after so many seconds."""

        def there() -> bool:
            remote = self.remotes.get(name)
            return remote is not None and remote is not other_than and remote.died is None

        with self._changed:
            return self.remotes[name] if self._changed.wait_for(there, seconds) else None

    def await_end(self, remote: Remote, seconds: float) -> bool:
        """Whether its process has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: remote.died is not None, seconds)

    def close(self) -> None:
        """Members that are connected stay so until they end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # else a thread goes on to accept, by a number that is another's
        self._socket.close()


class Control:
    """The member's end. ``find``: the function of a command's name."""

    def __init__(self, path: str, name: str, find: Callable[[str], Callable[..., Any]]) -> None:
        self._find = find
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(path)
        self._lock = threading.Lock()
        self._held: dict[str, threading.Event] = {}
        self._send({"name": name, "pid": os.getpid(), "host": socket.gethostname()})
        threading.Thread(target=self._listen, name="test-control", daemon=True).start()

    def moment(self, key: str, hold: bool) -> None:
        """Tell that it has come; ``hold``: and wait until the test lets go."""
        event = self._held[key] = threading.Event()
        self._send({"at": key})
        if hold:
            event.wait(HOLD_S)
        self._held.pop(key, None)

    def _send(self, what: dict[str, Any]) -> None:
        with self._lock:
            self._sock.sendall(json.dumps(what).encode() + b"\n")

    def _listen(self) -> None:
        with self._sock.makefile("rb") as lines:
            for line in lines:
                came = json.loads(line)
                if "go" not in came:
                    start(lambda came=came: self._do(came), "test-command")
                elif (event := self._held.get(came["go"])) is not None:
                    event.set()

    def _do(self, asked: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"re": asked["ask"]}
        try:
            answer["result"] = self._find(asked["command"])(**asked["arguments"])
        except BaseException:
            answer["error"] = traceback.format_exc()
        self._send(answer)
