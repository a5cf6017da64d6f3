"""Random faults over a group on several hosts: builds them, runs the suite on the first, and strikes from outside."""

from __future__ import annotations

import json
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.faults.hands import Deed, Here, socket_in
from tests.multihost.conftest import cluster, start_ray
from tests.multihost.rig import Host, read_line, stop

#: Health checks in a row, one every half second, by which Ray gives up a silent host: a short cut does not do it.
FAILURES = 12
#: With so many it outlasts any partition.
PATIENT = 100
_ANSWER_S = 20.0


class Outside:
    """Reaches into every host."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._head, self._hosts = hosts[0], {host.name: host for host in hosts}
        self._lock = threading.Lock()
        self._hands = {host.name: _hand_in(host) for host in hosts}
        self._off: set[str] = set()

    def signal(self, host: str, pid: int, number: int) -> float:
        """See Hand. By a process there, so that it takes no time of its own."""
        with self._lock:
            if host in self._off:
                return time.monotonic()  # with all its processes
            hand = self._hands[host]
            assert hand.stdin is not None
            hand.stdin.write(f"{pid} {number}\n")
            hand.stdin.flush()
            return float(read_line(hand, _ANSWER_S))

    def do(self, deed: Deed, name: str) -> float:
        """See Hand."""
        host, now = self._hosts[name], time.monotonic()
        if deed == "pull":
            return host.pull_cable()
        if deed == "plug in":
            host.plug_in()
        elif deed == "part":
            host.network.partition([other for other in self._hosts.values() if other is not host], [host])
        elif deed == "join":
            host.network.heal(host)
        elif deed == "power off":
            with self._lock:
                self._off.add(name)
                return host.power_off()
        elif deed == "boot":
            host.switch_on()
            start_ray(host, head=self._head, failures=FAILURES, cpus=1)
            with self._lock:
                stop(self._hands[name])
                self._hands[name].communicate(timeout=_ANSWER_S)
                self._hands[name] = _hand_in(host)
                self._off.remove(name)
        return now

    def close(self) -> None:
        """The hosts end by themselves."""
        for hand in self._hands.values():
            stop(hand)
            hand.communicate(timeout=_ANSWER_S)


def _hand_in(host: Host) -> subprocess.Popen[str]:
    return host.start([sys.executable, "-m", "tests.faults.on_hosts"])


def strike_here() -> None:
    """In a host: each line of stdin is a pid and a signal; answers with when."""
    hand = Here()
    for line in sys.stdin:
        pid, number = line.split()
        print(hand.signal("", int(pid), int(number)), flush=True)


@contextmanager
def listening(outside: Outside, directory: Path) -> Iterator[None]:
    """Answer whoever asks by the socket in this directory."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            what, *args = json.loads(self.rfile.readline())
            answer: dict[str, Any]
            try:
                answer = {"at": {"signal": outside.signal, "do": outside.do}[what](*args)}
            except Exception as error:
                answer = {"error": repr(error)}
            with suppress(OSError):  # it is asked no longer
                self.wfile.write(json.dumps(answer).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(socket_in(directory)), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def run(directory: Path, count: int, arguments: Sequence[str], failures: int = FAILURES) -> int:
    """``python -m tests.faults <arguments>`` on the first of ``count`` hosts; its output is ours. Returns its status.

    ``directory``: for what all hosts are to see. Raises Unavailable where hosts cannot be built.
    """
    with cluster(count, keep=[directory], failures=failures, cpus=1) as hosts:
        outside = Outside(hosts)
        try:
            with listening(outside, directory):
                where = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{hosts[0].address}:6379"}
                command = [sys.executable, "-m", "tests.faults", *arguments, "--within", str(directory)]
                process = hosts[0].start(command, where)
                assert process.stdin is not None and process.stdout is not None and process.stderr is not None
                process.stdin.close()
                errors = threading.Thread(target=_pass_on, args=(process.stderr, sys.stderr), daemon=True)
                errors.start()
                try:
                    _pass_on(process.stdout, sys.stdout)
                    return process.wait(_ANSWER_S)
                finally:
                    stop(process)
                    process.wait(_ANSWER_S)
                    errors.join(_ANSWER_S)
        finally:
            outside.close()


def _pass_on(lines: Any, to: Any) -> None:
    for line in lines:
        print(line, end="", file=to, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its host, or when its stdin does
    strike_here()
