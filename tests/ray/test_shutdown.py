"""A group ends in any order, in any state, and leaves nothing."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests import insides
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.returning import Returning, StartsWhenTold
from tests.ray.scripts import Script

#: What a driver does with its group; each prints "fine" at the end of what it checks.
ENDS = {
    "it just ends": """
        start()
        group = rtr.init_group(actors(), include_driver=True)
        rtr.rpc_sync(0).double(1)
        print("fine")
    """,
    "Ray stops first": """
        start()
        group = rtr.init_group(actors(), include_driver=True)
        rtr.rpc_sync(0).double(1)
        ray.shutdown()
        began = time.monotonic()
        group.shutdown()
        assert time.monotonic() - began < 25
        try:
            rtr.current_member()
        except rtr.NotAMember:
            assert settle(lambda: not ours()), ours()
            print("fine")
    """,
    "at exit, before Ray": """
        start()
        group = rtr.init_group(actors(), include_driver=True)
        rtr.rpc_sync(0).double(1)
        atexit.register(group.shutdown)
        print("fine")
    """,
    "at exit, after Ray": """
        atexit.register(lambda: group.shutdown())
        start()
        atexit.register(ray.shutdown)
        group = rtr.init_group(actors(), include_driver=True)
        print("fine")
    """,
    "the group is dropped": """
        start()
        group = rtr.init_group(actors())
        del group
        gc.collect()
        assert len(rtr.get_group()) == 2
        rtr.get_group().shutdown()
        assert settle(lambda: not ours()), ours()
        print("fine")
    """,
    "the handles are dropped": """
        start()
        made = actors()
        pids = [ray.get(one.run.remote(os.getpid)) for one in made]
        group = rtr.init_group(made)
        del made
        gc.collect()
        for pid in pids:
            os.kill(pid, 0)
        group.shutdown()

        def gone():
            return not any(os.path.exists(f"/proc/{pid}") for pid in pids)

        assert settle(gone), "the ended group keeps its actors alive"
        assert len(group) == 2
        print("fine")
    """,
    "with dead members": """
        start()
        made = actors(3)
        group = rtr.init_group(made, include_driver=True)
        for one in made[:2]:
            os.kill(ray.get(one.run.remote(os.getpid)), signal.SIGKILL)
        began = time.monotonic()
        group.shutdown()
        assert time.monotonic() - began < 25
        assert settle(lambda: not ours()), ours()
        print("fine")
    """,
    "Ctrl-C at any moment": """
        import random

        class Interrupted(KeyboardInterrupt):
            pass

        def interrupt(*_):
            raise Interrupted

        def swallowed(what):  # Python drops what is raised in a finalizer: interrupt again
            if isinstance(what.exc_value, Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 0.001)
            else:
                sys.__unraisablehook__(what)

        sys.unraisablehook = swallowed
        start()
        made = actors(3, cls=Returning, max_restarts=-1)
        ray.get([one.pid.remote() for one in made])
        signal.signal(signal.SIGALRM, interrupt)
        numbers, met = random.Random(1), set()

        def interruptible(what, work, longest):
            signal.setitimer(signal.ITIMER_REAL, numbers.uniform(0.001, longest))
            try:
                work()
            except Interrupted:
                met.add(what)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

        def calls(group):
            while True:
                rtr.rpc_sync(0).count()

        for _ in range(8):
            interruptible("forming", lambda: rtr.init_group(made[:2], include_driver=True), 0.3)
            try:
                rtr.get_group().shutdown()
            except rtr.NotAMember:
                pass
            group = rtr.init_group(made[:2], include_driver=True)
            interruptible("calling", lambda: calls(group), 0.1)
            interruptible("adding", lambda: group.add([made[2]]), 0.1)
            interruptible("removing", lambda: group.remove([1]), 0.05)
            interruptible("ending", group.shutdown, 0.03)
            group.shutdown()
            with rtr.init_group(made, include_driver=True):
                for rank in range(3):
                    rtr.rpc_sync(rank, timeout=10).count()
        assert {"forming", "calling"} <= met, met
        assert settle(lambda: not ours()), ours()
        print("fine")
    """,
}


@pytest.mark.usefixtures("cluster")
def test_a_driver_that_leaves_its_cluster_first_leaves_nothing() -> None:
    assert_leaves_nothing(Script(ENDS["Ray stops first"], ray.get_runtime_context().gcs_address))


@pytest.mark.slow  # each starts a Ray of its own
@pytest.mark.parametrize("name", ENDS)
def test_a_driver_ends_and_leaves_nothing(name: str) -> None:
    assert_leaves_nothing(Script(ENDS[name]))


def assert_leaves_nothing(script: Script) -> None:
    before = set(os.listdir("/dev/shm"))
    try:
        code, out, err = script.run()
        assert code == 0 and "fine" in out.splitlines(), err
        assert "Traceback" not in err, err
        assert script.gone_within(40)
        assert not [left for left in set(os.listdir("/dev/shm")) - before if "raytorchrpc" in left]
    finally:
        script.end()


#: Prints each step of forming after which nothing was left.
INTERRUPTED = """
    from tests import insides

    signal.signal(signal.SIGINT, signal.default_int_handler)
    start(os.environ["CLUSTER"])
    made = actors(6)

    def left():
        keys = {key for prefix in ("groups/", "restarted/", "status/") for key in insides.stored_keys(prefix)}
        return keys, [insides.of_a_group(), *(insides.in_actor(one, insides.of_a_group) for one in made)]

    def is_clean():
        "Other keys may go, and threads and sockets that were still ending."
        keys, processes = left()
        return keys <= clean[0] and all(
            now[:2] == then[:2] and now[2] <= then[2] and now[3] <= then[3]
            for now, then in zip(processes, clean[1])
        )

    rtr.init_group(made).shutdown()
    assert settle(lambda: not ours()), ours()
    clean = left()
    for step in insides.FORMING:
        try:
            with insides.interrupted_at(step):
                rtr.init_group(made, detached="elsewhere" in step)
            print("not interrupted:", step)
        except KeyboardInterrupt:
            print(step if settle(is_clean, 60) else f"{step} leaves {left()}, and not {clean}")
    with rtr.init_group(made):
        assert ray.get(made[0].call.remote(5, "double", 4)) == 8
    print("fine")
