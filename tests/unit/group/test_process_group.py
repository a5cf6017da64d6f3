"""The store of a process group, and which members can have one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from raytorchrpc.errors import BootstrapError, ConfigurationError, PeerLost, ProcessGroupLost, RpcTimeout
from raytorchrpc.group.process_group import (
    Collectives,
    GuardedListeners,
    ProcessGroupInfo,
    check_backend,
    check_encryption,
)
from raytorchrpc.group.rendezvous import KeyTable, MemberStore
from raytorchrpc.process.workers import process_deadlines
from tests.programs import run_program
from tests.threads import in_thread, in_threads
from tests.unit import clusters
from tests.unit.callees import DeferredReply


def key_table() -> KeyTable:
    return KeyTable(process_deadlines())


def store_of(
    table: KeyTable,
    look_at: Callable[[bytes], bool] = lambda _: False,
    requests: list[str] | None = None,
    published: threading.Barrier | None = None,
) -> MemberStore:
    """A store whose home is this process. ``requests``: gets the operations that it asks the home for. ``published``:
    waited for by who publishes.
    """

    def send(seconds: float, operation: str, args: tuple[Any, ...]) -> Any:
        if requests is not None:
            requests.append(operation)
        result = table.operate(seconds, operation, *args)
        if operation == "publish" and published is not None:
            published.wait(30)
        return result.result(30) if isinstance(result, DeferredReply) else result

    return MemberStore(send, look_at)


@pytest.fixture(params=["torch's own", "a member's", "a member's, as C++ sees it"])
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch's own":
        return HashStore()
    ours = store_of(key_table())
    # Python's object has to live as long as what wraps it in C++.
    request.addfinalizer(lambda: ours)
    return PrefixStore("prefix", ours) if "C++" in request.param else ours


def test_each_operation_does_what_torchs_own_store_does(store: Any) -> None:
    store.set("text", "one")
    store.set("bytes", b"\x00\xff")
    assert (store.get("text"), store.get("bytes")) == (b"one", b"\x00\xff")
    assert [store.add("count", 2), store.add("count", -5)] == [2, -3]
    assert store.get("count") == b"-3"
    assert store.check(["text", "count"]) and not store.check(["text", "none"])
    assert store.compare_set("text", "other", "two") == b"one"
    assert store.compare_set("text", "one", "two") == b"two" == store.get("text")
    assert store.compare_set("new", "", "made") == b"made" == store.get("new")
    assert store.compare_set("newer", "expected", "made") == b"expected" and not store.check(["newer"])
    store.append("text", " and more")
    store.append("list", "a")
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.multi_get(["text", "list", "x", "y"]) == [b"two and more", b"a", b"1", b"2"]
    assert store.num_keys() == 7
    assert store.delete_key("x") and not store.delete_key("x") and not store.check(["x"])
    assert store.has_extended_api()


def test_a_wait_ends_with_the_last_key_and_not_before(store: Any) -> None:
    waiting = in_thread(lambda: (store.wait(["a", "b"]), store.get("b")))
    store.set("a", "1")
    with pytest.raises(AssertionError, match="did not return"):
        waiting(0.1)
    store.set("b", "7")
    assert waiting() == (None, b"7")


@pytest.mark.parametrize(
    "write", [("multi_set", ["a"], [b"1"]), ("append", "a", b"1"), ("add", "a", 1), ("compare_set", "a", b"", b"1")]
)
def test_every_write_ends_the_waits_for_its_key(write: tuple[Any, ...]) -> None:
    table = key_table()
    for_value, for_key, for_more = (
        table.operate(30.0, "wait", *wait) for wait in ((["a"], True), (["a"], False), (["a", "b"], True))
    )
    table.operate(30.0, *write)
    assert (for_value.result(0), for_key.result(0), for_more.done()) == ([b"1"], None, False)


def test_a_wait_for_what_nobody_sets_ends_at_its_deadline(store: Any) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError):  # by which torch's barrier knows to look again
        store.wait(["never"], timedelta(milliseconds=50))
    store.set_timeout(timedelta(milliseconds=50))
    assert store.timeout == timedelta(milliseconds=50)
    with pytest.raises(RuntimeError):
        store.get("never")
    assert time.monotonic() - began < 10


def test_a_closed_table_ends_waits_and_refuses_what_comes_later() -> None:
    table = key_table()
    table.operate(30.0, "multi_set", ["key"], [b"value"])
    waiting = table.operate(30.0, "wait", ["never"], False)
    table.close("member 'b' was lost")
    assert "member 'b' was lost" in str(waiting.exception(0))
    with pytest.raises(ProcessGroupLost, match="member 'b' was lost"):
        table.operate(30.0, "check", ["key"])
    table.close("another cause")
    with pytest.raises(dist.DistNetworkError, match="ended: member 'b' was lost"):
        store_of(table).set("key", "value")


def test_a_request_for_another_process_groups_store_is_refused() -> None:
    home = Collectives("m0", process_deadlines())
    for number in (1, 2):
        home.prepare(ProcessGroupInfo("gloo", number, {"m0": 0, "m1": 1}, 30.0), 30.0)
    assert home.keys(2).operate(30.0, "add", "count", 1) == 1
    with pytest.raises(ProcessGroupLost, match="its process group has ended in its home 'm0'"):
        home.keys(1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RpcTimeout("no answer"), dist.DistStoreError),
        (PeerLost("a", "its process ended"), dist.DistNetworkError),
        (ProcessGroupLost("it has ended"), dist.DistNetworkError),
    ],
)
def test_torch_sees_errors_of_its_own(error: Exception, expected: type[Exception]) -> None:
    def send(*_: Any) -> Any:
        raise error

    ours = MemberStore(send)
    for wrapped in (ours, PrefixStore("prefix", ours)):
        with pytest.raises(expected, match=str(error).partition(";")[0]):
            wrapped.check(["key"])


def test_while_it_forms_members_are_waited_for_longer_than_in_a_collective() -> None:
    """gloo waits for the others' addresses with the time limit of a collective."""
    asked: list[float] = []
    store = MemberStore(lambda seconds, *_: asked.append(seconds))
    for store.shortest_wait_s in (60.0, 0.0):
        store.wait(["one's", "another's"], timedelta(seconds=1))
    assert asked == [60.0, 1.0]


