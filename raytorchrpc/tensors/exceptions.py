"""Encodes exceptions of remote methods, and raises them again at the caller under their own type.

The type's name and the traceback travel as text, next to the pickled exception: they arrive even if it cannot be
loaded.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from raytorchrpc.errors import RemoteError, shown
from raytorchrpc.tensors.codec import Codec, Encoded
from raytorchrpc.tensors.kept_errors import native_of, parts_of, pickles_itself, rebuilt

#: A longer traceback loses its middle (characters): in a chain of calls each hop adds its own traceback.
_TEXT_LIMIT = 64 * 1024
#: A longer list of which an element cannot travel is lost.
_MOST_PARTS = 1000
_NESTED = re.compile(rf"\A(?:{RemoteError.__module__}\.RemoteError: on [^\n]*:\n)+")


def encode_exception(codec: Codec, error: BaseException) -> Encoded:
    """Encode an exception so that the caller can raise it under its own type. Never raises.

    Of an exception that cannot be pickled and loaded again, what is in the way is lost: an attribute is missing, an
    argument arrives as its text. If that does not suffice it is sent as text, and arrives as a RemoteError. So does one
    that is not an Exception: a SystemExit or a cancellation concerns this process, not the caller's.
    """
    name, text = _type_name(error), traceback_text(error)
    with contextlib.suppress(BaseException):  # whatever a user's class raises, the fallback is the same
        if (loadable := _loadable(codec, error)) is not None:
            encoded = loadable[1]
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


def _loadable(codec: Codec, error: BaseException, within: tuple[Any, ...] = ()) -> tuple[Any, Encoded] | None:
    """Return the best description of an exception that can be pickled and loaded again, and the same encoded.

    ``within``: what it is part of.
    """
    for described in _descriptions(codec, error, (*within, error)):
        with contextlib.suppress(BaseException):
            encoded = codec.encode(described)
            if _travels(encoded) and type(_reraisable(codec.decode(*encoded))) is type(error):
                return described, encoded
    return None


def _descriptions(codec: Codec, error: BaseException, within: tuple[Any, ...]) -> Iterator[Any]:
    """Yield objects that describe the exception to pickle, best first."""
    if not isinstance(error, Exception):
        return
    cls = type(error)
    native = native_of(cls)
    if pickles_itself(cls, native):
        yield error
    yield (parts := parts_of(error, native))
    if not pickles_itself(cls, native):
        yield error
    # Something in it cannot travel: that alone is lost.
    made_from, args = (_part(codec, each, within, _text) for each in parts[1:3])
    state = {name: _part(codec, value, within, _nothing) for name, value in parts[3].items()}
    yield cls, made_from, args, {name: part for name, part in state.items() if part is not _nothing}
    yield cls, made_from, args, {}


def _part(codec: Codec, value: Any, within: tuple[Any, ...], instead: Callable[[Any], Any]) -> Any:
    """Return what travels in place of a part of an exception: the part, or what is left of it, or ``instead`` of it.

    In a list, a tuple or a dict the text of a part takes its place.
    """
    if any(value is outer for outer in within):
        return instead(value)
    if isinstance(value, Exception):
        return _Inner(codec, value, within)
    inside, container = (*within, value), type(value) in (list, tuple, dict) and len(value) <= _MOST_PARTS
    holds_errors = container and any(isinstance(each, Exception) for each in _elements(value))
    with contextlib.suppress(BaseException):
        encoded = codec.encode(value)
        if _travels(encoded) and not holds_errors:  # an exception may be loaded as something else
            codec.decode(*encoded)
            return value
    if not container:
        return instead(value)
    parts = [_part(codec, each, inside, _text) for each in _elements(value)]
    return dict(zip(value, parts, strict=True)) if type(value) is dict else type(value)(parts)


def _elements(container: Any) -> Any:
    return container.values() if type(container) is dict else container


def _travels(encoded: Encoded) -> bool:
    """Whether an error may hold this: it must be able to use any lane."""
    return not encoded.rrefs and not any(tensor.is_cuda for tensor in encoded.tensors)


def _text(value: Any) -> str:
    try:
        return repr(value)[:_TEXT_LIMIT]
    except BaseException as failure:
        return f"a {type(value).__qualname__} (it cannot be shown: {type(failure).__name__})"


def _nothing(value: Any) -> Any:
    """Stands for an attribute that is lost."""
    return _nothing


class _Inner:
    """An exception in another one. It is loaded as itself; as a RemoteError if it cannot be."""

    def __init__(self, codec: Codec, error: Exception, within: tuple[Any, ...]) -> None:
        if (loadable := _loadable(codec, error, within)) is not None:
            self._described = loadable[0]
        else:
            text = traceback_text(error)
            self._described = RemoteError(text, type_name=_type_name(error), traceback_text=text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reraisable, (self._described,)


def _reraisable(described: Any) -> BaseException:
    return described if isinstance(described, BaseException) else rebuilt(*described)
