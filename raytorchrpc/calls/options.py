"""The options of one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from raytorchrpc.calls.receive_into import Receiver
from raytorchrpc.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")

#: The longest deadline of a call, as for ``GroupConfig.rpc_timeout_s``.
MAX_TIMEOUT_S = 86400
#: ``CallOptions.retry`` of a request that is sent again until its deadline, or as long as its member may come back.
OFTEN = 1 << 30


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

    def retries(self, usual: Mapping[str, int], method: str) -> int:
        """How often the call may be sent again; ``usual``: by method."""
        return usual.get(method, 0) if self.retry is None else self.retry


DEFAULTS = CallOptions()


def checked_timeout(timeout: Any) -> float:
    """Raise ConfigurationError for what is not a number of seconds."""
    # No infinity either: every wait ends, and the waits underneath take none.
    if isinstance(timeout, (int, float)) and timeout <= MAX_TIMEOUT_S:
        return float(timeout)
    raise ConfigurationError(f"timeout is a number of seconds up to {MAX_TIMEOUT_S}, not {timeout!r}")


def check_timeout(timeout: Any, name: str = "timeout") -> None:
    """Raise ConfigurationError unless this is a number of seconds above 0, as a group needs to form or change."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise ConfigurationError(
            f"{name} must be above 0, and at most {MAX_TIMEOUT_S} (a day), in seconds; not {timeout!r}"
        )


def takes_timeout(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function that takes ``timeout=`` name it when another spelling is passed."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            for name in kwargs:
                if name.endswith("timeout_s"):
                    where = "GroupConfig has rpc_timeout_s" if name == "rpc_timeout_s" else "only settings end in _s"
                    right = "timeout" if name == "rpc_timeout_s" else name.removesuffix("_s")
                    raise TypeError(f"{function.__name__} takes {right}= in seconds, not {name}=; {where}")
        return function(*args, **kwargs)

    return checked


def checked_retry(retry: Any) -> int:
    """Raise ConfigurationError for what is not a number of retries."""
    if isinstance(retry, bool) or not isinstance(retry, int) or retry < 0:
        raise ConfigurationError(f"retry= is how often a call may be sent again, 0 or more; not {retry!r}")
    return retry
