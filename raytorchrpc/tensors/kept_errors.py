"""Errors that are kept for later: without tracebacks, and raised as copies, which can be made of any exception."""

from __future__ import annotations

import contextlib
import copy
from types import MemberDescriptorType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


def untraced(error: E) -> E:
    """The error without the tracebacks of itself and its causes, so that it can be kept.

    A traceback holds its frames, all frames that called them, and what these hold: also what keeps the error, and
    tensors. Only the garbage collector could free that, and some programs turn it off.
    """
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        each = chain.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            BaseException.with_traceback(each, None)
            chain += each.__cause__, each.__context__
    return error


def again(error: E) -> E:
    """A copy of an error that is kept, to raise it: its traceback would keep what keeps the error; see ``untraced``."""
    cls = type(error)
    with contextlib.suppress(Exception):  # a user's class that cannot be copied
        native = native_of(cls)
        if pickles_itself(cls, native):
            other: Any = copy.copy(error)
        else:
            other = rebuilt(*parts_of(error, native))
        if type(other) is cls:
            if error.__cause__ is not None:
                object.__setattr__(other, "__cause__", error.__cause__)
            return other
    return error


def parts_of(error: BaseException, native: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Return what ``rebuilt`` makes the exception of."""
    cls = type(error)
    _, made_from, *rest = native.__reduce__(error)
    own = cls.__mro__[: cls.__mro__.index(native)]
    slots = [name for each in own for name, slot in vars(each).items() if isinstance(slot, MemberDescriptorType)]
    state = {name: getattr(error, name) for name in slots if hasattr(error, name)}
    return cls, made_from, error.args, {**state, **((rest and rest[0]) or {})}


def native_of(cls: type[BaseException]) -> Any:
    """Return the first built-in base class, which may have state of its own (a file name, a position)."""
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


def pickles_itself(cls: type[BaseException], native: Any) -> bool:
    """Whether the class defines its own pickling."""
    return cls.__reduce__ is not native.__reduce__ or cls.__reduce_ex__ is not native.__reduce_ex__


def rebuilt(
    cls: type[BaseException], made_from: tuple[Any, ...], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    # Without calling cls(...), which may need other arguments than those in ``args``.
    native = native_of(cls)
    error: BaseException = native.__new__(cls, *made_from)
    native.__init__(error, *made_from)
    for key, value in {"args": args, **state}.items():
        object.__setattr__(error, key, value)  # the class may be a frozen dataclass
    return error
