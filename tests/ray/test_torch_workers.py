"""torch's own API between members: worker ids and ranks, the driver's ``__main__``, and init_rpc.

Drivers of their own, because ids depend on which actors a driver has put into groups before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.ray.scripts import Script

ROOT = Path(__file__).parents[2]

START = """
import os
import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

start(os.environ["CLUSTER"])

def do(actor, function, *args):
    return ray.get(actor.run.remote(function, *args), timeout=60)

def ids(group):
    return [member.worker_id for member in group.members]

def ids_there():
    context = dist_autograd._new_context()._context_id()
    dist_autograd._release_context(context)
    return rpc.get_worker_info().id, context >> 48

def pids(*ranks):
    return [rpc.rpc_sync(rank, os.getpid) for rank in ranks]

def pid_of(group, rank):
    return group.members[rank].pid

def value(target):
    return rtr.remote(target).double(4).to_here()
"""

IDS = """
a, b, c = actors(3, max_restarts=1)
group = rtr.init_group([a, b, c])
assert ids(group) == [0, 1, 2]
assert [do(each, ids_there) for each in (a, b, c)] == [(0, 0), (1, 1), (2, 2)]
assert do(c, pids, 0, 1, 2) == [member.pid for member in group.members]

d, e, f, g, h, i, j, late = actors(8)
group.add([d])
assert ids(group) == [0, 1, 2, 3] and do(a, pids, 3) == [pid_of(group, 3)]

# A process that is restarted has a new id: torch keeps the connections of the former one.
before = pid_of(group, 1)
ray.kill(b, no_restart=False)
assert settle(lambda: pid_of(group, 1) != before, 30)
group.wait_ready()
assert ids(group) == [0, 4, 2, 3]
assert do(a, pids, 1, 2) == [pid_of(group, 1), pid_of(group, 2)], "a rank is a rank"
assert do(b, pids, 0, 2) == [pid_of(group, 0), pid_of(group, 2)]
assert do(a, value, 1) == 8 and do(b, value, 0) == 8
group.shutdown()

# Another group of some of them, in another order, and with a new one: they keep their ids.
group = rtr.init_group([c, a, e])
assert ids(group) == [2, 0, 5]
assert do(e, pids, 1) == [pid_of(group, 1)]
def doubtful(number):
    try:
        rpc.rpc_sync(number, os.getpid)
    except rtr.ConfigurationError as error:
        return str(error)
assert "0 is the rank of 'peer_0' and the worker id of 'peer_1'" in do(e, doubtful, 0)
assert [do(x, value, y) for x in (c, a, e) for y in range(3)] == [8] * 9

# A group of others meanwhile, and then one of all: no id is there twice, so everything works as before.
@ray.remote
class Former:
    def form(self, actors):
        self.group = rtr.init_group(actors, name="other", include_driver=True)
        return self.group

    def end(self):
        self.group.shutdown()

former = Former.remote()
other = ray.get(former.form.remote([f, g]))
assert ids(other) == [6, 7, 8]
assert do(f, pids, 0, 1) == [pid_of(other, 0), pid_of(other, 1)]
group.add([late])
assert ids(group) == [2, 0, 5, 9]
group.shutdown(); ray.get(former.end.remote())
with rtr.init_group([a, f, c, g, late]) as group:
    assert ids(group) == [0, 6, 2, 7, 9]
    assert [do(x, value, y) for x in (a, f, c, g, late) for y in range(5)] == [8] * 25

# Two groups that do not know of each other, as of two jobs, and then one of both.
from raytorchrpc.group import worker_ids
worker_ids.highest_elsewhere = lambda handles: -1
at_once = rtr.GroupConfig(torchrpc="at once")
with rtr.init_group([h], name="h"), rtr.init_group([i], name="i", config=at_once) as group:
    assert ids(group) == [0]
def refused(target):
    found = []
    try:
        rtr.remote(target).double(4)
    except rtr.LaneUnavailable as error:
        found.append(str(error))
    with dist_autograd.context():
        try:
            rtr.rpc_sync(target).double(torch.ones(2, requires_grad=True))
        except rtr.LaneUnavailable as error:
            found.append(str(error))
    return found
with rtr.init_group([h, i, j], config=rtr.GroupConfig(lanes=("torchrpc",))) as group:
    assert ids(group) == [0, 1, 2]
    assert do(h, lambda: rtr.rpc_sync(1).double(2)) == do(i, lambda: rtr.rpc_sync(0).double(2)) == 4
    assert do(j, pids, 0, 1) == [pid_of(group, 0), pid_of(group, 1)]
    assert do(j, value, 0) == do(h, value, 2) == 8
    texts = do(i, refused, 0)
    assert len(texts) == 2 and "worker id" in texts[0] and all("restart" in text for text in texts), texts

