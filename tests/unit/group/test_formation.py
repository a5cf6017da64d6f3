"""Actors that Ray restarts while their group forms, or that do not answer."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raytorchrpc._compat.ray_internals import ActorState
from raytorchrpc.calls.rejoin import Owner
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError
from raytorchrpc.group import formation, join, ray_calls
from raytorchrpc.group.messages import GroupOf
from raytorchrpc.group.roster import Roster
from tests.unit import clusters
from tests.unit.group.test_roster import prepared_of, probes_of

NAMES = ("learner", "collector")


class Actors:
    """Two actors, and the pid of each one's process. ``during`` gets each step, and may restart one or fail."""

    def __init__(self) -> None:
        self.cluster = dict(zip(NAMES, clusters.one_host(2).values(), strict=True))
        self.pids = {"learner": 10, "collector": 20}
        self.during: Any = lambda step, number: {}
        self.rounds = 0
        self.generation: str | None = None
        """Of the group that the learner is in already."""

    def state(self, name: str) -> ActorState:
        return ActorState("ALIVE", self.pids[name], f"node-{self.cluster[name].boot_id}", "")

    def call_all(self, handles: Any, function: Any, arguments: Any, *_: Any, **__: Any) -> Any:
        self.rounds += function is join.probe
        failures = self.during(function, self.rounds)
        probes = {name: probe._replace(pid=self.pids[name]) for name, probe in probes_of(self.cluster).items()}
        results: dict[str, Any] = dict.fromkeys(arguments)
        if function is join.probe:
            taken = (GroupOf("g", self.generation or "", Owner("job", None)),)
            results = {**probes, "learner": probes["learner"]._replace(groups=taken)} if self.generation else probes
        if function is join.prepare:
            roster = Roster("g", GroupConfig(), Owner("job", None), self.cluster[NAMES[0]])
            results = prepared_of(roster.admit(dict.fromkeys(NAMES), probes))
        return {name: result for name, result in results.items() if name not in failures}, failures

    def form(self, of_this_group: bool = False, timeout_s: float = 20) -> Any:
        roster = Roster("g", GroupConfig(), Owner("job", None), self.cluster[NAMES[0]])
        if of_this_group:
            self.generation = roster.generation
        return formation.form_group(roster, {name: name for name in NAMES}, timeout_s, lambda roster, *_: roster)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    made = Actors()
    monkeypatch.setattr(formation.ray_internals, "actor_state", made.state)
    monkeypatch.setattr(formation.ray_internals, "actor_id_of", lambda handle: handle)
    monkeypatch.setattr(formation.ray_internals, "dead_jobs", frozenset)
    monkeypatch.setattr(formation, "worker_ids", SimpleNamespace(highest_elsewhere=lambda _: 0, record=lambda _: None))
    monkeypatch.setattr(formation.ray_calls, "call_all", made.call_all)
    return made


def test_the_group_has_the_process_that_prepared_to_join(actors: Actors) -> None:
    def restart(step: Any, number: int) -> dict[str, Exception]:
        if step is join.prepare and number == 1:
            actors.pids["learner"] = 11
        return {}

    actors.during = restart
    assert actors.form().records["learner"].probe.pid == 11


@pytest.mark.parametrize("has_noticed", [True, False])
def test_an_actor_that_restarts_while_others_connect_to_it_is_waited_for(actors: Actors, has_noticed: bool) -> None:
    def restart(step: Any, number: int) -> dict[str, Exception]:
        if number > 1:
            return {}
        if step is join.give_up and not has_noticed:  # its peers notice the end of a process before Ray does
            return {"learner": ActorUnavailableError("it restarts", b"0" * 16)}
        if step is join.commit:
            actors.pids["learner"] = 11 if has_noticed else 10
            return {"collector": BootstrapError("'collector' cannot reach learner", members=("collector", "learner"))}
        return {}

    actors.during = restart
    assert actors.form().generation and actors.rounds == 2


def test_an_actor_that_the_others_cannot_reach_is_named(actors: Actors) -> None:
    def die(step: Any, number: int) -> dict[str, Exception]:
        if step is join.commit:
            return {"collector": BootstrapError("'collector' cannot reach learner", members=("collector", "learner"))}
        return {"learner": ActorDiedError()} if step is join.give_up else {}

    actors.during = die
    with pytest.raises(BootstrapError, match="'collector' cannot reach learner") as raised:
        actors.form()
    assert set(raised.value.members) == set(NAMES)
    assert actors.rounds == 1


def test_a_process_that_joined_when_the_attempt_was_given_up_joins_again(actors: Actors) -> None:
    roster = actors.form(of_this_group=True)
    assert roster.spec("learner", "attempt").replaces == (roster.generation,)


