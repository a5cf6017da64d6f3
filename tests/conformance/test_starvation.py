"""A process whose memory is used up to the last byte, again and again: whoever calls it is served afterwards."""

from __future__ import annotations

import multiprocessing
import resource
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.process.workers import Deadlines, Workers
from tests.conformance.peers import EMPTY, Message, Node, PeerAddress, answer

ROUNDS = 6
#: For a call in a moment of need, and for that moment (seconds).
SHORT_S, NEED_S = 1.0, 0.5
PATIENCE_S = 30.0


def serve(kind: str, pipe: Connection) -> None:
    """Answer, and starve when told so."""
    node = Node(kind, "b", 1)
    workers = Workers("starved", keep=True, deadlines=Deadlines("starved"))
    node.lane._spawn = workers.submit  # type: ignore[attr-defined]
    pipe.send(node.address)
    while pipe.recv():
        starve()
        pipe.send("fed")


def starve() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), limits[1]))
    hoard: list[object] = []
    size, until = 1 << 16, time.monotonic() + NEED_S
    try:
        while size >= 16:
            try:
                while True:
                    hoard.append(bytes(size))
            except MemoryError:
                size //= 2
    except MemoryError:
        pass
    while time.monotonic() < until:  # what others give back meanwhile as well
        try:
            hoard = [hoard, bytes(24)]
        except MemoryError:
            continue
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["socket over unix", "socket over tcp", "nng"])
def test_who_has_starved_is_there_again(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=serve, args=(kind, its), daemon=True)
    process.start()
    node = Node(kind, "a", 0)
    try:
        assert mine.poll(PATIENCE_S)
        node.lane.connect([PeerAddress("b", mine.recv())])

        def ask(what: str, size: int, timeout_s: float) -> str:
            message = Message((what,), EMPTY._replace(payload=bytes(size)))
            return answer(node.lane.call("b", message, timeout_s), timeout_s).header[0]

        def ask_many() -> None:
            for number in range(12):
                try:
                    ask(("echo", "work")[number % 2], (0, 1000, 300_000)[number % 3], SHORT_S)
                except (RayTorchRpcError, AssertionError, MemoryError):
                    continue  # as may be in need

        ask("echo", 0, PATIENCE_S)
        for _ in range(ROUNDS):
            mine.send(True)
            callers = [threading.Thread(target=ask_many) for _ in range(3)]
            for caller in callers:
                caller.start()
            assert mine.poll(PATIENCE_S), capfd.readouterr().err
            mine.recv()
            for caller in callers:
                caller.join()
            for what in ("echo", "work"):
                assert ask(what, 500_000, PATIENCE_S / 2) == what
    finally:
        node.lane.close()
        process.kill()
        process.join()
