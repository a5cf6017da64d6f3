"""An actor that Ray restarts, for the tests of membership."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import raytorchrpc as rtr
from tests.ray.actors import Latch


class Returning:
    """Counts what ran in its present process."""

    def __init__(self) -> None:
        self.runs = 0

    @rtr.method
    def count(self) -> tuple[int, int]:
        """(pid, how often this ran here)."""
        self.runs += 1
        return os.getpid(), self.runs

    @rtr.method(retry=3)
    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return tensor * 2

    @rtr.method(concurrent=True)
    def hold(self, latch: Latch) -> str:
        latch.pass_through()
        return "released"

    @rtr.method(concurrent=True, retry=2)
    def die_once(self, marker: str) -> int:
        """Ends its process, unless the file is there already; makes it first."""
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return os.getpid()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def pid(self) -> int:
        return os.getpid()

    def call(self, target: Any, method: str, args: tuple[Any, ...] = (), options: dict[str, Any] | None = None) -> Any:
        return getattr(rtr.rpc_sync(target, **(options or {})), method)(*args)

    def view(self) -> tuple[tuple[str, int, int], ...]:
        """What this member knows of its group."""
        return tuple((member.name, member.rank, member.incarnation) for member in rtr.get_group().members)

    def wait_ready(self, timeout_s: float) -> None:
        rtr.get_group().wait_ready(timeout_s)

    def in_no_group(self) -> bool:
        try:
            rtr.current_member()
        except rtr.NotAMember:
            return True
        return False


class StartsWhenTold(Returning):
    """Its first process starts at once; later ones wait at a latch."""

    def __init__(self, latch: Latch, marker: str) -> None:
        super().__init__()
        if os.path.exists(marker):
            latch.pass_through()
        Path(marker).touch()
