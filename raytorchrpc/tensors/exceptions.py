"""Encodes exceptions of remote methods, and raises them again at the caller under their own type.

The type's name and the traceback travel as text, next to the pickled exception: they arrive even if it cannot be
loaded.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import traceback
from collections.abc import Iterator
from typing import Any

from raytorchrpc.errors import RemoteError, shown
from raytorchrpc.tensors.codec import Codec, Encoded

#: A longer traceback loses its middle (characters): in a chain of calls each hop adds its own traceback.
_TEXT_LIMIT = 64 * 1024
_NESTED = re.compile(rf"\A(?:{RemoteError.__module__}\.RemoteError: on [^\n]*:\n)+")


def encode_exception(codec: Codec, error: BaseException) -> Encoded:
    """Encode an exception so that the caller can raise it under its own type. Never raises.

    An exception that cannot be pickled and loaded again is sent as text, and arrives as a RemoteError. So does one that
    is not an Exception: a SystemExit or a cancellation concerns this process, not the caller's.
    """
    name, text = _type_name(error), traceback_text(error)
    with contextlib.suppress(BaseException):  # whatever a user's class raises, the fallback is the same
        if (found := _loadable(codec, error)) is not None:
            encoded = found[1]
            return encoded._replace(payload=pickle.dumps((encoded.payload, name, text), 5))
    return Encoded(pickle.dumps((b"", name, text), 5), (), (), 0)


def decode_exception(codec: Codec, encoded: Encoded, where: str) -> BaseException:
    """Return the remote exception, whose cause is a RemoteError with the remote traceback.

    Returns the RemoteError itself if the exception cannot be rebuilt here.
    """
    payload, name, text = pickle.loads(encoded.payload)
    obstacle = ""
    if payload:
        cause = RemoteError(f"on {where}:\n{text}", type_name=name, traceback_text=text)
        try:
            error = _reraisable(codec.decode(*encoded._replace(payload=payload)))
            if isinstance(error, Exception):
                object.__setattr__(error, "__cause__", cause)
                return error
            obstacle = f" (it is a {type(error).__name__} here)"
        except Exception as failure:
            obstacle = f" (it cannot be unpickled here: {shown(failure)})"
    return RemoteError(f"on {where}{obstacle}:\n{text}", type_name=name, traceback_text=text)


def traceback_text(error: BaseException) -> str:
    """Format the traceback of any exception, with those of its causes, as Python does. Never raises."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as failure:
        return f"{type(error).__qualname__} (its traceback cannot be shown: {type(failure).__name__})\n"
    if len(text) > _TEXT_LIMIT:
        text = _NESTED.sub("", text)  # the rest begins where the error was first raised
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _type_name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


# --- how an exception is described -----------------------------------------------------------------------


def _loadable(codec: Codec, error: BaseException) -> tuple[Any, Encoded] | None:
    """Return the best description of an exception that can be pickled and loaded again, and the same encoded."""
    for described in _descriptions(codec, error):
        with contextlib.suppress(BaseException):
            encoded = codec.encode(described)
            if encoded.rrefs or any(tensor.is_cuda for tensor in encoded.tensors):
                continue  # an error must be able to use any lane
            if type(_reraisable(codec.decode(*encoded))) is type(error):
                return described, encoded
    return None


def _descriptions(codec: Codec, error: BaseException) -> Iterator[Any]:
    """Yield objects that describe the exception to pickle, best first."""
    if not isinstance(error, Exception):
        return
    cls = type(error)
    native = _native(cls)
    if _pickles_itself(cls, native):
        yield error
    _, made_from, *rest = native.__reduce__(error)
    state = (rest and rest[0]) or {}
    yield cls, made_from, error.args, state
    if not _pickles_itself(cls, native):
        yield error
    yield cls, made_from, error.args, {}
    if native.__name__ == "ExceptionGroup":  # Python 3.11 has it
        group: Any = error
        parts = group.message, [_Inner(codec, inner) for inner in group.exceptions]
        yield cls, parts, parts, state
        yield cls, parts, parts, {}


class _Inner:
    """An exception of a group. It is loaded as itself; as a RemoteError if it cannot be."""

    def __init__(self, codec: Codec, error: Exception) -> None:
        if (found := _loadable(codec, error)) is not None:
            self._described = found[0]
        else:
            text = traceback_text(error)
            self._described = RemoteError(text, type_name=_type_name(error), traceback_text=text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reraisable, (self._described,)


def _native(cls: type[BaseException]) -> Any:
    """Return the first built-in base class, which may have state of its own (a file name, a position)."""
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


def _pickles_itself(cls: type[BaseException], native: Any) -> bool:
    """Whether the class defines its own pickling."""
    return cls.__reduce__ is not native.__reduce__ or cls.__reduce_ex__ is not native.__reduce_ex__


def _reraisable(described: Any) -> BaseException:
    return described if isinstance(described, BaseException) else _rebuilt(*described)


def _rebuilt(
    cls: type[BaseException], made_from: tuple[Any, ...], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    # Without calling cls(...), which may need other arguments than those in ``args``.
    native = _native(cls)
    error: BaseException = native.__new__(cls, *made_from)
    native.__init__(error, *made_from)
    for key, value in {"args": args, **state}.items():
        object.__setattr__(error, key, value)  # the class may be a frozen dataclass
    return error