def test_a_member_that_has_not_left_a_group_that_this_process_has_ended_is_taken(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors.generation = "ended here"
    monkeypatch.setattr(ray_calls, "ended_here", ["ended here"])
    assert actors.form().spec("learner", "attempt").replaces == ("ended here",)


def test_a_member_of_another_group_is_refused(actors: Actors) -> None:
    actors.generation = "another"
    with pytest.raises(BootstrapError, match="already in group"):
        actors.form()


@pytest.mark.parametrize(("timeout_s", "most_s"), [(0.0, 1.0), (2.0, 3.0), (60.0, 5.0)])
def test_a_rollback_takes_a_second_longer_than_the_timeout_at_most(
    actors: Actors, monkeypatch: pytest.MonkeyPatch, timeout_s: float, most_s: float
) -> None:
    """Those that it has asked leave all the same, as soon as they can."""
    until = list[float]()

    def call_all(handles: Any, function: Any, arguments: Any, deadline: float, **options: Any) -> Any:
        if function is join.give_up:
            until.append(deadline)
        return actors.call_all(handles, function, arguments)

    monkeypatch.setattr(formation.ray_calls, "call_all", call_all)
    monkeypatch.setattr(formation.time, "monotonic", lambda: 100.0)
    actors.during = lambda step, _: {"learner": BootstrapError("it is busy")} if step is join.commit else {}
    with pytest.raises(BootstrapError, match="it is busy"):
        actors.form(timeout_s=timeout_s)
    assert until == [100.0 + most_s]


# --- members that do not answer --------------------------------------------------------------------------------------


class Answer:
    """Takes the place of Ray's reference of a result."""

    def __init__(self, comes: bool) -> None:
        self._future: Future[None] = Future()
        if comes:
            self._future.set_result(None)

    def future(self) -> Future[None]:
        return self._future


@pytest.mark.parametrize("method", ["train", "__ray_call__"])
def test_one_that_never_answers_among_500_is_named_in_time(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    names = [f"m_{number}" for number in range(500)]
    monkeypatch.setattr(ray_calls._loading, "loaded_modules", lambda actor_ids: {})
    alive = SimpleNamespace(
        call_actor=lambda handle, *_: Answer(comes=handle != "m_317"),
        actor_id_of=lambda handle: handle,
        running_methods=lambda: {"m_317": method},
        actor_state=lambda actor_id: ActorState("ALIVE", 1, "node", ""),
    )
    monkeypatch.setattr(ray_calls, "ray_internals", alive)
    monkeypatch.setattr(formation, "ray_internals", alive)
    roster = Roster("g", GroupConfig(), Owner("job", None), clusters.member(0))
    began = time.monotonic()
    with pytest.raises(
        BootstrapError, match=rf"1 of 500 could not be probed: 'm_317': no answer .*busy in {method}"
    ) as e:
        formation.form_group(roster, {name: name for name in names}, 0.3, lambda *_: None)
    assert e.value.members == ("m_317",)
    assert time.monotonic() - began < 60, "not 0.3 s for each"


@pytest.mark.parametrize("progresses", [True, False])
@pytest.mark.parametrize("state", ["ALIVE", "PENDING_CREATION"])
def test_the_time_runs_anew_while_a_process_makes_progress(
    monkeypatch: pytest.MonkeyPatch, state: str, progresses: bool
) -> None:
    """It loads modules after this package was loaded, or uses the processor before."""
    now, modules = 1000.0, itertools.count(100, 7 if progresses else 0)
    monkeypatch.setattr(ray_calls.ray_internals, "actor_id_of", lambda handle: handle)
    monkeypatch.setattr(ray_calls.ray_internals, "actor_state", lambda handle: ActorState(state, 1, "node", ""))
    monkeypatch.setattr(ray_calls.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(ray_calls.this_process, "processor_s", lambda pid: now * (0.1 if progresses else 0.01))
    loaded = {"a": next(modules)} if state == "ALIVE" else {}
    monkeypatch.setattr(ray_calls._loading, "loaded_modules", lambda ids: loaded and {"a": next(modules)})
    monkeypatch.setattr(ray_calls, "time", SimpleNamespace(monotonic=lambda: now))
    patience = ray_calls.Patience("g", 0.1)
    while (until := patience.extend({"a": "a"}, 2)) > now:
        now = until
    took = now - 1000.0
    assert took == pytest.approx(0.5 if progresses else 0.1), "five times the timeout after its begin, or at its end"


def test_a_driver_that_is_slow_itself_is_named_as_others_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_calls.ray_internals, "running_methods", dict)
    monkeypatch.setattr(ray_calls, "_FIRST_NOTICE_S", 0.0)
    patience = ray_calls.Patience("g", 60.0)
    assert patience.extend({"driver": None}, 2) > time.monotonic()
    assert "waits for driver: still starting, in this process" in caplog.text
