"""What the group finds out about a member whose connection broke."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.group import failure_detector
from raytorchrpc.group.failure_detector import FailureDetector, Findings
from raytorchrpc.group.roster import GroupState, Phase


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


@pytest.mark.parametrize("before", [Phase.SUSPECTED, Phase.AWAY])
@pytest.mark.parametrize("there", [("RESTARTING", 1, False), ("ALIVE", 2, False), ("ALIVE", 2, True)])
def test_the_end_of_a_process_is_reported_before_the_next_is_admitted(
    ray: Ray, before: Phase, there: tuple[str, int, bool]
) -> None:
    lost = ray.group.lost["a"]
    lost.phase = before
    assert ray.poll("ALIVE") == Findings([], [], []) and lost.phase is before, "it may come back as it was"
    assert ray.poll(*there) == Findings(ended=["a"], dead=[], restarted=[])
    lost.phase = Phase.ENDED  # announced
    assert ray.poll("RESTARTING") == Findings([], [], [])
    assert ray.poll("ALIVE", 2, listens=True) == Findings([], [], restarted=["a"])
    assert ray.poll("ALIVE", 3) == Findings([], [], []) and lost.phase is Phase.ENDED
    assert ray.poll("DEAD") == Findings([], dead=["a"], restarted=[])
