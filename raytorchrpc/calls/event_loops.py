"""Tokens that identify a chain of calls where it comes back, and event loops blocked by a wait of such a chain."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.process import identity

Token = str

_tokens = itertools.count()


def new_token() -> Token:
    """A token that is unique among all processes."""
    return f"{identity.unique}.{next(_tokens)}"


def token_of_threads() -> Token:
    """The token of all methods that run on a thread here without an admission."""
    return f"{identity.unique}.thread"


def is_of_this_process(token: Token) -> bool:
    return token.startswith(identity.unique)


def on_loop() -> bool:
    """Whether this thread is running an event loop."""
    return asyncio._get_running_loop() is not None  # get_running_loop would raise in most calls


def refuse_on_loop(operation: str, instead: str) -> None:
    """Raise RayTorchRpcError if this thread runs an event loop, which waiting for ``operation`` would block.

    Cells of a notebook run on the loop of IPython, which waits for them anyway.
    """
    if on_loop() and not _runs_cells():
        raise RayTorchRpcError(f"{operation} would block this thread's event loop: use {instead}")


def _runs_cells() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


class _Start(NamedTuple):
    """A method of a chain of calls that a loop has been asked to start."""

    loop: asyncio.AbstractEventLoop
    path: tuple[Token, ...]
    refuse: Callable[[], None]
    number: int


_lock = threading.Lock()
_blocked: dict[Token, asyncio.AbstractEventLoop] = {}
_starting: dict[int, _Start] = {}
_numbers = itertools.count()


def token_on_loop() -> Token | None:
    """A new token for the path of a call made on an event loop; None on any other thread.

    If the caller then waits for the call without ``await``, the loop cannot serve a call of that chain.
    """
    return new_token() if on_loop() else None


@contextmanager
def blocking_loop(token: Token) -> Iterator[None]:
    """For a synchronous wait on this thread's event loop, for the call with this token.

    Meanwhile refuses whatever that call wants to start on the loop: it would wait for ever.
    """
    loop = asyncio.get_running_loop()
    with _lock:
        _blocked[token] = loop
        stuck = [start for start in _starting.values() if start.loop is loop and token in start.path]
        for start in stuck:
            del _starting[start.number]
    for start in stuck:
        start.refuse()
    try:
        yield
    finally:
        with _lock:
            _blocked.pop(token, None)


def start_on_loop(
    loop: asyncio.AbstractEventLoop, path: tuple[Token, ...], start: Callable[[], None], refuse: Callable[[], None]
) -> None:
    """Have the loop call ``start``; call ``refuse`` instead if the loop is blocked by a wait of the same chain."""
    if not path:
        loop.call_soon_threadsafe(start)
        return
    entry = _Start(loop, path, refuse, next(_numbers))
    with _lock:
        blocked = any(_blocked.get(token) is loop for token in path)
        if not blocked:
            _starting[entry.number] = entry
    if blocked:
        refuse()
        return

    def unless_refused() -> None:
        with _lock:
            wanted = _starting.pop(entry.number, None) is not None
        if wanted:
            start()

    loop.call_soon_threadsafe(unless_refused)
