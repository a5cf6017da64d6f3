"""A change of a group that is asked for is made once, or never; a member that missed one hears of it later."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

from raytorchrpc.errors import BootstrapError, RpcTimeout
from raytorchrpc.group.changes import Announcer, Change, EventBus, RequestedChange
from raytorchrpc.group.roster import GroupState
from raytorchrpc.process.threads import ThreadShortage
from tests.shortage import Shortage, shortage

__all__ = ["shortage"]

PATIENCE_S = 10.0


def test_what_the_change_raises_comes_out_as_it_is() -> None:
    def fail() -> None:
        raise RpcTimeout("too late")  # a TimeoutError, but not that of the wait

    change = RequestedChange("g", fail)
    change.run()
    with pytest.raises(RpcTimeout, match="too late"):
        change.result(0)


def test_a_change_that_was_given_up_before_its_turn_is_not_made_later() -> None:
    made: list[str] = []
    change = RequestedChange("g", lambda: made.append("made"))
    with pytest.raises(BootstrapError, match="busy with another change; this one did not begin"):
        change.result(0.01)
    change.run()
    assert made == []


def test_a_change_that_takes_longer_than_its_patience_says_so() -> None:
    errors: list[str] = []

    def slow() -> None:
        with pytest.raises(BootstrapError) as late:
            change.result(0.01)
        errors.append(str(late.value))

    change = RequestedChange("g", slow)
    change.run()
    assert errors == ["group 'g': this change began and has not finished after 0.01 s"]


def test_a_member_that_could_not_be_resynchronised_is_so_later(shortage: Shortage) -> None:
    """One that missed a change, by a supervisor that cannot start a thread for it."""

    class Roster:
        generation, name = "g", "group"
        records = handles = {"a": object()}  # noqa: RUF012
        table = spec = lambda *_: None

    class ControlConnections:
        def call_all(self, *_: Any) -> Any:
            return {}, {}

    state: Any = GroupState(Roster(), None, {})  # type: ignore[arg-type]
    submitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    announcer = Announcer(state, ControlConnections(), submitted.put)  # type: ignore[arg-type]
    announcer.mark_behind(["a"])
    shortage.begin()
    with pytest.raises(ThreadShortage):
        announcer.resync_due()
    (due,) = announcer.due()
    assert due < time.monotonic() + 1
    shortage.end()
    threading.Event().wait(max(0.0, due - time.monotonic()))
    announcer.resync_due()
    assert callable(submitted.get(timeout=PATIENCE_S))


def test_callbacks_hear_of_a_change_though_others_fail(caplog: pytest.LogCaptureFixture) -> None:
    def fail(change: Change) -> None:
        raise MemoryError

    bus, told = EventBus("g"), queue.SimpleQueue[Change]()
    bus.listen(fail)
    bus.listen(told.put)
    thread = bus.start()
    bus.put(Change("lost", ("a",)))
    bus.put(Change("back", ("a",)))
    assert [told.get(timeout=PATIENCE_S).kind for _ in range(2)] == ["lost", "back"]
    bus.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and "a callback of group 'g' raised" in caplog.text
