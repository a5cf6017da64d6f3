"""A group that outlives the driver that formed it, and the driver here, which comes later."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from raytorchrpc.calls import clients
from tests.polling import wait_until
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
from tests.ray.returning import Returning
from tests.ray.scripts import Script

FIRST = """
start(os.environ["CLUSTER"])
made = dict(num_cpus=0, lifetime="detached", namespace="tests", max_restarts=-1)
a, b = (ray.remote(Returning).options(name=name, **made).remote() for name in ("a", "b"))
group = rtr.init_group({"a": a, "b": b}, name="lasting", detached=True)
assert [member.name for member in group.members] == ["a", "b"]
assert ray.get(a.call.remote("b", "count"))[1] == 1
rtr.Queue("work", home="a").put("from the first driver")
forget = group.on_change(print)
assert "raytorchrpc-changes-lasting" in ours()
forget()
assert settle(lambda: "raytorchrpc-changes-lasting" not in ours())
print("fine")
"""


@pytest.fixture
def members(cluster: None) -> Iterator[tuple[Any, Any]]:
    """Of a group that a driver has formed which has ended."""
    script = Script(FIRST, ray.get_runtime_context().gcs_address)
    try:
        ended, out, err = script.run()
        assert ended == 0 and "fine" in out.splitlines(), err
        a, b = (ray.get_actor(name, namespace="tests") for name in ("a", "b"))
        yield a, b
        for actor in (a, b):
            ray.kill(actor)
    finally:
        script.end()


@pytest.fixture
def kill_late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Has ``ray.kill`` take effect a while after it has returned, as it does on a busy machine."""
    kill, killing = ray.kill, list[threading.Timer]()

    def kill_later(actor: Any) -> None:
        killing.append(threading.Timer(0.5, kill, [actor]))
        killing[-1].start()

    yield lambda: monkeypatch.setattr(ray, "kill", kill_later)
    for timer in killing:
        timer.join()


def count(a: Any) -> tuple[int, int]:
    """(pid, how often it ran there) of a call from a to b."""
    found: tuple[int, int] = ray.get(a.call.remote("b", "count"), timeout=60)
    return found


def use(work: rtr.Queue) -> str:
    """What a process outside the group is told first, and then does."""
    with pytest.raises(rtr.NotAMember) as refused:
        work.put(0)
    rtr.get_group("lasting")
    work.put(1)
    return str(refused.value)


