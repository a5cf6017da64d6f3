"""Process groups: collectives and DDP among members, and what becomes of them when members come and go."""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import raytorchrpc as rtr
from raytorchrpc.errors import BootstrapError, ConfigurationError, NotAMember, ProcessGroupLost
from raytorchrpc.group.rendezvous import MemberStore
from raytorchrpc.process import fork, guard, tcp
from tests import insides
from tests.polling import wait_until
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn

STEPS, BATCH, WIDTH = 6, 12, 5


def at_all(actors: Any, function: Any, *args: Any) -> list[Any]:
    return ray.get([actor.run.remote(function, *args) for actor in actors], timeout=120)


# --- what members run -----------------------------------------------------------------------------------------------


def own_rank() -> int:
    return rtr.process_group().rank()


def reduced(root: int) -> tuple[float, float, float]:
    """The sum of all ranks plus one, by the default group and by name; and what ``root`` broadcast."""
    group = rtr.process_group()
    one, two = (torch.full((1000,), float(group.rank() + 1)) for _ in range(2))
    dist.all_reduce(one)
    dist.all_reduce(two, group=group)
    sent = torch.full((3,), float(group.rank()))
    dist.broadcast(sent, src=root)
    return one.mean().item(), two.mean().item(), sent.mean().item()


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).double()


def losses(shards: int, rank: int, distributed: bool) -> list[float]:
    """Of some steps on fixed batches, of which this process sees its shard; averaged over all."""
    trained: Any = model()
    if distributed:
        trained = DistributedDataParallel(trained)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.double).chunk(shards)[rank]
        loss = (trained(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        trained.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter -= 0.1 * parameter.grad
        whole = loss.detach().clone()
        if distributed:
            dist.all_reduce(whole)
        found.append(whole.item() / shards)
    return found


def losses_of_ddp() -> list[float]:
    group = rtr.process_group()
    return losses(group.size(), group.rank(), True)


def how_a_collective_ends() -> tuple[str, float]:
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1 << 20))
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    return "", time.monotonic() - began


def why_none() -> str:
    """Empty if there is one."""
    with pytest.raises(ConfigurationError, match="timeout is a number of seconds"):
        rtr.process_group(timeout="soon")  # type: ignore[arg-type]
    try:
        rtr.process_group()
    except ProcessGroupLost as lost:
        return str(lost)
    return ""


def what_is_left() -> tuple[bool, list[str], list[str]]:
    variables = [name for name in os.environ if name.startswith(("GLOO_", "TORCH_NCCL_"))]
    threads = [thread.name for thread in threading.enumerate() if thread.name.endswith("-process-group")]
    return dist.is_initialized(), variables, threads


def begin_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def use_view() -> str:
    with pytest.raises(NotAMember) as refused:
        rtr.get_group().process_group("gloo")
    return str(refused.value)


def what_torch_builds_on_the_store() -> dict[str, Any]:
    """Functions of torch's that agree by the store, or make groups by it."""
    from torch.distributed.fsdp import fully_shard  # takes seconds

    group = rtr.process_group()
    rank, size = group.rank(), group.size()
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    sent = [f"from {rank}"]
    dist.broadcast_object_list(sent, src=1)
    rest = dist.new_group(list(range(1, size)))
    number = torch.ones(1)
    if rank:
        dist.all_reduce(number, group=rest)
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    trained: Any = fully_shard(model(), mesh=mesh)
    trained(torch.ones(2, WIDTH, dtype=torch.double)).mean().backward()
    store = _get_default_store()
    store.set(f"hello/{rank}", str(rank))
    store.wait([f"hello/{other}" for other in range(size)], timedelta(seconds=30))
    return {
        "objects": [item["rank"] for item in gathered],
        "broadcast": sent,
        "subgroup": number.item(),
        "sharded": len(list(trained.parameters())),
        "keys": [store.get(f"hello/{other}") for other in range(size)],
        "count": store.add("count", 0),
    }


def destroy() -> None:
    dist.destroy_process_group()


def listeners() -> set[tuple[str, int]]:
    """Where this process listens for TCP."""
    found = set()
    for fd in tcp.listening().values():
        sock = socket.socket(fileno=fd)
        found.add(sock.getsockname()[:2])
        sock.detach()
    return found


def connections(addresses: set[tuple[str, int]]) -> int:
    """How many of this process's connections have these at one end."""
    return sum(not addresses.isdisjoint(each) for each in guard.process_guard().own_connections())


def answers_strangers(address: tuple[str, int]) -> bool:
    """Whether one of torch's stores listens there: it answers the first message of its protocol with its number."""
    number = struct.pack("<I", 0x12345678)
    with suppress(TimeoutError, ConnectionResetError), socket.create_connection(address, timeout=0.4) as sock:
        sock.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + number)
        return sock.recv(4) == number
    return False


