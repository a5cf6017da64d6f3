"""Tokens that identify a chain of calls where it comes back, and event loops, which no operation may block."""

from __future__ import annotations

import asyncio
import itertools
import sys

from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.process import this_process

Token = str

_tokens = itertools.count()


def new_token() -> Token:
    """A token that is unique among all processes."""
    return f"{this_process.unique}.{next(_tokens)}"


def token_of_threads() -> Token:
    """The token of all methods that run on a thread here without an admission."""
    return f"{this_process.unique}.thread"


def is_of_this_process(token: Token) -> bool:
    return token.startswith(this_process.unique)


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
