"""A change of a group that is asked for: made once, or never."""

from __future__ import annotations

import pytest

from raytorchrpc.errors import BootstrapError, RpcTimeout
from raytorchrpc.group.changes import RequestedChange


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
