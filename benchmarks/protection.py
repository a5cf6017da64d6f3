"""What it costs to protect a connection over TCP: bare frames, authenticated ones (the default), and TLS.

Two processes on loopback, one lane each, every way in the same run. Bare frames are there for comparison: no setting of
a group turns protection off on TCP.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks._harness import Row, interleaved, show
from raytorchrpc.lanes.base import Message, MessageLane, PeerAddress, Reply
from raytorchrpc.lanes.common import protection
from raytorchrpc.lanes.common.credentials import Credentials
from raytorchrpc.lanes.common.tls import make_identity
from raytorchrpc.lanes.nng.lane import NngLane
from raytorchrpc.lanes.socket.lane import SocketLane
from raytorchrpc.tensors.codec import Encoded

SECRET = bytes(32)
#: Payload in bytes, repeats, and the lane that carries it between hosts where torchrpc is left out.
SIZES = ((0, 1000, SocketLane), (20_000, 500, SocketLane), (10_000_000, 20, NngLane))
WAYS = ("unix", "bare", "authenticated", "tls")


def _lane(kind: type[Any], way: str, rank: int, tls: bytes, serve: Callable[[Message, Reply], None]) -> tuple[Any, Any]:
    credentials = Credentials(SECRET, rank, tls=tls if way == "tls" else None)
    by_tcp = frozenset() if way == "unix" else frozenset({"a", "b"})
    lane: MessageLane = kind("ab"[rank], credentials, tcp_host="127.0.0.1" if by_tcp else None, by_tcp=by_tcp)
    return lane, lane.open(serve, lambda work: work())


def _bare(way: str) -> None:
    """Take protection off the connections that are made from now on, in this process."""
    protection.Tagged = (lambda keys: None) if way == "bare" else _TAGGED  # type: ignore[assignment,misc]


_TAGGED = protection.Tagged


def _serve(pipe: Connection, tls: bytes) -> None:
    """The callee: opens a lane for each (kind, way) that it is sent, and answers with nothing."""

    def answer(message: Message, reply: Reply) -> None:
        reply(Message((), Encoded(b"", (), (), 0)))

    lanes = []
    while (asked := pipe.recv()) is not None:
        kind, way = asked
        _bare(way)
        lane, address = _lane(kind, way, 1, tls, answer)
        lanes.append(lane)
        pipe.send(address)
        pipe.recv()  # its connection is made
    for lane in lanes:
        lane.close()


def main(quick: bool = False) -> None:
    tls = make_identity("benchmark")
    mine, its = multiprocessing.Pipe()
    callee = multiprocessing.get_context("spawn").Process(target=_serve, args=(its, tls))
    callee.start()
    rows = []
    try:
        for size, repeats, kind in SIZES:
            tensors = (torch.ones(size // 4),) if size else ()
            message = Message((), Encoded(b"", tensors, (), 0))
            runs: dict[str, Callable[[], object]] = {}
            lanes = []
            for way in WAYS:
                mine.send((kind, way))
                address = mine.recv()
                _bare(way)
                lane, _ = _lane(kind, way, 0, tls, lambda message, reply: None)
                lane.connect([PeerAddress("b", address)])
                lanes.append(lane)

                def call(lane: MessageLane = lane, message: Message = message) -> None:
                    pending = lane.call("b", message, 60, attended=True)
                    pending.wait(60)
                    pending.take()

                call()
                mine.send("connected")
                runs[way] = call
            took = interleaved(runs, repeats // 10 if quick else repeats)
            for lane in lanes:
                lane.close()
            rows += [
                Row(f"{way}, {size / 1e3:g} kB, {kind.name}", took[way] * 1e3, took["bare"] * 1e3, "ms", "bare TCP")
                for way in WAYS
                if way != "bare"
            ]
    finally:
        mine.send(None)
        callee.join(20)
        callee.kill()
    show("One call with a CPU tensor, by how its connection is protected (loopback, medians)", rows)


if __name__ == "__main__":
    main()
