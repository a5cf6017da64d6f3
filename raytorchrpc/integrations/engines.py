"""What the workers of inference engines share: their group, the deadline of an update, and how models load tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.joined import Joined
from raytorchrpc.integrations.recording import check_filled
from raytorchrpc.process import threads

T = TypeVar("T")

#: An engine that gives up an update at its deadline says so until then (seconds).
_ANSWER_S = 3.0

_joined: Joined | None = None
"""This process in the group that it has joined by itself."""


def become_member(group: str | None, timeout: float) -> None:
    """Join the group, unless this process is in one of the program's: an actor is, and a process that an engine has
    started is not. See ``Joined``.
    """
    with suppress(rtr.NotAMember):
        if not rtr.current_member(timeout).group.startswith("_"):  # a library's, such as that of KV caches
            return
    global _joined
    joining = Joined(group)
    joining.join(timeout)
    _joined = joining


def follow_group(group: str | None, timeout: float) -> None:
    """Move to the group that has the name now, if this process has joined one by itself."""
    with suppress(rtr.NotAMember):  # there is no other one
        if _joined is not None and not _joined.is_current(timeout):
            _joined.leave()
            become_member(group, timeout)


def check_fields(info: Any) -> None:
    """Raise ConfigurationError, which names it, for a field of a dataclass that has a value of another type.

    Requests over HTTP bring what their JSON has.
    """
    for name, kind in get_type_hints(type(info)).items():
        value: Any = getattr(info, name)
        kinds = tuple(get_origin(each) or each for each in get_args(kind) or (kind,))
        fits = get_origin(kind) is ClassVar or isinstance(value, kinds)
        fits = fits or (type(value) is int and isinstance(0.0, kinds))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            wanted = kind.__name__ if isinstance(kind, type) else kind
            raise rtr.ConfigurationError(f"{name}={value!r} of {type(info).__name__} has to be of type {wanted}")


class Progress:
    """One update: its deadline, and whether it has written to the model."""

    held: int | None = None
    """The version of this store that the model has; None: none, or it is not known."""

    def __init__(self, timeout: float) -> None:
        self._until = time.monotonic() + timeout
        self.has_written = False

    def left(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._until - time.monotonic())


def divide(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """In groups of at most so many bytes, or of one item that has more."""
    group, total = list[T](), 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def answered(engine: str, call: Callable[..., T], *args: Any, timeout: float, **options: Any) -> T:
    """What a call to an engine returns, or raises; RpcTimeout if it does neither, and a bit later than ``timeout``
    seconds, by which the engine's own update has ended. Blocks.
    """
    done, name = Future[T](), getattr(call, "__name__", "a call")
    threads.start(threads.settle, done, partial(call, *args, **options), name="raytorchrpc-engine")
    if not wait([done], timeout + _ANSWER_S).done:
        raise rtr.RpcTimeout(
            f"{engine} has not answered {name} within {timeout + _ANSWER_S:g} s: a process of it is stopped, hangs, or "
            f"is busy; once it goes on, the next update works"
        )
    return done.result()


brought_layouts: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The layout of the version that was brought last into each model of this process."""


def check_layout(engine: str, model: Any, layout: Any) -> None:
    """Check a version that several pulls bring into a model: what a later one refuses would be found too late.

    Raises ConfigurationError if its tensors have other names or shapes than those that were brought before, or if some
    are no longer floating.
    """
    before = brought_layouts.get(model, layout)
    check_filled(engine, model, layout, [name for name in before if name not in layout])
    for name, now in layout.items():
        was = before.get(name)
        if was is None or (was.shape, was.dtype.is_floating_point) != (now.shape, now.dtype.is_floating_point):
            earlier = "was not there before" if was is None else f"was {was.dtype} of shape {tuple(was.shape)} before"
            raise rtr.ConfigurationError(
                f"{name!r} of {layout.store!r} is {now.dtype} of shape {tuple(now.shape)} as published, and {earlier}: "
                f"publish the tensors of the model's Hugging Face checkpoint, as they are there"
            )


def load_whole(
    model: Any,
    store: rtr.WeightStore,
    layout: Any,
    groups: Iterable[Sequence[str]],
    device: torch.device,
    progress: Progress,
) -> set[str]:
    """Pull whole tensors, and have the model's own loaders load them, one group of names after the other.

    ``layout``: of the version, checked. Returns the parameters that the loaders say they have filled, if they do.
    """
    filled = set[str]()
    for names in groups:
        whole = {name: torch.empty(layout[name].shape, dtype=layout[name].dtype, device=device) for name in names}
        store.pull(whole, layout.version, only=names, timeout=progress.left())
        progress.has_written = True
        with torch.no_grad():
            filled.update(model.load_weights(whole.items()) or ())
    return filled