"""


@pytest.mark.usefixtures("cluster")
def test_ctrl_c_at_each_step_of_forming_leaves_nothing() -> None:
    script = Script(INTERRUPTED, ray.get_runtime_context().gcs_address)
    try:
        code, out, err = script.run()
        assert code == 0, out + err
        assert [line for line in out.splitlines() if "(raylet)" not in line] == [*insides.FORMING, "fine"], err
        assert script.gone_within(40)
    finally:
        script.end()


@pytest.fixture
def descriptors() -> Iterator[None]:
    """This process has no more epoll sets and shared memory afterwards than before, and no more threads of ours: other
    tests may have left some that end meanwhile.
    """

    def kinds() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                kind = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if "eventfd" in kind or "timerfd" in kind or "memfd:raytorchrpc" in kind:
                found.append(kind)
        return sorted(found)

    def more() -> Counter[str]:
        return Counter([*kinds(), *ours()]) - before

    before = Counter([*kinds(), *ours()])
    yield
    until = time.monotonic() + 20
    while more() and time.monotonic() < until:
        time.sleep(0.02)
    assert not more()


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("raytorchrpc-")]


def test_nothing_of_a_group_is_left_in_the_driver(peers: list[Any], descriptors: None) -> None:
    a, b, _ = peers
    for _ in range(2):
        with rtr.init_group({"a": a, "b": b}) as group:
            assert ours()
            group.on_change(lambda change: None)
            assert ray.get(a.call.remote("b", "double", 4)) == 8


def test_a_group_that_ends_while_a_member_comes_back(spawn: Spawn, tmp_path: Path, descriptors: None) -> None:
    latch = Latch.make(tmp_path / "latch")
    a = spawn(Returning)
    b = spawn(StartsWhenTold, latch, str(tmp_path / "started"), max_restarts=1, max_task_retries=-1)
    group = rtr.init_group({"a": a, "b": b})
    os.kill(ray.get(b.pid.remote()), 9)
    held = latch.await_arrival()  # its new process has begun
    began = time.monotonic()
    group.shutdown(timeout=1)
    assert time.monotonic() - began < 25
    latch.release(held)
    assert ray.get(b.in_no_group.remote(), timeout=60)
    with rtr.init_group({"a": a, "b": b}):
        assert ray.get(a.call.remote("b", "count"), timeout=60)[1] == 1


def test_a_callback_ends_the_group(peers: list[Any], descriptors: None) -> None:
    a, b, _ = peers
    group = rtr.init_group({"a": a, "b": b})
    ended = threading.Event()

    def end(change: Any) -> None:
        group.shutdown()
        ended.set()

    group.on_change(end)
    group.remove([b])
    assert ended.wait(20)


def test_who_waits_for_a_change_is_told_that_the_group_ended(
    peers: list[Any], latch: Callable[[], Latch], descriptors: None
) -> None:
    a, b, busy = peers
    held = latch()
    work = busy.busy.remote(held)
    group = rtr.init_group({"a": a, "b": b})
    outcomes: list[BaseException] = []

    def add(name: str) -> None:
        try:
            group.add({name: busy}, timeout=1)
        except rtr.RayTorchRpcError as error:
            outcomes.append(error)

    adding = [threading.Thread(target=add, args=(name,)) for name in ("c", "d")]
    for thread in adding:
        thread.start()
    group.shutdown(timeout=1)
    for thread in adding:
        thread.join(20)
    assert [type(error) for error in outcomes] == [rtr.BootstrapError] * 2
    held.open()
    ray.get(work, timeout=60)
    with pytest.raises(rtr.NotAMember):
        ray.get(busy.run.remote(rtr.current_member), timeout=60)