def reduced(ranks: int, look_at: Callable[[bytes], bool], requests: list[str]) -> dict[int, float]:
    """What each rank has of the sum of all ranks, on threads of one process: torch's C++ calls the stores without the
    interpreter lock. No rank goes on before all have published their addresses.
    """
    table, sums = key_table(), {}
    all_published = threading.Barrier(ranks)
    stores = [store_of(table, look_at, requests, all_published) for _ in range(ranks)]

    def reduce(rank: int) -> None:
        limit, store = timedelta(seconds=30), PrefixStore("gloo", stores[rank])
        group = dist.ProcessGroupGloo(store, rank, ranks, limit)  # type: ignore[attr-defined]
        tensor = torch.full((10,), float(rank))
        group.allreduce([tensor]).wait()
        sums[rank] = tensor.mean().item()

    in_threads(reduce, ranks)
    return sums


def test_gloo_connects_by_it_and_a_reply_brings_all_addresses_that_are_published_by_then() -> None:
    ranks, requests, one_by_one = 24, list[str](), list[str]()
    assert reduced(ranks, lambda value: len(value) > 128, requests) == dict.fromkeys(range(ranks), 276.0)
    assert reduced(ranks, lambda _: False, one_by_one) == dict.fromkeys(range(ranks), 276.0)
    assert requests.count("publish") == ranks and requests.count("fetch") <= 2 * ranks
    assert one_by_one.count("fetch") >= 2 * ranks * (ranks - 1), "what gloo asks for"


