"""How the supervisor has a restarted actor's process poll for its requests."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, PendingCallsLimitExceeded, RayTaskError

from raytorchrpc._compat.ray_internals import ActorState
from raytorchrpc.group import ray_calls
from raytorchrpc.group.ray_calls import RestartedActors

THERE = ActorState("ALIVE", 7, "node", "")


class Handle:
    """Of an actor whose module does not import raytorchrpc."""

    def __init__(self) -> None:
        self._actor_id = SimpleNamespace(hex=lambda: "abc")
        self.__ray_call__ = SimpleNamespace(remote=self._remote)
        self.asked: list[Future[Any]] = []
        self.is_full = False

    def _remote(self, function: Any) -> Any:
        if self.is_full:
            raise PendingCallsLimitExceeded
        self.asked.append(Future())
        return SimpleNamespace(future=lambda: self.asked[-1])


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> RestartedActors:
    monkeypatch.setattr(ray_calls, "answer_of", lambda process: None)
    return RestartedActors("generation")


def test_a_process_is_asked_again_if_ray_has_lost_the_request(restarts: RestartedActors) -> None:
    handle = Handle()
    for lost in range(3):
        assert not restarts.is_listening(handle, THERE)
        assert not restarts.is_listening(handle, THERE)
        assert len(handle.asked) == lost + 1, "it is asked once as long as Ray has not lost that"
        handle.asked[-1].set_exception(ActorUnavailableError("the actor is restarting", b"0" * 16))


def test_a_process_is_asked_again_if_its_queue_was_full(restarts: RestartedActors) -> None:
    handle = Handle()
    handle.is_full = True
    restarts.is_listening(handle, THERE)
    handle.is_full = False
    restarts.is_listening(handle, THERE)
    assert len(handle.asked) == 1


@pytest.mark.parametrize("error", [None, RayTaskError("begin", "no such module", ImportError("raytorchrpc"))])
def test_a_process_that_has_answered_is_not_asked_again(restarts: RestartedActors, error: Exception | None) -> None:
    handle = Handle()
    restarts.is_listening(handle, THERE)
    if error is None:
        handle.asked[0].set_result(None)
    else:
        handle.asked[0].set_exception(error)
    restarts.is_listening(handle, THERE)
    assert len(handle.asked) == 1