def test_a_later_driver_finds_a_group_and_its_members_come_back_meanwhile(
    members: tuple[Any, Any], spawn: Spawn, caplog: pytest.LogCaptureFixture, kill_late: Callable[[], None]
) -> None:
    a, b = members
    with pytest.raises(rtr.BootstrapError, match=r"get_group\('lasting'\)"):
        rtr.init_group([spawn(Peer)], name="lasting", detached=True)

    with pytest.raises(rtr.NotAMember, match=r"in no group 'short' \(.*; detached groups of this cluster: lasting$"):
        rtr.get_group("short")
    group = rtr.get_group("lasting")
    work = rtr.Queue("work", home="a")
    assert work.get(30) == "from the first driver"
    said = ray.get([ray.remote(num_cpus=0)(use).remote(work), spawn(Peer).run.remote(use, work)], timeout=120)
    assert (
        "instead of a Ray task, or join one by its name" in said[0] and "init_group([...]) with this actor" in said[1]
    )
    assert all("of a detached group are for any process of the cluster after get_group(name)" in text for text in said)
    assert [work.get(30), work.get(30)] == [1, 1]
    changes: queue.SimpleQueue[rtr.Change] = queue.SimpleQueue()
    group.on_change(changes.put)
    work = rtr.Queue("work", home="b")
    work.put(0)
    before = group.members[1]
    assert count(a) == (before.pid, 2)
    os.kill(before.pid, signal.SIGKILL)
    assert wait_until(lambda: group.members[1].incarnation == 1, 60)
    group.wait_ready(30)
    lost, back = changes.get(timeout=30), changes.get(timeout=30)
    assert (lost.kind, lost.members, back) == ("lost", ("b",), rtr.Change("back", ("b",))) and lost.cause
    with pytest.raises(rtr.NotFound):
        work.get(30)  # it ended with its home
    rtr.Queue("work", home="b").put(1)
    assert count(a)[0] == group.members[1].pid != before.pid

    c = spawn(Returning)
    assert [member.name for member in group.add({"c": c})] == ["c"]
    assert count(c)[1] == 2
    assert {"a", "c"} <= {row.caller for row in group.stats()}
    assert group.routes().route("a", "b").message_lane == "socket"
    assert "socket" in group.explain("a", "c")
    with pytest.raises(rtr.ConfigurationError, match="a member 'c' already"):
        group.add({"c": a})
    group.remove(["c"])
    assert len(group) == 2
    assert [changes.get(timeout=30).kind for _ in range(2)] == ["added", "removed"]

    kill_late()
    rtr.get_group("lasting").shutdown()
    assert ray.get([one.in_no_group.remote() for one in (a, b)]) == [True, True]
    with pytest.raises(rtr.NotAMember):
        rtr.get_group("lasting")
    with pytest.raises(rtr.BootstrapError, match="group 'lasting' has ended: it was shut down, or"):
        group.wait_ready(5)
    group.shutdown()
    with pytest.raises(rtr.BootstrapError, match="was shut down"):
        group.on_change(print)
    assert wait_until(lambda: not [one for one in threading.enumerate() if "lasting" in one.name], 30)
    assert not [record for record in caplog.records if "has ended" in record.getMessage()]  # nothing has failed
    with pytest.raises(rtr.NotAMember):
        rtr.Queue("work", home="b").get(30)
    with rtr.init_group({"a": a, "b": b}, name="lasting"):
        assert count(a)[1] == 3


def test_members_outlive_the_host_and_can_form_another_group(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = spawn(Returning), spawn(Returning)
    group = rtr.init_group({"a": a, "b": b}, name="lasting", detached=True)
    before, pid = count(a), rtr.rpc_sync("a").count()[0]
    (host,) = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["name"] == "lasting"]
    ray.kill(ray.get_actor(**host))
    assert wait_until(lambda: _has_ended(group), 60)  # ray.kill returns before
    assert count(a) == (before[0], before[1] + 1)
    monkeypatch.setattr(clients, "_UNSUPERVISED_S", -1.0)
    assert rtr.rpc_sync("a").count()[0] == pid, "a client, which cannot join again, goes on too"
    monkeypatch.undo()
    with pytest.raises(rtr.BootstrapError, match=r"group 'lasting' has ended: .*; init_group can form another group"):
        group.stats()
    with pytest.raises(rtr.NotAMember, match="in no group 'lasting'"):
        rtr.get_group("lasting")
    with rtr.init_group({"a": a, "b": b}, name="lasting", detached=True) as formed:
        group.shutdown()  # of the former one
        assert count(a)[1] == before[1] + 2 and len(rtr.get_group("lasting")) == len(formed) == 2
        ray.kill(ray.get_actor(**host))  # as another driver does that ends the group
        assert wait_until(lambda: _has_ended(formed), 60)
        with pytest.raises(rtr.BootstrapError, match="has ended"):
            formed.stats()
        with pytest.raises(rtr.NotAMember, match="in no group 'lasting'"):
            rtr.get_group("lasting")


def _has_ended(group: rtr.Group) -> bool:
    try:
        group.stats()
    except rtr.BootstrapError:
        return True
    return False


def test_the_driver_cannot_be_a_member_of_what_outlives_it(spawn: Spawn) -> None:
    with pytest.raises(rtr.ConfigurationError, match="so the driver cannot be a member"):
        rtr.init_group([spawn(Peer)], detached=True, include_driver=True)
