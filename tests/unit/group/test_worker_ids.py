"""Which torchrpc worker ids members get: ranks, unless some agent has known another process under that id."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc import Member
from raytorchrpc._compat.ray_internals import ActorState
from raytorchrpc.errors import BootstrapError
from raytorchrpc.group import worker_ids
from raytorchrpc.group.messages import Probe
from raytorchrpc.group.worker_ids import assign, highest_known
from raytorchrpc.lanes.torchrpc.agent import OWN_NUMBERS, AgentIdentity


def probe(worker_id: int | None = None, highest: int = -1, autograd_id: int | None = None) -> Probe:
    agent = None if worker_id is None else AgentIdentity("name", worker_id, max(worker_id, highest))
    return Probe(None, "node", 1, (), agent, autograd_id)  # type: ignore[arg-type]


def chosen(
    *probes: Probe, highest: int = -1, taken: set[int] | None = None, first: int = 0
) -> tuple[list[int], set[str]]:
    named = {str(rank): each for rank, each in enumerate(probes, first)}
    ids, renew = assign({name: int(name) for name in named}, named, taken or set(), highest_known(highest, named))
    return [ids[name] for name in named], renew


@pytest.mark.parametrize(
    ("probes", "others", "ids", "renew"),
    [
        ([probe(), probe(), probe()], {}, [0, 1, 2], set()),
        ([probe()], {"highest": 2, "taken": {0, 1, 2}, "first": 3}, [3], set()),
        ([probe()], {"highest": 3, "taken": {0, 1, 2, 3}, "first": 1}, [4], set()),  # rank 1 has been restarted
        ([probe()], {"highest": 4, "taken": {0, 2, 3, 4}, "first": 7}, [7], set()),  # ranks 4 to 6 have left
        # An agent keeps its id, and new ones get none that it has known.
        ([probe(), probe(0, highest=5), probe()], {}, [6, 0, 7], set()),
        ([probe(2, highest=2), probe(0, highest=2), probe(1, highest=2)], {}, [2, 0, 1], set()),
        ([probe(autograd_id=3), probe()], {}, [4, 5], set()),  # distributed autograd keeps an id for life
        # Of two agents with one id, one starts anew.
        ([probe(0, highest=1), probe(0, highest=4)], {}, [0, 5], {"1"}),
        ([probe(1)], {"highest": 3, "taken": {0, 1}, "first": 4}, [4], {"4"}),
    ],
)
def test_members_get_their_ranks_where_nobody_has_had_those_ids(
    probes: list[Probe], others: dict[str, Any], ids: list[int], renew: set[str]
) -> None:
    assert chosen(*probes, **others) == (ids, renew)


def test_when_all_ids_were_given_those_that_nobody_has_are_given_again() -> None:
    last = OWN_NUMBERS.start - 1
    ids, renew = chosen(probe(0, highest=last), probe(), probe(autograd_id=7))
    assert ids[0] == 0 and not renew
    assert len(set(ids)) == 3 and 7 not in ids and max(ids) <= last


def test_more_members_than_ids() -> None:
    with pytest.raises(BootstrapError, match="ids for 24576 processes"):
        chosen(*[probe()] * (OWN_NUMBERS.start + 1))


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The actors that have ended; handles are their ids."""
    ended: set[str] = set()
    states = [ActorState(state, 1, "node", "") for state in ("ALIVE", "DEAD")]
    stored = {"worker-ids/gone/00007/x": b"x"}
    internals = worker_ids.ray_internals

    def store(key: str, value: bytes | None) -> None:
        stored.pop(key, None)
        if value is not None:
            stored[key] = value

    monkeypatch.setattr(internals, "store", store)
    monkeypatch.setattr(internals, "stored", stored.get)
    monkeypatch.setattr(internals, "stored_keys", lambda prefix: [key for key in stored if key.startswith(prefix)])
    monkeypatch.setattr(internals, "actor_state", lambda actor: states[actor in ended])
    monkeypatch.setattr(internals, "actor_id_of", str)
    monkeypatch.setattr(internals, "dead_jobs", lambda: frozenset({"gone"}))
    job = uuid.uuid4().hex
    context = SimpleNamespace(get_job_id=lambda: job, get_actor_id=lambda: None)
    monkeypatch.setattr(worker_ids.ray, "get_runtime_context", lambda: context)
    yield ended
    assert "worker-ids/gone/00007/x" not in stored, "what an ended job has left"


def member(actor: str | None, worker_id: int) -> Member:
    return Member(0, "m", actor, "node", 1, "name", worker_id)


def test_ids_of_other_living_actors_are_left_to_them(dead: set[str]) -> None:
    assert worker_ids.highest_elsewhere([]) == -1
    worker_ids.record([member("a", 0)])
    worker_ids.record([member("b", 1), member("c", 2)])
    assert worker_ids.highest_elsewhere([]) == 2
    assert worker_ids.highest_elsewhere(["c"]) == 2, "b lives"
    assert worker_ids.highest_elsewhere(["b", "c"]) == 0, "both take part, and tell what they know"
    dead.update("bc")
    assert worker_ids.highest_elsewhere([]) == 0
    dead.add("a")
    assert worker_ids.highest_elsewhere([]) == -1
    assert worker_ids.ray_internals.stored_keys("worker-ids/") == []


def test_an_id_stays_taken_while_anyone_lives_who_was_in_a_group_with_it(dead: set[str]) -> None:
    worker_ids.record([member("a", 0), member("c", 5)])
    worker_ids.record([member("b", 1), member("c", 5)])
    dead.update("bc")
    assert worker_ids.highest_elsewhere([]) == 5, "a has known c, in the first group"


def test_a_restarted_actor_has_one_entry(dead: set[str]) -> None:
    for number in range(3):
        worker_ids.record([member("a", number)])
    assert worker_ids.highest_elsewhere([]) == 2
    assert len(worker_ids.ray_internals.stored_keys("worker-ids/")) == 1


def test_the_driver_lives_as_long_as_its_job(dead: set[str]) -> None:
    worker_ids.record([member("a", 0), member(None, 1)])
    dead.add("a")
    assert worker_ids.highest_elsewhere([]) == 1
    assert worker_ids.highest_elsewhere([None]) == -1


def test_groups_form_while_the_store_does_not_answer(
    dead: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert worker_ids.highest_elsewhere([]) == -1

    def fail(*args: Any) -> None:
        raise TimeoutError  # without a text

    with monkeypatch.context() as patch:
        patch.setattr(worker_ids.ray_internals, "stored_keys", fail)
        worker_ids.record([member("a", 0)])
        assert worker_ids.highest_elsewhere([]) == -1
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["TimeoutError"] * 2
