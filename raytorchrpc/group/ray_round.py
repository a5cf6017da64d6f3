"""Calls to every participant through Ray, with one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from raytorchrpc.errors import RayTorchRpcError

#: While an actor restarts, it is called again this often (seconds).
_RESTART_POLL_S = 0.05


class Round:
    """Calls a function in several processes at once, through Ray, with one deadline."""

    def __init__(self, participants: Mapping[str, Any], deadline: float) -> None:
        self._participants, self._deadline = participants, deadline

    def all(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        fail_fast: bool = False,
        retry_restarting: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Run ``function(instance, *arguments[name])`` at every named member.

        Returns results and failures by name; TimeoutError stands for no answer by the deadline. With ``fail_fast`` the
        first failure ends the wait, and members that have not answered are in neither. With ``retry_restarting`` an
        actor that is restarting is called again.
        """
        results: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        pending: dict[Any, str] = {}
        for member, args in arguments.items():
            handle = self._participants[member]
            if handle is not None:
                try:
                    pending[handle.__ray_call__.remote(function, *args)] = member
                except RayError as error:  # its queue is full
                    failures[member] = error
        for member, args in arguments.items():
            if self._participants[member] is None:
                try:
                    results[member] = function(None, *args)
                except RayTorchRpcError as error:
                    failures[member] = error
        while pending and not (fail_fast and failures):
            remaining = max(0.0, self._deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=remaining)
            if not ready:
                failures.update({member: TimeoutError("no answer") for member in pending.values()})
                break
            member = pending.pop(ready[0])
            try:
                results[member] = ray.get(ready[0], timeout=max(1.0, remaining))
            except RayTaskError as error:
                cause = error.cause if isinstance(error.cause, Exception) else error
                failures[member] = cause
            except ActorUnavailableError as error:
                if not retry_restarting or time.monotonic() >= self._deadline:
                    failures[member] = error
                    continue
                threading.Event().wait(_RESTART_POLL_S)  # it is restarting; Ray offers nothing to wait on
                pending[self._participants[member].__ray_call__.remote(function, *arguments[member])] = member
            except RayError as error:
                failures[member] = error
        for reference in pending:  # Ray prints errors that are not retrieved
            reference.future().add_done_callback(lambda late: late.exception())
        return results, failures
