"""Cost of protecting a TCP connection: bare frames, authenticated ones (the default), and TLS.

Two processes on loopback with one lane each; all modes run alternately. Bare frames are for comparison only: no setting
turns protection off on TCP.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks._harness import Pick, compare, median_of
from raytorchrpc.bench.cases import Figure, Size
from raytorchrpc.lanes.base import Message, MessageLane, PeerAddress, Reply
from raytorchrpc.lanes.common import protection as protection_of_lanes
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.common.protection import make_identity
from raytorchrpc.lanes.nng.lane import NngLane
from raytorchrpc.lanes.socket.lane import SocketLane
from raytorchrpc.tensors.codec import Encoded

SECRET = bytes(32)
#: Payload in bytes, calls of a turn, and the lane that carries it between hosts without torchrpc.
SIZES = ((0, 100, SocketLane), (20_000, 50, SocketLane), (10_000_000, 5, NngLane))
MODES = ("bare", "unix", "authenticated", "tls")
_TAGGED = protection_of_lanes.Tagged


def _lane(kind: type[Any], mode: str, rank: int, tls: bytes, serve: Any) -> tuple[Any, Any]:
    protection_of_lanes.Tagged = (lambda keys: None) if mode == "bare" else _TAGGED  # type: ignore[assignment,misc]
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


def protection(pick: Pick) -> list[Figure]:
    tls = make_identity("benchmark")
    here, there = multiprocessing.Pipe()
    callee = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, tls))
    callee.start()
    figures = []
    try:
        for size, count, kind in pick(SIZES, SIZES, SIZES[1:2]):
            message = Message((), Encoded(b"", (torch.ones(size // 4),) if size else (), (), 0))
            lanes = {}
            for mode in MODES:
                here.send((kind, mode))
                address = here.recv()
                lanes[mode], _ = _lane(kind, mode, 0, tls, lambda message, reply: None)
                lanes[mode].connect([PeerAddress("b", address)])
                # A small first call would travel in the handshake, which is never bare.
                _call(lanes[mode], Message((), Encoded(b"", (torch.ones(5_000),), (), 0)))
                here.send("connected")

            def turn(
                mode: str,
                _: Size,
                lanes: Any = lanes,
                message: Message = message,
                count: int = pick(count, count // 5, 3),
            ) -> float:
                return median_of(lambda: _call(lanes[mode], message), count)

            figures += compare(f"a call by the {kind.name} lane", turn, MODES, [size], pick(10, 3, 1))
            for lane in lanes.values():
                lane.close()
    finally:
        protection_of_lanes.Tagged = _TAGGED  # type: ignore[misc]
        here.send(None)
        callee.join(20)
        callee.kill()
    return figures