def test_what_was_published_beside_a_key_comes_with_it_and_nothing_that_may_change() -> None:
    table, requests = key_table(), list[str]()
    table.operate(30.0, "publish", ["p/0", "p/1", "q/0"], [b"a", b"b", b"other"])
    table.operate(30.0, "multi_set", ["p/changes"], [b"1"])
    store = store_of(table, requests=requests)
    store.wait(["p/1"])
    assert [store.get("p/1"), store.get("p/0")] == [b"b", b"a"] and requests == ["fetch"]
    assert store.get("p/changes") == b"1"
    table.operate(30.0, "multi_set", ["p/changes"], [b"2"])
    assert store.get("p/changes") == b"2"
    more = {f"p/{rank}": b"%d" % rank for rank in range(2, 200)}
    table.operate(30.0, "publish", [*more], [*more.values()])
    assert [store.get(f"p/{rank}") for rank in range(2, 200)] == [b"%d" % rank for rank in range(2, 200)]
    assert requests.count("fetch") == 1 + 2 + 4, "64 values at a time"
    assert store.get("q/0") == b"other" and store.get("p/0") == b"a", "once more, from the home"


# --- backends -------------------------------------------------------------------------------------------------------


ON_ONE_GPU = clusters.group(*(clusters.member(n, cuda=True, gpus=clusters.a100s(1)) for n in range(2)))
WITHOUT_GPU = {**clusters.one_host_two_gpus(), "learner": clusters.member(7)}


@pytest.mark.parametrize(
    ("backend", "cluster", "said"),
    [
        ("nccl", clusters.one_host_two_gpus(), None),
        ("gloo", clusters.one_host(3), None),
        ("nccl", WITHOUT_GPU, r"none in learner \(.*num_gpus=1.*backend='gloo'"),
        ("nccl", ON_ONE_GPU, "worker_0 and worker_1 are on one GPU"),
        *((wrong, {}, "'gloo' or 'nccl', not") for wrong in ("mpi", "NCCL", "", None, 3)),
    ],
)
def test_a_backend_that_cannot_work_is_refused_with_the_members(
    backend: object, cluster: clusters.Cluster, said: str | None
) -> None:
    with nullcontext() if said is None else pytest.raises(ConfigurationError, match=said):
        check_backend(backend, cluster)


def test_a_group_that_encrypts_has_process_groups_within_a_host_alone() -> None:
    check_encryption("gloo", clusters.one_host(3))
    with pytest.raises(ConfigurationError, match=r"'gloo' does not encrypt.* worker_0 and worker_1 share no network"):
        check_encryption("gloo", clusters.two_hosts())


def test_a_listener_of_gloos_that_cannot_be_guarded_ends_the_attempt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # no epoll set holds it
        host, port = listener.getsockname()
        published = port.to_bytes(2, "big") + socket.inet_aton(host)
        GuardedListeners([]).look_at(published.ljust(128, b"\0"))  # as NCCL's id, whose listener is none of gloo's
        with pytest.raises(BootstrapError, match=r"gloo's listener, .* cannot be guarded"):
            GuardedListeners([]).look_at(published.ljust(154, b"\0"))


def test_an_attempt_that_was_given_up_does_not_end_the_next_one() -> None:
    collectives = Collectives("a", process_deadlines())
    first, second, third = (ProcessGroupInfo("gloo", number, {"a": 0}, 30.0) for number in (1, 2, 3))
    collectives.prepare(second, 30.0)
    with pytest.raises(BootstrapError, match="process group 1 was given up: process group 2 is being created"):
        collectives.prepare(first, 30.0)  # its request was carried out late
    collectives.keys(second.number)  # it is still being created
    collectives.give_up(third.number, "Ctrl-C")
    with pytest.raises(BootstrapError, match="process group 3 was given up"):
        collectives.prepare(third, 30.0)
    collectives.keys(second.number)


def test_a_process_group_over_gloo_has_room_for_its_connections() -> None:
    """In a process of its own: gloo ends the process when it cannot accept one."""
    program = """
import resource
from raytorchrpc.group.process_group import Collectives, ProcessGroupInfo
from raytorchrpc.process.workers import process_deadlines
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1500))
for size in (500, 2000):
    ranks = {f"m{rank}": rank for rank in range(size)}
    Collectives("m1", process_deadlines()).prepare(ProcessGroupInfo("gloo", 1, ranks, 30.0), 30.0)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000)
"""
    ended = run_program("-c", program)
    assert ended.stdout == "True\n"
    assert "ConfigurationError: a process group of 2000 members over gloo takes 4000 file descriptors" in ended.stderr
