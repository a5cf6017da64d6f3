"""torch's own API between members: worker ids of later groups, the driver's ``__main__``, and init_rpc.

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
from torch.distributed import rpc

start(os.environ["CLUSTER"])

def do(actor, function, *args):
    return ray.get(actor.run.remote(function, *args), timeout=60)

def ids(group):
    return [member.worker_id for member in group.members]

def pids(*ranks):
    return [rpc.rpc_sync(rank, os.getpid) for rank in ranks]

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


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("code", [AGAIN, MAIN], ids=["ids again", "main"])
def test_a_driver(code: str) -> None:
    script = Script(START + code, ray.get_runtime_context().gcs_address)
    try:
        ended, out, err = script.run()
        assert ended == 0 and "fine" in out.splitlines(), err
    finally:
        script.end()
