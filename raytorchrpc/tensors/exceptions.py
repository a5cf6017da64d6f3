"""Exceptions that travel: taken apart where a method raised them, raised again at its caller under their own type.

The name and the traceback travel as text, apart from the pickled exception: they arrive even if that cannot be loaded.
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

#: A longer traceback loses its middle (characters): in a chain of calls each hop adds its own to all before.
_TEXT_LIMIT = 64 * 1024
_NESTED = re.compile(rf"\A(?:{RemoteError.__module__}\.RemoteError: on [^\n]*:\n)+")


def encode_exception(codec: Codec, error: BaseException) -> Encoded:
    """Take an exception apart so that it can be raised again elsewhere under its own type. Never raises.

    What cannot be pickled (or not be read back) is sent as text and becomes a RemoteError there. So does what
    is no Exception: a SystemExit or a cancellation means this process, not the caller's.
    """
    cls = type(error)
    name, text = f"{cls.__module__}.{cls.__qualname__}", traceback_text(error)
    with contextlib.suppress(BaseException):  # whatever a user's own class does ends in the same fallback
        for described in _descriptions(error):
            with contextlib.suppress(BaseException):
                encoded = codec.encode(described)
                if encoded.rrefs or any(tensor.is_cuda for tensor in encoded.tensors):
                    continue  # an error has to get through by whatever lane its call came
                if type(_reraisable(codec.decode(*encoded))) is cls:
                    return encoded._replace(payload=pickle.dumps((encoded.payload, name, text), 5))
    return Encoded(pickle.dumps((b"", name, text), 5), (), (), 0)


def decode_exception(codec: Codec, encoded: Encoded, where: str) -> BaseException:
    """The remote exception, ready to be raised; its cause is a RemoteError with the remote traceback.

    The RemoteError itself where the exception cannot be made here.
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
    """The traceback of an exception of any class, with those of its causes, as Python shows it. Never raises."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as failure:
        return f"{type(error).__qualname__} (its traceback cannot be shown: {type(failure).__name__})\n"
    if len(text) > _TEXT_LIMIT:
        text = _NESTED.sub("", text)  # what is kept begins where the error was first raised
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


# --- how an exception is described -----------------------------------------------------------------------


def _descriptions(error: BaseException) -> Iterator[Any]:
    """Ways to pickle it, best first."""
    if not isinstance(error, Exception):
        return
    cls = type(error)
    native = _native(cls)
    if _knows_how(cls, native):
        yield error
    _, made_from, *rest = native.__reduce__(error)
    state = {key: value for key, value in ((rest and rest[0]) or {}).items() if key != "__notes__"}
    yield cls, made_from, error.args, state
    if not _knows_how(cls, native):
        yield error
    yield cls, made_from, error.args, {}


def _native(cls: type[BaseException]) -> Any:
    """The built-in class that ``cls`` derives from first; it keeps state of its own (a file name, a position)."""
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


def _knows_how(cls: type[BaseException], native: Any) -> bool:
    """Whether the class brings its own pickling."""
    return cls.__reduce__ is not native.__reduce__ or cls.__reduce_ex__ is not native.__reduce_ex__


def _reraisable(described: Any) -> BaseException:
    return described if isinstance(described, BaseException) else _rebuilt(*described)


def _rebuilt(
    cls: type[BaseException], made_from: tuple[Any, ...], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    # Not by way of cls(...): a constructor may want other arguments than those it stored in ``args``.
    native = _native(cls)
    error: BaseException = native.__new__(cls, *made_from)
    native.__init__(error, *made_from)
    for key, value in {"args": args, **state}.items():
        object.__setattr__(error, key, value)  # the class may be a frozen dataclass
    return error