def has_accepted(sock: socket.socket) -> bool:
    """Whether a socket of this process is the other end of this one."""
    for _, its in fork.own_sockets():
        with suppress(OSError):
            if its.getpeername() == sock.getsockname():
                return True
    return False


def let_a_stranger_in_first() -> None:
    """From now on a stranger connects to gloo's listener here before a member can, and calls itself rank 0."""
    before = listeners()
    publish = MemberStore.set

    def publish_later(*args: Any) -> None:
        for address in listeners() - before:
            before.add(address)
            sock = socket.create_connection(address)
            sock.sendall(struct.pack("<q", 0))
            stranger.append(sock)
            assert wait_until(partial(has_accepted, sock), 20)  # gloo
        publish(*args)

    MemberStore.set = publish_later  # type: ignore[method-assign]
    stranger.append(publish)


stranger: list[Any] = []


def keep_strangers_out() -> None:
    publish, *socks = stranger
    stranger.clear()
    MemberStore.set = publish  # type: ignore[method-assign]
    for sock in socks:
        sock.close()


def set_while_calls_are_under_way(peer: str, latch: Latch) -> tuple[int, list[str]]:
    """Set a key while as much as is allowed is under way to the home, which is busy; and by which lanes it went."""
    under_way = rtr.rpc_async(peer).hold(latch)
    with dist.autograd.context():
        before = lanes()
        number = _get_default_store().add("count", 1)
        used = [lane for lane, calls in lanes().items() if calls > before.get(lane, 0)]
    assert not under_way.done()
    latch.open()
    assert under_way.result() == "released"
    return number, used


def lanes() -> dict[str, int]:
    """Calls by lane."""
    rows = insides.counted_calls()
    return {row.lane: sum(other.calls for other in rows if other.lane == row.lane) for row in rows}


def wait_for_a_key() -> tuple[str, str]:
    """How the wait ends: were it by its own time limit, it would be a DistStoreError."""
    store = _get_default_store()
    store.set(f"waiting/{rtr.process_group().rank()}", "")
    try:
        store.wait(["never"], timedelta(seconds=50))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def pid_when_these_wait(*ranks: int) -> int:
    _get_default_store().wait([f"waiting/{rank}" for rank in ranks], timedelta(seconds=50))
    return os.getpid()


# --- the tests ------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(peers: list[Any]) -> Iterator[rtr.Group]:
    """Of a, b and c. Nothing of a process group is left in them afterwards."""
    with rtr.init_group(dict(zip("abc", peers, strict=True))) as formed:
        yield formed
    assert at_all(peers, what_is_left) == [(False, [], [])] * 3


def test_collectives_among_all_members(group: rtr.Group, peers: list[Any]) -> None:
    assert "call Group.process_group()" in at_all(peers, why_none)[0]
    info = group.process_group("gloo")
    assert (info.backend, info.world_size, dict(info.ranks)) == ("gloo", 3, {"a": 0, "b": 1, "c": 2})
    assert at_all(peers, own_rank) == [0, 1, 2]
    assert at_all(peers, rtr.process_group_info) == [info] * 3
    assert at_all(peers, reduced, 2) == [(6.0, 6.0, 2.0)] * 3
    assert "raytorchrpc.process_group()" in at_all(peers, use_view)[0]
    again = group.process_group("gloo")
    assert again.number == 2
    assert at_all(peers, reduced, 0) == [(6.0, 6.0, 0.0)] * 3


def test_the_losses_of_a_data_parallel_model_are_those_of_one_process(peers: list[Any]) -> None:
    with rtr.init_group(peers[:2]) as group:
        group.process_group("gloo")
        first, second = at_all(peers[:2], losses_of_ddp)
    alone = losses(1, 0, False)
    assert alone[-1] < alone[0] / 2
    assert first == second == pytest.approx(alone, rel=1e-9)


def test_what_torch_builds_on_the_store(group: rtr.Group, peers: list[Any]) -> None:
    group.process_group("gloo")
    for rank, found in enumerate(at_all(peers, what_torch_builds_on_the_store)):
        assert found == {
            "objects": [0, 1, 2],
            "broadcast": ["from 1"],
            "subgroup": 2.0 if rank else 1.0,
            "sharded": 4,
            "keys": [b"0", b"1", b"2"],
            "count": 0,
        }
    at_all(peers, destroy)
    assert "it was destroyed here" in at_all(peers, why_none)[0]
    group.process_group("gloo")
    assert at_all(peers, reduced, 2) == [(6.0, 6.0, 2.0)] * 3


