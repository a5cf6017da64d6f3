"""A child process of an actor, or of a test, which runs functions that it is sent. It is not connected to Ray."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
from ray import cloudpickle

import raytorchrpc as rtr

PATIENCE_S = 60.0
children: dict[str, Child] = {}
"""Of this process, by name."""


class Engine:
    """What a child serves."""

    @rtr.method
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @rtr.method
    def pid(self) -> int:
        return os.getpid()

    def hidden(self) -> None:
        """Not decorated."""


class Child:
    """One child."""

    def __init__(self, start_method: str = "forkserver") -> None:
        context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload([__name__])  # once, and not in each child
        self._here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=False)
        kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("RAY_")}
        try:
            self.process.start()
        finally:
            os.environ.update(kept)
        there.close()

    def begin(self, function: Any, *args: Any) -> None:
        self._here.send_bytes(cloudpickle.dumps((function, args)))

    def answer(self) -> Any:
        assert self._here.poll(PATIENCE_S), "the child does not answer"
        result, error = cloudpickle.loads(self._here.recv_bytes())
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, args = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = function(*args), None
        except Exception as error:
            answer = None, error
        pipe.send_bytes(cloudpickle.dumps(answer))


def start(name: str, start_method: str = "forkserver") -> int:
    children[name] = Child(start_method)
    return int(children[name].process.pid)


def do(name: str, function: Any, *args: Any) -> Any:
    children[name].begin(function, *args)
    return children[name].answer()


def do_both(name: str, function: Any) -> tuple[Any, Any]:
    """At once in the child and in this process."""
    children[name].begin(function)
    return function(), children[name].answer()


def begin(name: str, function: Any, *args: Any) -> None:
    """As ``do``, without waiting; ``answer`` waits."""
    children[name].begin(function, *args)


def answer(name: str) -> Any:
    return children[name].answer()


def end(name: str) -> None:
    children.pop(name).end()


def join(name: str | None = None, group: str | None = None) -> rtr.Member:
    rtr.join(group, name, instance=Engine())
    return rtr.current_member()


def wait(name: str) -> None:
    """Block until it has ended."""
    child = children.pop(name)
    child.process.join(PATIENCE_S)
    assert not child.process.is_alive()


def join_as(name: str, group: str) -> rtr.Member:
    """In an actor, which serves itself."""
    rtr.join(group, name)
    return rtr.current_member()
