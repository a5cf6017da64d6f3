"""Locks that a signal handler can neither deadlock on nor break.

Python runs a signal handler on the main thread between two instructions, so also inside a section that holds a lock,
and the section goes on only once the handler has returned. An operation that the handler begins must not wait for it.
A finalizer that the garbage collector runs is in the same position, on any thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from _thread import RLock
from collections.abc import Iterator
from types import FrameType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, TypeVar

L = TypeVar("L", bound="Lock")

_PACKAGE = "raytorchrpc."


class Lock(RLock):  # type: ignore[misc]  # only typeshed calls it final
    """For a short section. One may begin inside another on the same thread: its state must be consistent wherever a
    handler may run, which is where it calls anything. If it is not, ``once`` refuses that.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def _is_owned(self) -> bool: ...

    def once(self: L, operation: str = "this operation") -> L:
        """For ``with lock.once():``. Raises RayTorchRpcError if this thread has the lock already."""
        if self._is_owned():
            raise interrupted(operation)
        return self


class Turn(Lock):  # type: ignore[misc]
    """Held throughout an operation that may take long and may wait, such as a pull. Always take it by ``once``."""

    __slots__ = ()


def interrupted(operation: str) -> Exception:
    """The RayTorchRpcError for an operation that would wait for the code on whose thread it runs."""
    from raytorchrpc.errors import RayTorchRpcError  # not with the module, which everything imports

    return RayTorchRpcError(
        f"{operation} would wait for the operation that was interrupted on this thread, by a signal handler or a "
        f"finalizer, and goes on only after it: set a flag there and do it later, or have a thread that the handler "
        f"starts do it"
    )


def interrupted_frames() -> Iterator[FrameType]:
    """The frames of this package that code of others runs inside of, on the main thread: a handler has perhaps
    interrupted them. Innermost first.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    frame, others = sys._getframe(1), False
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
            others = True
        elif others:
            yield frame
        frame = frame.f_back  # type: ignore[assignment]


def check_wait(operation: str = "this wait") -> None:
    """To be called before this thread waits for others: raise RayTorchRpcError if an interrupted section keeps a lock
    that those may need.
    """
    for frame in interrupted_frames():
        if any(type(lock) is Lock and lock._is_owned() for lock in _locks_of(frame)):
            raise interrupted(operation)


def condition() -> threading.Condition:
    """A condition with such a lock."""
    return threading.Condition(Lock())


def _locks_of(frame: FrameType) -> Iterator[Any]:
    """What the frame's code may have locked: a variable, an attribute of one, or what either is made of."""
    names = frame.f_code.co_names
    values = [*frame.f_locals.values(), *(frame.f_globals[name] for name in names if name in frame.f_globals)]
    for value in values:
        for held in (value, *(_field(value, name) for name in names)):
            yield held
            yield getattr(held, "_lock", None) if isinstance(held, threading.Condition) else _field(held, "_lock")


def _field(value: object, name: str) -> Any:
    """An attribute of an object of this package; None if it has none. Runs no code of the object's."""
    if not type(value).__module__.startswith(_PACKAGE):
        return None
    if name in (fields := getattr(value, "__dict__", {})):
        return fields[name]
    for kind in type(value).__mro__:
        if isinstance(slot := kind.__dict__.get(name), MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # it is not set yet
                return slot.__get__(value)
    return None