def test_nobody_outside_the_group_finds_a_store(group: rtr.Group, peers: list[Any]) -> None:
    before = at_all(peers, listeners)
    group.process_group("gloo")
    after = at_all(peers, listeners)
    opened = [now - then for now, then in zip(after, before, strict=True)]
    assert not [address for addresses in opened for address in addresses if answers_strangers(address)]
    # gloo's own, and the one by which it gets the connections that are members'.
    assert [len(addresses) for addresses in opened] == [2, 2, 2], "more listens than gloo in each member"
    assert at_all(peers, reduced, 0) == [(6.0, 6.0, 0.0)] * 3


def test_a_stranger_whom_gloo_takes_for_a_member_is_noticed(group: rtr.Group, peers: list[Any]) -> None:
    at_all(peers[1:2], let_a_stranger_in_first)
    try:
        with pytest.raises(BootstrapError, match=r"b: gloo.* accepted a connection from .* before any member"):
            group.process_group("gloo")
    finally:
        at_all(peers[1:2], keep_strangers_out)
    until = time.monotonic() + 60  # another member's attempt ends once gloo there sees the closed connections
    while (left := at_all(peers, what_is_left)) != [(False, [], [])] * 3:
        assert time.monotonic() < until, left
        time.sleep(0.05)
    group.process_group("gloo")
    assert at_all(peers, reduced, 1) == [(6.0, 6.0, 1.0)] * 3


def test_the_store_waits_for_no_turn_and_for_no_other_call(peers: list[Any], tmp_path: Path) -> None:
    latch = Latch.make(tmp_path / "latch")
    config = rtr.GroupConfig(max_calls_in_flight=1)
    with rtr.init_group(dict(zip("abc", peers, strict=True)), config=config) as group:
        group.process_group("gloo")
        assert ray.get(peers[1].run.remote(set_while_calls_are_under_way, "a", latch), timeout=60) == (1, ["socket"])


def test_a_store_that_is_lost_ends_the_waits_for_its_keys(spawn: Spawn) -> None:
    a, b, c = (spawn(Peer) for _ in range(3))
    with rtr.init_group({"a": a, "b": b, "c": c}) as group:
        group.process_group("gloo")
        under_way = [actor.run.remote(wait_for_a_key) for actor in (b, c)]
        os.kill(ray.get(a.run.remote(pid_when_these_wait, 1, 2), timeout=60), signal.SIGKILL)
        for kind, text in ray.get(under_way, timeout=60):
            assert kind == "DistNetworkError" and "lost member 'a'" in text, text
        group.process_group("gloo", members=["b", "c"])
        under_way = [b.run.remote(wait_for_a_key)]
        ray.get(c.run.remote(pid_when_these_wait, 0), timeout=60)
        group.process_group("gloo", members=["b", "c"])
        kind, text = ray.get(under_way[0], timeout=60)  # it waits, or was about to
        assert kind == "DistNetworkError" and "process group 3 " in text, text


def test_a_driver_takes_part(peers: list[Any]) -> None:
    with rtr.init_group({"a": peers[0], "b": peers[1]}, include_driver=True) as group:
        info = group.process_group("gloo")
        assert info.ranks["driver"] == 2
        others = [peer.run.remote(reduced, 1) for peer in peers[:2]]
        assert [reduced(1), *ray.get(others, timeout=60)] == [(6.0, 6.0, 1.0)] * 3
    assert what_is_left() == (False, [], [])


def test_some_members_make_one_without_the_others(peers: list[Any]) -> None:
    a, b, c = peers
    with rtr.init_group({"a": a, "b": b, "c": c}, include_driver=True) as group:
        info = group.process_group("gloo", members=["c", a])
        assert (info.number, dict(info.ranks)) == (1, {"a": 0, "c": 1})
        assert at_all((a, c), reduced, 0) == [(3.0, 3.0, 0.0)] * 2

        def await_reason(reason: str, *actors: Any) -> None:
            """The members that have one do not wait long for the others to learn of it."""
            assert wait_until(lambda: all(reason in said for said in (*at_all(actors, why_none), why_none())), 20)

        await_reason("process group 1 has other members: a, c", b)
        for wrong in ([], ["a", a], "a", a):
            with pytest.raises(ConfigurationError, match=r"process_group\(members=...\) takes"):
                group.process_group("gloo", members=wrong)
        with pytest.raises(NotAMember, match="'x' is not in group"):
            group.process_group("gloo", members=["x"])
        assert at_all((a, c), reduced, 1) == [(3.0, 3.0, 1.0)] * 2, "what was refused has changed something"

        assert group.process_group("gloo").world_size == 4  # all of them again
        assert dict(group.process_group("gloo", members=[1, 2]).ranks) == {"b": 0, "c": 1}
        await_reason("process group 3 has other members: b, c", a)
        assert dict(group.process_group("gloo", members=[a]).ranks) == {"a": 0}
        assert at_all((a, b, c), reduced, 0) == [(1.0, 1.0, 0.0), (3.0, 3.0, 0.0), (3.0, 3.0, 0.0)], "theirs goes on"
        group.remove([a])  # not one of them: theirs goes on
        assert at_all((b, c), reduced, 1) == [(3.0, 3.0, 1.0)] * 2
    assert what_is_left() == (False, [], [])


