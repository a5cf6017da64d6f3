"""The options of one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch

from raytorchrpc.errors import ConfigurationError

if TYPE_CHECKING:
    from raytorchrpc.calls.receive_into import Receiver

P = ParamSpec("P")
R = TypeVar("R")

#: The longest deadline of a call, as for ``GroupConfig.rpc_timeout_s``.
MAX_TIMEOUT_S = 86400
#: ``CallOptions.retry`` of a request that is sent again until its deadline, or as long as its member may come back.
OFTEN = 1 << 30
#: For those who know the arguments of queue.Queue and of Ray's Queue.
_INSTEAD_OF_BLOCK = "for block=False pass timeout=0, and for block=True nothing"
#: By function, for those who know Ray and torch: what to write instead of arguments that it does not take.
_INSTEAD = {
    "init_group": "pass the actors in one list or dict, init_group([a, b]), and the rest by name",
    **{
        verb: f"write {verb}(target).method(...): a call names a method of the actor's class, with @raytorchrpc.method"
        for verb in ("rpc_sync", "rpc_async", "remote")
    },
}


class CallOptions(NamedTuple):
    """How to make one call; see ``verbs.rpc_sync``."""

    timeout: float | None = None
    """Seconds until the deadline; None: ``GroupConfig.rpc_timeout_s``."""
    share: bool = False
    keep: bool = False
    into: Sequence[torch.Tensor] | Receiver | None = None
    retry: int | None = None
    """How often the call may be sent again; None: as often as the method allows."""
    caller_waits: bool = False
    """The caller waits for the call at once, on this thread."""
    cancellable: bool = False
    """``Call.cancel`` reaches the callee."""
    method: str = ""
    """The method that errors name, if it is not the one called."""
    group: str | None = None
    """The group that the target is in; None: see ``member.reaching``."""


DEFAULTS = CallOptions()


def is_seconds(value: Any) -> bool:
    """Whether this is a number of seconds that may be waited for: no infinity, as every wait ends, and no ``block``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value <= MAX_TIMEOUT_S


def checked_timeout(timeout: Any) -> float:
    """Return a number of seconds. Raises ConfigurationError."""
    if is_seconds(timeout):
        return float(timeout)
    hint = f"; {_INSTEAD_OF_BLOCK}" if isinstance(timeout, bool) else ""
    raise ConfigurationError(f"timeout is a number of seconds up to {MAX_TIMEOUT_S}, not {timeout!r}{hint}")


def check_longest_wait(timeout: Any) -> None:
    """Raise ConfigurationError unless this is a number of seconds, or None."""
    if timeout is not None:
        checked_timeout(timeout)


def check_timeout(timeout: Any, name: str = "timeout") -> None:
    """Raise ConfigurationError unless this is a number of seconds above 0, as a group needs to form or change."""
    if not is_seconds(timeout) or timeout <= 0:
        raise ConfigurationError(
            f"{name} must be above 0, and at most {MAX_TIMEOUT_S} (a day), in seconds; not {timeout!r}"
        )


def takes_timeout(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function that takes ``timeout=`` name it when another spelling is passed, or ``block=``; and name the
    remedy for other arguments that it does not take.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            for name in kwargs:
                if name == "block":
                    raise TypeError(f"{function.__name__} takes no block=; {_INSTEAD_OF_BLOCK}")
                if name.endswith("timeout_s"):
                    where = "GroupConfig has rpc_timeout_s" if name == "rpc_timeout_s" else "only settings end in _s"
                    right = "timeout" if name == "rpc_timeout_s" else name.removesuffix("_s")
                    raise TypeError(f"{function.__name__} takes {right}= in seconds, not {name}=; {where}")
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            began = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if began or (instead := _INSTEAD.get(function.__name__)) is None:
                raise
            raise TypeError(f"{error}: {instead}") from None

    return checked


def checked_retry(retry: Any) -> int:
    """Raise ConfigurationError for what is not a number of retries."""
    if isinstance(retry, bool) or not isinstance(retry, int) or retry < 0:
        raise ConfigurationError(f"retry= is how often a call may be sent again, 0 or more; not {retry!r}")
    return retry