# An agent that has known a process never takes another for it, even where all ids were given.
worker_ids.highest_known = lambda highest, probes: 9
k, l = actors(2)
with rtr.init_group([h, k], config=rtr.GroupConfig(lanes=("torchrpc",))) as group:
    assert ids(group) == [0, 10] and do(h, pids, 1) == [pid_of(group, 1)]
with rtr.init_group([h, l], config=rtr.GroupConfig(lanes=("torchrpc",))) as group:
    assert ids(group) == [0, 10] and do(h, pids, 1) == [pid_of(group, 1)] != [do(k, os.getpid)]
print("fine")
"""

AGAIN = """
for _ in range(2):
    made = actors(2)
    with rtr.init_group(made) as group:
        assert ids(group) == [0, 1], "the actors of the first group have ended"
    for actor in made:
        ray.kill(actor)
    from raytorchrpc._compat.ray_internals import actor_id_of, actor_state
    assert settle(lambda: all(actor_state(actor_id_of(actor)).state == "DEAD" for actor in made))
with rtr.init_group(actors(1), include_driver=True) as group:
    assert ids(group) == [0, 1] and pids(0, 1) == [group.members[0].pid, os.getpid()]
print("fine")
"""

MAIN = """
class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def get(self):
        return self.x, self.y

    def add(self, other):
        assert type(other) is Point
        return Point(self.x + other.x, self.y + other.y)

def norm(point):
    assert type(point) is Point
    return (point.x ** 2 + point.y ** 2) ** 0.5

def through(rref, other):
    return rref.rpc_sync().add(other)

def fail():
    raise Unlucky("on purpose")

class Unlucky(Exception):
    pass

@rpc.functions.async_execution
def later(to, point):
    return rpc.rpc_async(to, norm, args=(point,)).then(lambda future: future.wait() + 1)

class Maker(Peer):
    @rtr.method
    def make(self):
        return Point(1, torch.ones(2))

def check(b, c):
    rref = rtr.remote("b").make()
    assert rref.to_here().x == 1 and type(rref.to_here()) is Point
    assert rref.rpc_sync().get()[0] == rref.rpc_async().get().wait()[0] == 1
    assert rpc.rpc_sync(b, norm, args=(Point(3, 4),)) == 5
    assert rpc.rpc_async(b, norm, kwargs={"point": Point(3, 4)}).wait() == 5
    assert rpc.rpc_sync(b, later, args=(c, Point(3, 4))) == 6
    there = rpc.remote(b, Point, args=(5, 6))
    assert there.rpc_sync().get() == there.remote().get().to_here() == (5, 6)
    summed = rpc.rpc_sync(c, through, args=(there, Point(1, 1)))
    assert type(summed) is Point and summed.get() == (6, 7)
    assert isinstance(rpc.RRef(Point(7, 8)).rpc_sync().get(), tuple)
    try:
        rpc.rpc_sync(b, fail)
        raise AssertionError("nothing was raised")
    except RuntimeError as error:  # torch keeps the types of builtin exceptions only
        assert "Unlucky: on purpose" in str(error)
    return "fine"

def owned():
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])

def start_own():
    try:
        rpc.init_rpc("worker", rank=0, world_size=1)
    except RuntimeError as error:
        return str(error)

handles = dict(zip("abc", actors(3, cls=Maker)))
with rtr.init_group(handles, include_driver=True) as group:
    names = {member.name: member.rpc_name for member in group.members}
    assert do(handles["a"], check, names["b"], names["c"]) == "fine"
    assert check(names["b"], names["c"]) == "fine", "from the driver"
    assert rpc.rpc_sync(names["b"], through, args=(rpc.RRef(Point(1, 2)), Point(1, 2))).get() == (2, 4)
    gc.collect()
    assert settle(lambda: rpc.rpc_sync(names["b"], owned) == 0), "no reference was left behind"
    text = do(handles["b"], start_own)
    assert "Leave out init_rpc" in text and "member.rpc_name" in text, text
text = start_own()
assert "Leave out init_rpc" in text, text
print("fine")
"""


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(IDS, id="ids"),
        pytest.param(AGAIN, id="ids again", marks=pytest.mark.slow),
        pytest.param(MAIN, id="main"),
    ],
)
def test_a_driver(code: str) -> None:
    script = Script(START + code, ray.get_runtime_context().gcs_address)
    try:
        ended, out, err = script.run()
        assert ended == 0 and "fine" in out.splitlines(), err
    finally:
        script.end()