def test_a_member_that_is_killed_and_comes_back_and_one_that_leaves(spawn: Spawn) -> None:
    a, b, c = (spawn(Peer, max_restarts=-1) for _ in range(3))
    with rtr.init_group({"a": a, "b": b, "c": c}) as group:
        news: queue.Queue[Any] = queue.Queue()
        group.on_change(news.put)
        group.process_group("gloo")
        assert at_all((a, b, c), reduced, 0) == [(6.0, 6.0, 0.0)] * 3
        group.process_group("gloo", collective_timeout=4)
        under_way = [actor.run.remote(how_a_collective_ends) for actor in (a, c)]
        ray.wait(under_way, timeout=0.5)  # by then they most likely wait for b
        pid = ray.get(b.run.remote(os.getpid), timeout=60)
        os.kill(pid, signal.SIGKILL)
        for kind, seconds in ray.get(under_way, timeout=60):
            assert kind in ("RuntimeError", "ValueError") and seconds < 40  # the second if it began too late
        while news.get(timeout=60)[:2] != ("back", ("b",)):
            pass
        group.wait_ready(60)  # until a and c know it too
        for reason in at_all((a, c), why_none):
            assert "'b' was lost" in reason and "call Group.process_group() again" in reason
        assert "call Group.process_group()" in at_all([b], why_none)[0]
        group.process_group("gloo")
        assert at_all((a, b, c), reduced, 1) == [(6.0, 6.0, 1.0)] * 3

        group.remove(["a"])
        group.wait_ready(60)
        assert "'a' was lost (it was removed" in at_all((b, c), why_none)[0]
        assert at_all([a], what_is_left) == [(False, [], [])]
        group.add({"d": a})
        info = group.process_group("gloo")
        assert [member.rank for member in group.members] == [1, 2, 3]
        assert dict(info.ranks) == {"b": 0, "c": 1, "d": 2}
        assert at_all((b, c, a), own_rank) == [0, 1, 2]
        assert at_all((b, c, a), reduced, 2) == [(6.0, 6.0, 2.0)] * 3


def test_a_member_waits_for_the_next_one(peers: list[Any]) -> None:
    with rtr.init_group(peers[:2]) as group:
        waiting = peers[0].run.remote(waits)
        assert not ray.wait([waiting], timeout=0.2)[0]
        group.process_group("gloo")
        assert ray.get(waiting, timeout=60) == 0


def test_an_earlier_one_takes_no_part_in_collectives_of_the_next(peers: list[Any]) -> None:
    with rtr.init_group(peers[:2]) as group:
        group.process_group("gloo", collective_timeout=1)
        at_all(peers[:1], keep)
        group.process_group("gloo")
        waiting = peers[1].run.remote(reduced, 1)
        assert at_all(peers[:1], reduce_in_kept)[0] in ("RuntimeError", "ValueError")
        assert [*at_all(peers[:1], reduced, 1), ray.get(waiting, timeout=60)] == [(3.0, 3.0, 1.0)] * 2


KEPT: list[Any] = []


def keep() -> None:
    KEPT[:] = [rtr.process_group()]


def reduce_in_kept() -> str:
    try:
        dist.all_reduce(torch.ones(1), group=KEPT.pop())
    except Exception as error:
        return type(error).__name__
    return ""


def waits() -> int:
    return rtr.process_group(timeout=30).rank()


def test_bad_input_is_refused_at_once_and_leaves_nothing(peers: list[Any], spawn: Spawn) -> None:
    with rtr.init_group({"a": peers[0], "b": peers[1]}) as group:
        for backend in ("mpi", "NCCL", None):
            with pytest.raises(ConfigurationError, match=r"'gloo' or 'nccl', not"):
                group.process_group(backend)
        with pytest.raises(
            ConfigurationError, match=r"'nccl' needs a GPU in every member; none in a, b.*backend='gloo'"
        ):
            group.process_group("nccl")
        for seconds in (0, -1, float("nan"), "5"):
            with pytest.raises(ConfigurationError, match="collective_timeout must be above 0"):
                group.process_group("gloo", collective_timeout=seconds)
        at_all(peers[1:2], begin_alone)
        try:
            with pytest.raises(ConfigurationError, match=r"initialised in 'b' already.*destroy_process_group"):
                group.process_group("gloo")
            assert at_all(peers[:1], what_is_left) == [(False, [], [])]
        finally:
            at_all(peers[1:2], dist.destroy_process_group)
        group.process_group("gloo")
        assert at_all(peers[:2], own_rank) == [0, 1]
    with pytest.raises(BootstrapError, match="shut down"):
        group.process_group("gloo")
