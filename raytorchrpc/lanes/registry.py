"""The table of lanes: what each carries, and the rule that says when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raytorchrpc.lanes.rules import (
    Pair,
    Traffic,
    Verdict,
    cuda_ipc_rule,
    nccl_rule,
    nixl_rule,
    nng_rule,
    shm_rule,
    socket_rule,
    torchrpc_rule,
)


@dataclass(frozen=True)
class Lane:
    """One entry of the routing table."""

    name: str
    carries: tuple[Traffic, ...]
    rule: Callable[[Pair, Traffic], Verdict]


#: Every lane, in the order routing prefers them for each kind of traffic they carry.
LANES: tuple[Lane, ...] = (
    Lane("socket", ("calls",), socket_rule),
    Lane("shm", ("cpu",), shm_rule),
    Lane("cuda_ipc", ("cuda",), cuda_ipc_rule),
    Lane("nixl", ("cpu", "cuda"), nixl_rule),
    Lane("nccl", ("cuda",), nccl_rule),
    Lane("torchrpc", ("calls", "cpu", "cuda"), torchrpc_rule),
    Lane("nng", ("calls", "cpu"), nng_rule),
)


#: Lanes for tensors alone: the message they belong to goes by socket.
BESIDE = ("shm", "cuda_ipc", "nixl", "nccl")
