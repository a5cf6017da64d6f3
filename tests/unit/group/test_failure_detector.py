"""What the group finds out about a member whose connection broke."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.group import failure_detector
from raytorchrpc.group.failure_detector import FailureDetector, Findings
from raytorchrpc.group.state import GroupState


class Ray:
    """What Ray says of the actor of member ``a``, whose lost process has pid 1."""

    def __init__(self) -> None:
        self.state, self.pid, self.listens = "ALIVE", 1, False
        record = SimpleNamespace(handle="a", probe=SimpleNamespace(pid=1, node_id="node"))
        roster: Any = SimpleNamespace(records={"a": record})
        self.group = GroupState(roster, None, {})  # type: ignore[arg-type]
        self.group.lose("a", "connection broke")
        restarts: Any = SimpleNamespace(is_listening=lambda *_: self.listens)
        nothing: Any = None
        self._detector = FailureDetector(self.group, nothing, restarts, nothing, nothing)
        self._detector._dial = lambda *_: None  # type: ignore[method-assign]

    def poll(self, state: str, pid: int = 1, listens: bool = False) -> Findings:
        self.state, self.pid, self.listens = state, pid, listens
        self.group.lost["a"].next_poll = time.monotonic()
        return self._detector.poll()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    states = SimpleNamespace(
        actor_state=lambda _: SimpleNamespace(state=made.state, pid=made.pid, node_id="node", cause=""),
        actor_id_of=lambda handle: handle,
    )
    monkeypatch.setattr(failure_detector, "ray_internals", states)
    return made


def test_a_process_that_ray_has_given_up_is_lost_and_has_ended(ray: Ray) -> None:
    assert ray.poll("RESTARTING") == Findings(lost=["a"], ended=[], dead=[], restarted=[])
    assert ray.group.lost["a"].ended


def test_that_a_process_has_ended_is_found_once_if_its_loss_was_announced_before(ray: Ray) -> None:
    assert ray.poll("ALIVE") == Findings([], [], [], [])
    ray.group.lost["a"].announced = True  # its host refused a connection
    assert not ray.group.lost["a"].ended, "it may come back as it was"
    assert ray.poll("RESTARTING").ended == ["a"]
    assert ray.group.lost["a"].ended
    assert ray.poll("RESTARTING") == Findings([], [], [], [])


def test_the_return_of_a_process_says_that_the_one_before_has_ended(ray: Ray) -> None:
    ray.group.lost["a"].announced = True
    assert ray.poll("ALIVE", pid=2, listens=True) == Findings([], [], [], restarted=["a"])
