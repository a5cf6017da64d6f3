"""A group that outlives the driver that formed it, in one Ray that two drivers use one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
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

SECOND = """
start(os.environ["CLUSTER"])
a, b = (ray.get_actor(name, namespace="tests") for name in ("a", "b"))
try:
    rtr.init_group({"a": a, "b": b})
    raise AssertionError("the members of a living detached group were taken")
except rtr.BootstrapError as error:
    assert "already in group 'lasting'" in str(error), error
try:
    rtr.init_group(actors(1), name="lasting", detached=True)
    raise AssertionError("a second group of that name was formed")
except rtr.BootstrapError as error:
    assert "get_group('lasting')" in str(error), error

assert threading.active_count() and not ours()
group = rtr.get_group("lasting")
assert rtr.Queue("work", home="a").get(30) == "from the first driver"
changes = queue.SimpleQueue()
group.on_change(changes.put)
work = rtr.Queue("work", home="b")
work.put(0)
before = group.members[1]
assert ray.get(a.call.remote("b", "count")) == (before.pid, 2)
os.kill(before.pid, signal.SIGKILL)
assert settle(lambda: group.members[1].incarnation == 1, 60)
group.wait_ready(30)
lost, back = changes.get(timeout=30), changes.get(timeout=30)
assert (lost.kind, lost.members, back) == ("lost", ("b",), rtr.Change("back", ("b",))) and lost.cause
try:
    work.get(1)
    raise AssertionError("the queue ended with its home")
except rtr.NotFound:
    rtr.Queue("work", home="b").put(1)
assert ray.get(a.call.remote("b", "count"))[0] == group.members[1].pid != before.pid

(c,) = actors(1, cls=Returning)
assert [member.name for member in group.add({"c": c})] == ["c"]
assert ray.get(c.call.remote("b", "count"))[1] == 2
assert {"a", "c"} <= {row.caller for row in group.stats()}
assert group.routes().route("a", "b").message_lane == "socket"
assert "socket" in group.explain("a", "c")
try:
    group.add({"c": a})
    raise AssertionError("a name was given twice")
except rtr.ConfigurationError as error:
    assert "a member 'c' already" in str(error)
group.remove(["c"])
assert len(group) == 2
assert [changes.get(timeout=30).kind for _ in range(2)] == ["added", "removed"]
rtr.get_group("lasting").shutdown()
assert ray.get([one.in_no_group.remote() for one in (a, b)]) == [True, True]
try:
    rtr.get_group("lasting")
    raise AssertionError("the group was shut down")
except rtr.NotAMember:
    pass
group.shutdown()
assert settle(lambda: not ours()), ours()
try:
    rtr.Queue("work", home="b").get(1)
    raise AssertionError("the group was shut down")
except rtr.NotAMember:
    pass
with rtr.init_group({"a": a, "b": b}, name="lasting"):
    assert ray.get(a.call.remote("b", "count"))[1] == 3
for one in (a, b):
    ray.kill(one)
print("fine")
"""


@pytest.fixture
def address(cluster: None) -> Iterator[str]:
    yield ray.get_runtime_context().gcs_address
    for name in ("a", "b"):
        try:
            ray.kill(ray.get_actor(name, namespace="tests"))
        except ValueError:
            continue


def test_a_later_driver_finds_a_group_and_its_members_come_back_meanwhile(address: str) -> None:
    for code in (FIRST, SECOND):
        script = Script(code, address)
        try:
            ended, out, err = script.run()
            assert ended == 0 and "fine" in out.splitlines(), err
        finally:
            script.end()


def test_the_driver_cannot_be_a_member_of_what_outlives_it(spawn: Spawn) -> None:
    with pytest.raises(rtr.ConfigurationError, match="so the driver cannot be a member"):
        rtr.init_group([spawn(Peer)], detached=True, include_driver=True)


@pytest.mark.slow
def test_a_detached_group_that_cannot_form_leaves_nothing(spawn: Spawn) -> None:
    gone: Any = spawn(Peer)
    ray.kill(gone)
    for _ in range(2):
        with pytest.raises(rtr.BootstrapError, match="'x'"):
            rtr.init_group({"x": gone}, name="never", detached=True, timeout=20)
    with pytest.raises(rtr.NotAMember):
        rtr.get_group("never")
