"""Members come and go: added, removed, killed, restarted; the others go on."""

from __future__ import annotations

import os
import queue
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.errors import ConfigurationError, NotAMember, PeerLost
from raytorchrpc.group.formation import Formation
from tests import insides
from tests.polling import suspend, wait_until
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.only_decorated import OnlyDecorated
from tests.ray.returning import Returning, StartsWhenTold

EventBus = queue.Queue[Any]


def listened(group: rtr.Group) -> EventBus:
    news: EventBus = queue.Queue()
    group.on_change(news.put)
    return news


def await_change(news: EventBus, kind: str) -> None:
    """Until somebody is "back", or "dead": before that it may only be known to be lost.

    A member that is slow may learn of it later than this process; ``Group.wait_ready`` waits for that.
    """
    while news.get(timeout=60).kind != kind:
        pass


def ask(handle: Any, target: Any, method: str, *args: Any, **options: Any) -> Any:
    return ray.get(handle.call.remote(target, method, args, options), timeout=60)


def kill(handle: Any) -> int:
    pid: int = ray.get(handle.pid.remote())
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_restarted_actor_is_back_by_itself(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    a, b, c = (spawn(Returning, max_restarts=-1) for _ in range(3))
    with rtr.init_group({"a": a, "b": b, "c": c}) as group:
        before = group.members[1]
        news = listened(group)
        assert ask(a, "b", "count") == (before.pid, 1)
        assert ask(b, a, "count")[1] == 1
        kill(b)
        lost = news.get(timeout=60)
        assert (lost.kind, lost.members) == ("lost", ("b",))
        back = news.get(timeout=60)
        assert (back.kind, back.members) == ("back", ("b",))
        assert re.search("lost b: .*'default': b is back", caplog.text, re.DOTALL)
        group.wait_ready(60)
        after = group.members[1]
        assert (after.name, after.rank, after.incarnation) == ("b", 1, 1)
        assert after.pid != before.pid and after.worker_id != before.worker_id
        for caller in (a, c, b):
            assert ask(caller, "b", "count")[0] == after.pid, "by name"
            assert ask(caller, b, "count")[0] == after.pid, "by the old handle"
            assert ask(caller, 1, "count")[0] == after.pid, "by rank"
        large = torch.arange(3_000_000)
        assert torch.equal(ask(a, "b", "double", large), large * 2)
        assert torch.equal(ask(b, "c", "double", large), large * 2)
        assert ray.get([one.view.remote() for one in (a, b, c)]) == [(("a", 0, 0), ("b", 1, 1), ("c", 2, 0))] * 3


@pytest.mark.slow
def test_importing_the_package_lets_the_group_reach_a_restarted_actor(spawn: Spawn, tmp_path: Path) -> None:
    """Ray cannot: its only thread runs the interrupted method again, which waits until the actor has rejoined."""
    cold = {"env_vars": {"COLD": "1"}}  # processes that import the package themselves; see warm_workers
    a, b = (spawn(OnlyDecorated, max_restarts=-1, max_task_retries=-1, runtime_env=cold) for _ in range(2))
    with rtr.init_group({"a": a, "b": b}, include_driver=True) as group:
        before = group.members[0].pid
        assert ray.get(a.die_once.remote(tmp_path / "mark", "b"), timeout=120) == group.members[1].pid
        group.wait_ready(60)
        assert rtr.rpc_sync("a", timeout=60).pid() != before


def test_a_call_under_way_fails_and_a_later_one_names_the_cause(spawn: Spawn, tmp_path: Path) -> None:
    latch = Latch.make(tmp_path / "latch")
    a, b = spawn(Returning), spawn(Returning)
    with rtr.init_group({"a": a, "b": b}) as group:
        news = listened(group)
        call = a.call.remote("b", "hold", (latch,))
        held = latch.await_arrival()
        kill(b)
        with pytest.raises(PeerLost, match="'b'") as lost:
            ray.get(call, timeout=60)
        assert lost.value.may_have_run
        await_change(news, "dead")
        group.wait_ready(60)
        with pytest.raises(PeerLost, match="its actor died") as refused:
            ask(a, "b", "count")
        assert not refused.value.may_have_run
        assert [member.name for member in group.members] == ["a"]
        latch.release(held)


def test_a_call_that_may_be_repeated_waits_for_the_return(spawn: Spawn, tmp_path: Path) -> None:
    a, b = spawn(Returning, max_restarts=-1), spawn(Returning, max_restarts=-1)
    with rtr.init_group({"a": a, "b": b}) as group:
        news = listened(group)
        before = group.members[1].pid
        assert ask(a, "b", "die_once", str(tmp_path / "first")) != before
        with pytest.raises(PeerLost):
            ask(a, "b", "die_once", str(tmp_path / "second"), retry=0)
        # The caller may learn of a loss before the supervisor does, so wait_ready could still see no loss.
        for _ in range(2):
            await_change(news, "back")
        group.wait_ready(60)
        assert ask(a, "b", "count")[1] == 1, "a call without retry= is not repeated"


@pytest.mark.slow
def test_who_comes_back_need_not_wait_for_another_that_is_away(spawn: Spawn, tmp_path: Path) -> None:
    """Its neighbours are those whom it asks whether they can be reached, and one of them is still gone."""
    latch = Latch.make(tmp_path / "latch")
    a, b = spawn(Returning), spawn(Returning, max_restarts=-1)
    c = spawn(StartsWhenTold, latch, str(tmp_path / "marker"), max_restarts=-1)
    with rtr.init_group({"a": a, "b": b, "c": c}) as group:
        news = listened(group)
        pids = ray.get([one.pid.remote() for one in (b, c)])
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await_change(news, "back")
        held = latch.await_arrival()
        assert ask(a, "b", "count", retry=3)[1] == 1, "a may learn of the return later than this process"
        assert ask(b, "a", "count")[1] == 1
        with pytest.raises(PeerLost, match="'c'"):
            ask(b, "c", "count")
        assert group.stats(timeout=2).missing == ("c",)
        latch.release(held)
        group.wait_ready(20)
        for caller, target in ((a, "c"), (b, "c"), (c, "b")):
            assert ask(caller, target, "count")


def test_who_stood_still_while_others_died_learns_that_they_are_dead(spawn: Spawn) -> None:
    """It is told of all at once, when the group has gone on without them."""
    a, b, c, d = (spawn(Returning) for _ in range(4))
    with rtr.init_group({"a": a, "b": b, "c": c, "d": d}) as group:
        news = listened(group)
        pid = ray.get(a.pid.remote())
        suspend(pid)
        try:
            for dying in (b, c):
                kill(dying)
                await_change(news, "dead")
        finally:
            os.kill(pid, signal.SIGCONT)
        group.wait_ready(60)
        assert [name for name, *_ in ray.get(a.view.remote())] == ["a", "d"]
        for name in ("b", "c"):
            with pytest.raises(PeerLost, match=f"'{name}'.*died"):
                ask(a, name, "count")
        assert ask(a, "d", "count")[1] == 1
        group.add({"b": spawn(Returning)})
        assert ask(a, "b", "count")[1] == 1


def test_members_are_added_while_calls_go_on(spawn: Spawn, tmp_path: Path) -> None:
    latch = Latch.make(tmp_path / "latch")
    a, b, c, d = (spawn(Returning) for _ in range(4))
    with rtr.init_group({"a": a, "b": b}) as group:
        call = a.call.remote("b", "hold", (latch,))
        held = latch.await_arrival()
        assert [member.name for member in group.add({"c": c})] == ["c"]
        (added,) = group.add([d])
        assert (added.name, added.rank) == ("returning_3", 3)
        large = torch.arange(2_000_000)
        for caller, target in ((b, "c"), (c, "b"), (c, d), (d, "a")):
            assert torch.equal(ask(caller, target, "double", large), large * 2)
        latch.release(held)
        assert ray.get(call, timeout=60) == "released"
        assert len(group) == 4
        with pytest.raises(ConfigurationError, match="a member 'c' already"):
            group.add({"c": d})
        with pytest.raises(ConfigurationError, match="as 'c'"):
            group.add({"e": c})
    with pytest.raises(NotAMember):
        ask(c, "a", "count")


def test_an_actor_that_ray_restarts_while_it_is_added(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = spawn(Returning), spawn(Returning), spawn(Returning, max_restarts=-1)
    prepare, killed = Formation.prepare, list[int]()

    def kill_first(self: Formation) -> dict[str, Any]:
        if not killed:
            killed.append(self.roster.records["c"].probe.pid)
            os.kill(killed[0], signal.SIGKILL)
            assert wait_until(lambda: insides.has_ended(killed[0]), 60)
        return prepare(self)

    with rtr.init_group({"a": a, "b": b}) as group:
        monkeypatch.setattr(Formation, "prepare", kill_first)
        (added,) = group.add({"c": c})
        assert added.pid != killed[0]
        assert ask(b, "c", "count")[1] == 1 and ask(c, "a", "count")[1] == 1


def test_the_connections_by_which_members_learn_of_changes_last(peers: list[Any]) -> None:
    """The driver's, too: on a busy machine a new one takes longer than the supervisor waits for one."""
    with rtr.init_group(peers[:1], include_driver=True) as group:
        assert wait_until(lambda: insides.watches_everybody(group), 60)
        assert not insides.closes_idle_connections(group)


def test_members_are_removed_while_calls_go_on(spawn: Spawn, tmp_path: Path) -> None:
    latch = Latch.make(tmp_path / "latch")
    a, b, c = (spawn(Returning) for _ in range(3))
    with rtr.init_group({"a": a, "b": b, "c": c}) as group:
        news = listened(group)
        call = a.call.remote("b", "hold", (latch,))
        held = latch.await_arrival()
        ask(c, "b", "count")
        group.remove([c])
        assert news.get(timeout=60) == ("removed", ("c",), "")
        group.wait_ready(60)
        with pytest.raises(NotAMember, match="not in group"):
            ask(b, "c", "count")
        with pytest.raises(NotAMember, match="in no group"):
            ask(c, "b", "count")
        latch.release(held)
        assert ray.get(call, timeout=60) == "released"
        assert [member.name for member in group.members] == ["a", "b"]
        (again,) = group.add({"c": c})
        assert (again.rank, ask(b, "c", "count")[1]) == (3, 1)
