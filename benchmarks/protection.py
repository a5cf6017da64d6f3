"""Cost of protecting a TCP connection: bare frames, authenticated ones (the default), and TLS.

Two processes on loopback with one lane each; all modes run alternately. Bare frames are for comparison only: no setting
turns protection off on TCP.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks._harness import Line, Pick, interleaved, show
from raytorchrpc.lanes.base import Message, MessageLane, PeerAddress, Reply
from raytorchrpc.lanes.common import protection
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.common.protection import make_identity
from raytorchrpc.lanes.nng.lane import NngLane
from raytorchrpc.lanes.socket.lane import SocketLane
from raytorchrpc.tensors.codec import Encoded

SECRET = bytes(32)
#: Payload in bytes, repeats, and the lane that carries it between hosts without torchrpc.
SIZES = ((0, 1000, SocketLane), (20_000, 500, SocketLane), (10_000_000, 20, NngLane))
MODES = ("unix", "bare", "authenticated", "tls")
_TAGGED = protection.Tagged


def _lane(kind: type[Any], mode: str, rank: int, tls: bytes, serve: Any) -> tuple[Any, Any]:
    protection.Tagged = (lambda keys: None) if mode == "bare" else _TAGGED  # type: ignore[assignment,misc]
    credentials = Credentials(SECRET, rank, tls=tls if mode == "tls" else None)
    by_tcp = frozenset() if mode == "unix" else frozenset({"a", "b"})
    lane: MessageLane = kind("ab"[rank], credentials, tcp_host="127.0.0.1" if by_tcp else None, by_tcp=by_tcp)
    return lane, lane.open(serve, lambda work: work())


def _serve(pipe: Connection, tls: bytes) -> None:
    """The callee: opens a lane for each (kind, mode) it receives, and sends empty replies."""

    def answer(message: Message, reply: Reply) -> None:
        reply(Message((), Encoded(b"", (), (), 0)))

    lanes = []
    while (asked := pipe.recv()) is not None:
        lane, address = _lane(*asked, 1, tls, answer)
        lanes.append(lane)
        pipe.send(address)
        pipe.recv()  # the caller has connected
    for lane in lanes:
        lane.close()


def _call(lane: MessageLane, message: Message) -> None:
    pending = lane.call("b", message, 60, caller_waits=True)
    pending.wait(60)
    pending.take()


def main(pick: Pick) -> None:
    tls = make_identity("benchmark")
    mine, its = multiprocessing.Pipe()
    callee = multiprocessing.get_context("spawn").Process(target=_serve, args=(its, tls))
    callee.start()
    lines = []
    try:
        for size, repeats, kind in pick(SIZES, SIZES, SIZES[1:2]):
            message = Message((), Encoded(b"", (torch.ones(size // 4),) if size else (), (), 0))
            runs: dict[str, Callable[[], object]] = {}
            lanes = []
            for mode in MODES:
                mine.send((kind, mode))
                address = mine.recv()
                lane, _ = _lane(kind, mode, 0, tls, lambda message, reply: None)
                lane.connect([PeerAddress("b", address)])
                lanes.append(lane)
                runs[mode] = partial(_call, lane, message)
                runs[mode]()
                mine.send("connected")
            took = interleaved(runs, pick(repeats, repeats // 10, 3))
            for lane in lanes:
                lane.close()
            for mode in ("unix", "authenticated", "tls"):
                what = f"{mode}, {size / 1e3:g} kB, {kind.name}"
                lines.append(Line(what, took[mode], took["bare"], "ms", "bare TCP"))
    finally:
        protection.Tagged = _TAGGED  # type: ignore[misc]
        mine.send(None)
        callee.join(20)
        callee.kill()
    show("One call with a CPU tensor by protection of the connection (loopback, medians)", lines)
