"""The modes of torch that each thread has of its own, and user code that runs on this package's threads in those of the
user's thread: grad mode, inference mode, autocast, the default device and the current GPU.

This package's threads are in torch's own defaults otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from raytorchrpc._compat.torch_internals import ThreadModes, in_default_modes

T = TypeVar("T")

_modes: ThreadModes | None = None
"""Of the thread that runs the user's code; None: torch's own defaults."""


def note() -> None:
    """Have user code run in the modes of this thread from now on."""
    global _modes
    _modes = ThreadModes.now()


def run(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run user code on a thread of this package, and undo what it leaves behind. Hot path."""
    modes = _modes
    guard = None if modes is None else modes.enter()
    try:
        return function(*args, **kwargs)
    finally:
        if modes is not None or not in_default_modes():
            del guard  # it restores what it has changed
            ThreadModes.leave()
