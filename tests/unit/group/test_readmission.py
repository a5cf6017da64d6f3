"""Which restarted members the supervisor readmits together, and without which when that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.errors import BootstrapError
from raytorchrpc.group.roster import GroupState, Phase
from raytorchrpc.group.supervisor import Supervisor


@pytest.mark.parametrize(("failed", "still_there"), [(("a",), ["b"]), ((), []), (("a", "driver"), ["b"])])
def test_members_that_could_return_do_not_wait_for_those_that_could_not(
    failed: tuple[str, ...], still_there: list[str]
) -> None:
    records = {name: SimpleNamespace(handle=name) for name in "ab"}
    roster: Any = SimpleNamespace(name="g", records=records)
    state = GroupState(roster, None, {})  # type: ignore[arg-type]
    for name in "ab":
        state.lose(name, "its process ended")
        state.lost[name].phase = Phase.RESTARTED

    def admit(*_: Any) -> None:
        raise BootstrapError("no answer", members=failed)

    restarts = SimpleNamespace(call_all=None)
    supervisor: Any = SimpleNamespace(_state=state, roster=roster, _restarts=restarts, _admit=admit)
    Supervisor._readmit(supervisor, ["a", "b"])
    assert [name for name, lost in state.lost.items() if lost.phase is Phase.RESTARTED] == still_there
