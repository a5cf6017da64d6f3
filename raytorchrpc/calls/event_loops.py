"""By what a chain of calls is known where it comes back, and event loops that stand still for one."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

Token = str

_tokens = itertools.count()
PROCESS = os.urandom(6).hex()
"""How the tokens of this process begin."""
ON_A_THREAD: Token = f"{PROCESS}.thread"
"""Of all methods that run on a thread here without an admission."""


def new_token() -> Token:
    """One that nobody had before."""
    return f"{PROCESS}.{next(_tokens)}"


def on_loop() -> bool:
    """Whether this thread runs an event loop just now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Start(NamedTuple):
    """A method of a chain of calls that a loop has been asked to start."""

    loop: asyncio.AbstractEventLoop
    path: tuple[Token, ...]
    refuse: Callable[[], None]
    number: int


_loops_lock = threading.Lock()
_standing: dict[Token, asyncio.AbstractEventLoop] = {}
_starting: dict[int, _Start] = {}
_start_numbers = itertools.count()


def token_on_loop() -> Token | None:
    """For the path of a call that is made here: a token of its own if this thread runs an event loop.

    Should the maker then wait for the call without ``await``, a call of that chain cannot be served by the loop.
    """
    return new_token() if on_loop() else None


@contextmanager
def loop_standing_still(token: Token) -> Iterator[None]:
    """While this thread, whose loop it is, waits for the call with this token: refuse what waits for the loop
    on behalf of that call. It would wait for ever.
    """
    loop = asyncio.get_running_loop()
    with _loops_lock:
        _standing[token] = loop
        stuck = [start for start in _starting.values() if start.loop is loop and token in start.path]
        for start in stuck:
            del _starting[start.number]
    for start in stuck:
        start.refuse()
    try:
        yield
    finally:
        with _loops_lock:
            _standing.pop(token, None)


def start_on_loop(
    loop: asyncio.AbstractEventLoop, path: tuple[Token, ...], start: Callable[[], None], refuse: Callable[[], None]
) -> None:
    """Have the loop call ``start``; or call ``refuse`` if it stands still for a call of this very chain."""
    if not path:
        loop.call_soon_threadsafe(start)
        return
    entry = _Start(loop, path, refuse, next(_start_numbers))
    with _loops_lock:
        stuck = any(_standing.get(token) is loop for token in path)
        if not stuck:
            _starting[entry.number] = entry
    if stuck:
        refuse()
        return

    def unless_refused() -> None:
        with _loops_lock:
            wanted = _starting.pop(entry.number, None) is not None
        if wanted:
            start()

    loop.call_soon_threadsafe(unless_refused)
