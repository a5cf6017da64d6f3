"""Coroutines under distributed autograd."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any

from raytorchrpc._compat import torch_internals


class _InContext:
    """Awaits a coroutine with a distributed autograd context entered at each of its steps.

    torch keeps the context per thread, and a loop's thread runs other coroutines in between.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context_id: int) -> None:
        self._coroutine, self._context_id = coroutine, context_id

    def __await__(self) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            try:
                with torch_internals.autograd_context(self._context_id):
                    step = self._coroutine.throw(error) if error is not None else self._coroutine.send(value)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            try:
                value = yield step
            except BaseException as thrown:  # cancellation too goes into the coroutine
                error = thrown


def in_autograd_context(coroutine: Coroutine[Any, Any, Any], context_id: int) -> Any:
    """An awaitable of ``coroutine`` that runs it inside an existing distributed autograd context."""
    return coroutine if context_id == torch_internals.NO_CONTEXT else _InContext(coroutine, context_id)
