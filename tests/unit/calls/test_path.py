"""The way of one small call through the package: few modules, and few calls from a lower package up into a higher."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import torch

import raytorchrpc as rtr
from raytorchrpc.config import GroupConfig
from tests.unit.callees import exposed
from tests.unit.members import Members
from tests.unit.test_imports import MAY_IMPORT, PACKAGE, package

#: Modules that a call may run through.
MOST_MODULES = 27
#: Pairs of functions of which the first, of a lower package, calls the second, of a higher one: what lanes share has
#: one's own connection make the call, the lane has a request served, and a call that ended gives back its credit. A
#: thread's own loop runs the method.
MOST_CLIMBS = 3
ADDS_ONE = exposed(lambda actor, x: x + 1)
HEIGHTS = {name: height for height, name in enumerate(MAY_IMPORT)}


class Trace:
    """What the package runs while this is on, on the threads that were started since it was made and on this one."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.climbs: dict[str, None] = {}
        self.is_on = False
        threading.setprofile(self._note)

    def __enter__(self) -> None:
        self.is_on = True
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.is_on = False

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_on or event != "call" or (called := _module(frame)) is None:
            return
        self.modules[called] = None
        caller: FrameType | None = frame.f_back
        while caller is not None and (module := _module(caller)) is None:
            caller = caller.f_back
        # A thread's own loop calls up by its nature: it is the bottom of the stack, and no step of the call.
        if (
            caller is not None
            and module is not None
            and module != "process.threads"
            and _height(module) < _height(called)
        ):
            self.climbs[f"{module}:{caller.f_code.co_name} -> {called}:{frame.f_code.co_name}"] = None


def _module(frame: FrameType) -> str | None:
    above, _, inside = frame.f_code.co_filename.partition(f"{PACKAGE}/")
    return None if above or not inside else inside.removesuffix(".py").replace("/", ".")


def _height(module: str | None) -> int:
    return HEIGHTS[package(module)] if module else len(HEIGHTS)


def test_a_small_call_takes_few_modules_and_hardly_climbs() -> None:
    trace = Trace()
    try:
        members = Members(GroupConfig(), {"f": exposed(lambda actor, x: x + 1)}, by_socket=True)
        with members.acting("a"):
            for _ in range(3):  # connect, and know what is asked for once
                rtr.rpc_sync("home").f(torch.ones(4))
            time.sleep(0.1)  # the listener that ran the last of them may still be on its way back
            with trace:
                result = rtr.rpc_sync("home").f(torch.ones(4))
    finally:
        threading.setprofile(None)
        members.close()
    assert result.tolist() == [2.0] * 4
    modules = "\n".join(trace.modules)
    assert len(trace.modules) <= MOST_MODULES, f"a call ran through {len(trace.modules)} modules:\n{modules}"
    climbs = "\n".join(trace.climbs)
    assert len(trace.climbs) <= MOST_CLIMBS, f"a call climbed {len(trace.climbs)} times:\n{climbs}"
