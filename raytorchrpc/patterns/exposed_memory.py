"""Tensors that other members read where they are: those of regions, and weights that are lent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process.locks import Lock


class ExposedMemory:
    """Tensors of this process, described to each lane by which some member reads them in place. Thread-safe.

    Within those of one device type, a reader knows a tensor by its number.
    """

    def __init__(self, local: LocalMember, label: str, tensors: Iterable[torch.Tensor]) -> None:
        """``label``: for the log. ``tensors``: kept until ``end``."""
        self._local, self._label, self._lock = local, label, Lock()
        self._tensors: dict[str, list[torch.Tensor]] = {}  # by device type
        for tensor in tensors:
            self._tensors.setdefault(tensor.device.type, []).append(tensor)
        self._descriptors: dict[tuple[str, str], Any] = {}  # by device type and lane
        self._readers: set[str] = set()

    def describe(self, rank: int) -> dict[str, tuple[str, Any]]:
        """For the member of that rank, by device type: the lane that reads them in place, and its descriptor."""
        route, described = self._local.peers.route_back(rank), {}
        with self._lock:
            self._readers.add(route.member.name)
            for kind, tensors in self._tensors.items():
                key = kind, route.beside.get(kind, "")
                if key not in self._descriptors and (lane := self._local.tensor_lanes.get(key[1])) is not None:
                    try:
                        self._descriptors[key] = lane.expose(tensors)
                    except LaneUnavailable as error:
                        detour = f"{self._label}: read in messages, not in place"
                        self._local.payloads.warn(detour, error.reason)
                        continue
                if key in self._descriptors:
                    described[kind] = key[1], self._descriptors[key]
        return described

    def end(self) -> None:
        """Let no reader begin any more. A lane may keep the tensors until reads in progress have ended. Idempotent."""
        with self._lock:
            descriptors, self._descriptors, self._tensors = self._descriptors, {}, {}
        for (_, name), descriptor in descriptors.items():
            if (lane := self._local.tensor_lanes.get(name)) is not None:
                lane.conceal(descriptor, self._readers)
