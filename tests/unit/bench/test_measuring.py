"""How the bench measures, without Ray: turns, the loops in an actor, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raytorchrpc.bench.actors import Calls, measure
from raytorchrpc.bench.cases import OUT_OF_TIME, Case, Failed, Figure, Size, Skipped
from raytorchrpc.bench.cases import measure as take_turns
from raytorchrpc.bench.patterns import Pattern, Turn

# --- in an actor ---------------------------------------------------------------------------------------------------


class Peer:
    """Records the order of calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.waiting, self.most = log, name, 0, 0

    def calls(self) -> Calls:
        return Calls(lambda: self.finish(self.send()), self.send, self.finish)

    def send(self) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        self.log.append(f"send {self.name}")

    def finish(self, _handle: Any) -> None:
        self.waiting -= 1
        self.log.append(f"finish {self.name}")


def taken(pattern: Pattern, peers: list[Peer], window_s: float = 0.01) -> list[float]:
    return measure([peer.calls() for peer in peers], Turn(pattern, "cpu", 0, window_s))


def test_a_round_calls_all_peers_in_the_order_of_its_kind() -> None:
    log: list[str] = []
    peers = [Peer(log, "a"), Peer(log, "b")]
    seconds = taken(Pattern(is_together=True), peers)
    assert log[:4] == ["send a", "finish a", "send b", "finish b"]
    assert len(seconds) >= 2 and all(each >= 0 for each in seconds)
    log.clear()
    taken(Pattern(is_together=True, asynchronous=True), peers)
    assert log[:4] == ["send a", "send b", "finish a", "finish b"]


def test_so_many_calls_are_in_flight_and_none_is_left() -> None:
    peer = Peer([], "a")
    assert taken(Pattern(in_flight=8, unit="calls/s"), [peer])
    assert (peer.most, peer.waiting) == (8, 0)


def test_pauses_and_the_lead_in_are_not_in_the_time() -> None:
    log: list[str] = []
    seconds = taken(Pattern(interval_s=0.01), [Peer(log, "a")], 0.05)
    assert 2 <= len(seconds) <= 6 and min(seconds) < 0.01
    assert log.count("send a") > len(seconds)


# --- turns -----------------------------------------------------------------------------------------------------------


class Turns:
    """A case whose turns take as long as the script says, by a clock that waits for nobody."""

    def __init__(self, script: Callable[[str, Any], Any]) -> None:
        self.script, self.now, self.log = script, 1000.0, list[str]()

    def turn(self, contestant: str, size: Size) -> float:
        self.log.append(f"{contestant} {size}")
        figure = self.script(contestant, size)
        if isinstance(figure, BaseException):
            raise figure
        self.now += figure
        return float(figure)

    def take(self, sizes: tuple[int, ...] = (1, 2), rounds: int = 3, seconds: float = 1e6, **more: Any) -> Any:
        """The figures by contestant and size."""
        case, self.figures = Case("case", ("a", "b"), sizes, self.turn, **more), list[Figure]()
        try:
            take_turns(case, rounds, self.figures, deadline=self.now + seconds, clock=lambda: self.now)
        finally:
            self.found = {(figure.contestant, figure.size): figure for figure in self.figures}
            assert all((figure.median is None) != (figure.reason is None) for figure in self.figures)
        return self.found


def test_contestants_alternate_and_the_first_turn_does_not_count() -> None:
    values = iter([50, 60, 3, 10, 1, 20, 2, 30])
    turns = Turns(lambda name, size: next(values))
    figures = turns.take((1,))
    assert turns.log == ["a 1", "b 1"] * 4
    a, b = figures["a", 1], figures["b", 1]
    assert (a.median, a.low, a.high, a.turns) == (2, 1, 3, 3) and (b.median, b.low, b.high) == (20, 10, 30)


def test_one_that_fails_keeps_its_figures_and_says_why_from_there() -> None:
    turns = Turns(lambda name, size: Failed("it broke") if (name, size) == ("a", 2) else 1)
    figures = turns.take((1, 2, 3))
    assert figures["a", 1].median == 1 and figures["b", 3].median == 1
    assert figures["a", 2].reason == figures["a", 3].reason == "it broke" and turns.log.count("a 2") == 1
    skipped = Turns(lambda name, size: Skipped("not here") if (name, size) == ("a", 2) else 1).take((1, 2, 3))
    assert skipped["a", 2].reason == "not here" and skipped["a", 3].median == 1


def test_a_slow_one_is_not_measured_at_larger_sizes() -> None:
    figures = Turns(lambda name, size: 9 if (name, size) == ("a", 2) else 1).take((1, 2, 3), slow_s=5.0)
    assert figures["a", 2].median == 9 and figures["b", 3].median == 1
    assert figures["a", 3].reason == "a turn with a smaller size took 9.0 s"


def test_no_turn_begins_after_the_deadline() -> None:
    turns = Turns(lambda name, size: 1)
    figures = turns.take((1, 2), seconds=10)
    assert turns.now == 1010 and figures["a", 1].turns == 3
    assert figures["a", 2].median is None and figures["a", 2].reason == OUT_OF_TIME


def test_ctrl_c_leaves_the_figures_so_far() -> None:
    turns = Turns(lambda name, size: KeyboardInterrupt() if turns.log.count("b 2") == 2 else 1)
    with pytest.raises(KeyboardInterrupt):
        turns.take((1, 2, 3))
    assert turns.found["b", 1].median == turns.found["a", 2].median == 1 and turns.found["b", 2].median is None
    assert ("a", 3) not in turns.found
