"""Weights that are lent: a model's own tensors as a version, between members of one process."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights import conversions, published, snapshots
from raytorchrpc.patterns.weights.snapshots import VersionMemory
from tests.polling import wait_until
from tests.unit.members import TENSORS, Members, in_thread, serving

PUBLISHERS = ("a", "b")
LONG = 20.0


def sharded() -> rtr.WeightStore:
    return rtr.WeightStore("w", publishers=PUBLISHERS)


def half(number: int, value: float) -> dict[str, Any]:
    return {"w": rtr.Shard(torch.full((3,), value), (6,), (3 * number,))}


def model(value: float) -> dict[str, torch.Tensor]:
    flat, turned = torch.full((40,), float(value)), torch.full((2, 3), float(value)).T
    return {"a": flat[:12].view(3, 4), "b": flat[12:], "t": turned, "none": torch.empty(0, 2)}


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape) for name, tensor in model(0).items()}


def pulled(members: Members, name: str, **options: Any) -> tuple[int, dict[str, torch.Tensor]]:
    with members.acting(name):
        target = empty()
        return rtr.WeightStore("w", home="home").pull(target, **options), target


@contextmanager
def lending(members: Members, values: dict[str, torch.Tensor]) -> Iterator[int]:
    with members.acting("home"):
        block = rtr.WeightStore("w", home="home").lend(values)
        version = block.__enter__()
    yield version
    with members.acting("home"):
        block.__exit__(None, None, None)


def error_of(store: rtr.WeightStore, target: dict[str, torch.Tensor] | None = None, **options: Any) -> str:
    """What a pull raises."""
    with pytest.raises(rtr.RpcTimeout) as raised:
        store.pull(target or empty(), **options)
    return str(raised.value)


def test_readers_pull_out_of_the_model_itself_while_the_block_runs(members: Members) -> None:
    tensors = model(1)
    with members.acting("home"):
        store = rtr.WeightStore("w", home="home")
        with store.lend(tensors) as version:
            assert (version, store.version()) == (1, 1)
            for reader in ("a", "home", "b"):
                number, target = pulled(members, reader)
                assert number == 1 and all(bool((tensor == 1).all()) for tensor in target.values()), reader
            tensors["b"].fill_(5)  # which shows whose memory it is: a program must not
            assert bool((pulled(members, "a")[1]["b"] == 5).all())
            stats = store.stats()
            assert (stats.versions, stats.held) == ((1,), 0)
        assert store.version() == 0 and store.stats().versions == ()
        with pytest.raises(rtr.Empty):
            store.pull(empty(), timeout=0.05)
        with pytest.raises(rtr.NotFound):
            store.pull(empty(), 1)
        with store.lend(model(2)) as version:
            assert version == 2 and pulled(members, "a")[0] == 2
        assert store.publish(model(3)) == 3 and pulled(members, "a")[0] == 3


def test_a_loan_ends_older_versions_too_and_no_newer_one(members: Members) -> None:
    with members.acting("home"):
        store = rtr.WeightStore("w", home="home", keep=3)
        assert store.publish(model(1)) == 1
        with store.lend(model(2)):
            assert rtr.WeightStore("w", home="home", keep=3).pull(empty(), 1) == 1
        assert store.version() == 0
        with store.lend(model(3)):
            assert store.publish(model(4)) == 4
        assert store.version() == 4


@pytest.mark.parametrize("track", [False, True])
def test_what_is_published_after_a_loan_differs_from_it(members: Members, track: bool) -> None:
    with members.acting("home"):
        store = rtr.WeightStore("w", home="home", track=track)
        tensors = model(1)
        target = empty()
        with store.lend(tensors):
            assert store.pull(target) == 1
            assert store.publish(tensors) == 2 == store.pull(target, since=1)
        tensors["a"].fill_(7)
        assert store.publish(tensors) == 3 == store.pull(target, since=2)
        assert bool((target["a"] == 7).all()) and bool((target["b"] == 1).all())


def test_the_end_waits_for_a_reader_that_has_begun(members: Members) -> None:
    reads, go_on = threading.Event(), threading.Event()
    members.lanes["a"].holds = lambda method: method == TENSORS and not reads.set()
    store = rtr.WeightStore("w", home="home")
    target, tensors = empty(), model(1)
    with members.acting("home"):
        block = store.lend(tensors)
        block.__enter__()
    with members.acting("a"):
        pull = in_thread(lambda: store.pull(target))
        assert reads.wait(LONG)
    with members.acting("home"):

        def end() -> bool:
            block.__exit__(None, None, None)
            tensors["a"].fill_(9)
            return go_on.is_set()

        ended = in_thread(end)
        go_on.set()
        members.lanes["a"].release()
        assert ended() and pull() == 1
    assert all(bool((tensor == 1).all()) for tensor in target.values())


@pytest.mark.parametrize("how", ["timeout", "the block raises"])
def test_a_reader_that_is_too_slow_gets_an_error(members: Members, how: str, caplog: pytest.LogCaptureFixture) -> None:
    reads = threading.Event()
    members.lanes["a"].holds = lambda method: method == TENSORS and not reads.set()
    store = rtr.WeightStore("w", home="home")

    with members.acting("home"):
        block = store.lend(model(1), timeout=0.05 if how == "timeout" else None)
        block.__enter__()
    with members.acting("a"):
        slow = in_thread(lambda: error_of(store))
        assert reads.wait(LONG)
    with members.acting("home"), caplog.at_level(logging.WARNING):
        if how == "timeout":
            block.__exit__(None, None, None)
        else:
            assert not block.__exit__(KeyError, KeyError("the program's own"), None)
        members.lanes["a"].release()
        error = slow()
    assert "'home' has taken back version 1 of weight store 'w', which it had only lent" in error, error
    assert "took back version 1 of weight store 'w' before a had pulled it" in caplog.text


def test_a_reader_whose_answer_comes_after_the_end_learns_that_it_may_be_torn(members: Members) -> None:
    """It has copied everything: only the owner knows that this was too late."""
    reads = threading.Event()
    store = rtr.WeightStore("w", home="home")
    with members.acting("home"):
        block = store.lend(model(1), timeout=0.05)
        block.__enter__()
    members.lanes["a"].delays = lambda method: method == TENSORS and not reads.set()
    with members.acting("a"):
        slow = in_thread(lambda: error_of(store))
        assert reads.wait(LONG)
    with members.acting("home"):
        block.__exit__(None, None, None)
        members.lanes["home"].deliver_answers()
        members.lanes["a"].deliver_answers()
        assert "taken back version 1" in slow()


def test_pairs_cannot_be_lent_and_only_the_home_lends(members: Members) -> None:
    with members.acting("home"), pytest.raises(rtr.ConfigurationError, match="publish it"):
        rtr.WeightStore("w", home="home").lend(iter([("w", torch.ones(2))])).__enter__()  # type: ignore[arg-type]
    with members.acting("a"), pytest.raises(rtr.ConfigurationError, match="lives in member 'home'"):
        rtr.WeightStore("w", home="home").lend(model(1)).__enter__()


# --- several publishers ---------------------------------------------------------------------------------------------


@pytest.fixture
def blocks(members: Members) -> Iterator[dict[str, Any]]:
    """The blocks of both publishers, begun."""
    begun = {}
    for number, name in enumerate(PUBLISHERS):
        with members.acting(name):
            begun[name] = sharded().lend(half(number, 1.0 + number), timeout=LONG)
            assert begun[name].__enter__() == 1
    yield begun


def test_the_loan_of_several_ends_once_every_block_has(members: Members, blocks: dict[str, Any]) -> None:
    target = torch.zeros(6)
    with members.acting("b"):
        end_of_b = in_thread(lambda: blocks["b"].__exit__(None, None, None) or "ended")
        coordinator = members.served("weight store", "w", "a")
        while not coordinator._blocks:  # its block has ended, and it waits
            pass
    with members.acting("home"):
        assert sharded().pull({"w": target}) == 1
    assert target.tolist() == [1.0] * 3 + [2.0] * 3
    with members.acting("a"):
        blocks["a"].__exit__(None, None, None)
    assert end_of_b() == "ended"
    with members.acting("home"):
        assert sharded().version() == 0
        with pytest.raises(rtr.NotFound):
            sharded().pull({"w": target}, 1)
    for number, name in enumerate(PUBLISHERS):
        with members.acting(name):
            assert sharded().publish(half(number, 4.0)) == 2
    with members.acting("home"):
        assert sharded().pull({"w": target}) == 2 and target.tolist() == [4.0] * 6


def test_a_publisher_whose_block_goes_on_is_named_and_the_loan_ends_for_all(members: Members) -> None:
    begun = {}
    for number, name in enumerate(PUBLISHERS):
        with members.acting(name):
            begun[name] = sharded().lend(half(number, 1.0), timeout=0.1)
            begun[name].__enter__()
    with members.acting("b"), pytest.raises(rtr.RpcTimeout, match=r"took back version 1 .*; a had not lent its"):
        begun["b"].__exit__(None, None, None)
    with members.acting("a"):
        begun["a"].__exit__(None, None, None)  # it has ended by then
        assert sharded().version() == 0


def test_a_block_that_raises_ends_the_loan_of_all_at_once(members: Members, blocks: dict[str, Any]) -> None:
    with members.acting("b"):
        end_of_b = in_thread(lambda: blocks["b"].__exit__(None, None, None) or "ended")
    with members.acting("a"):
        assert not blocks["a"].__exit__(KeyError, KeyError("the program's own"), None)
    assert end_of_b() == "ended"


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_call_without_time_ends_the_loan_of_all(members: Members, blocks: dict[str, Any], has_failed: bool) -> None:
    raised = (KeyError, KeyError("the program's own"), None) if has_failed else (None, None, None)
    with members.acting("b"), serving(-1.0), pytest.raises(rtr.RpcTimeout) if not has_failed else nullcontext():
        blocks["b"].__exit__(*raised)
    assert not members.served("weight store", "w", "a")._versions


def test_a_publisher_that_was_restarted_before_any_block_ended_ends_the_loan(
    members: Members, blocks: dict[str, Any]
) -> None:
    members.served("weight store", "w", "a").keep_only(members.members["b"].me.rank, "another process")
    with members.acting("a"):
        assert in_thread(lambda: blocks["a"].__exit__(None, None, None) or "ended")() == "ended"


def test_a_lost_publisher_ends_the_loan_of_the_others(members: Members, blocks: dict[str, Any]) -> None:
    with members.acting("a"):
        end_of_a = in_thread(lambda: blocks["a"].__exit__(None, None, None) or "ended")
    coordinator = members.served("weight store", "w", "a")
    coordinator.keep_only(members.members["b"].me.rank, None)
    assert end_of_a() == "ended"


# --- conversions -----------------------------------------------------------------------------------------------------


def test_a_conversion_that_is_late_does_not_reach_the_next_version(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, convert = threading.Event(), threading.Event(), conversions.convert

    def convert_late(*args: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(LONG)
        convert(*args)

    monkeypatch.setattr(conversions, "convert", convert_late)
    store = rtr.WeightStore("w", home="home")
    tensors, half = model(1), {name: tensor.bfloat16() for name, tensor in empty().items()}
    with members.acting("home"):
        block = store.lend(tensors, timeout=0.05)
        block.__enter__()
    with members.acting("a"):
        slow = in_thread(lambda: error_of(store, half, convert=True))
        assert begun.wait(LONG)
    with members.acting("home"):
        block.__exit__(None, None, None)
        for tensor in tensors.values():
            tensor.fill_(-99)
        with store.lend(model(2)):
            next_half = {name: tensor.bfloat16() for name, tensor in empty().items()}
            with members.acting("b"):
                assert store.pull(next_half, convert=True) == 2
            lease = members.served("weight store", "w").lease(0, None, None, 0, LONG).lease
            (converted,) = members.served("weight store", "w").pool.leased(lease).converted.values()
            go_on.set()
            assert "taken back version 1" in slow()
            assert all(bool((tensor == 2).all()) for tensor in converted.tensors)
            members.served("weight store", "w").pool.release(lease)


# --- memory that peers read in place -------------------------------------------------------------------------------


def test_the_storages_of_a_model_are_the_pieces_that_peers_read() -> None:
    flat = torch.arange(100, dtype=torch.float32)
    odd = torch.arange(9, dtype=torch.uint8)
    tensors = [flat[3:7], odd[1:], flat[50:], torch.empty(0), odd[:0]]
    pieces, spans = snapshots._storages(tensors)
    assert [piece.dtype for piece in pieces] == [torch.uint8] * len(pieces)
    assert pieces[0].data_ptr() == flat.data_ptr() and pieces[1].data_ptr() == odd.data_ptr(), "no copies"
    for tensor, (number, begin) in zip(tensors, spans, strict=True):
        seen = pieces[number][begin : begin + tensor.nbytes].view(tensor.dtype)
        assert torch.equal(seen, tensor)


@pytest.fixture
def on_one_host() -> Iterator[Members]:
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), by_socket=True, beside={"cpu": "shm"}) as made:
        yield made


@pytest.fixture
def sends_no_tensors(on_one_host: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    for service in (published.TENSORS, published.PIECES):
        monkeypatch.delitem(on_one_host.members["home"].incoming.services, service)


@pytest.mark.usefixtures("sends_no_tensors")
def test_lent_tensors_are_read_where_they_are(on_one_host: Members) -> None:
    """Also rows and columns of them, and in pieces too large or too many for one system call."""
    for value in (1, 2):  # the second pull uses the plan of the first
        tensors = {
            "whole": torch.arange(200.0).view(10, 20) * value,
            "rows": torch.arange(80, dtype=torch.int16).view(8, 10) * value,
            "columns": (torch.arange(60_000) * value).view(3000, 20).bfloat16(),
            "bits": torch.full((7,), 0.5 * value).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(value),
            "none": torch.empty(3, 0),
            "large": torch.full((17 << 20,), float(value)),
        }
        half = torch.zeros(3000, 16, dtype=torch.bfloat16)
        target: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        target["whole"] = torch.nn.Parameter(torch.zeros(20, 10).T)
        target["rows"] = rtr.Shard(torch.zeros(4, 10, dtype=torch.int16), (8, 10), (4, 0))
        target["columns"] = rtr.Shard(half[:, 3:13], (3000, 20), (0, 10))
        seen = target["whole"]._version
        with lending(on_one_host, tensors) as version, on_one_host.acting("a"):
            assert rtr.WeightStore("w", home="home").pull(target) == version == value
        assert torch.equal(target["whole"].detach(), tensors["whole"]) and target["whole"]._version > seen
        assert torch.equal(target["rows"].tensor, tensors["rows"][4:])
        assert torch.equal(half[:, 3:13], tensors["columns"][:, 10:]) and not half[:, :3].any()
        for name in ("bits", "scalar", "none", "large"):
            assert torch.equal(target[name].double(), tensors[name].double()), name


@pytest.mark.usefixtures("sends_no_tensors")
def test_the_owner_of_lent_tensors_drops_them_after_the_loan(on_one_host: Members) -> None:
    tensors = model(1)
    watched = weakref.ref(tensors["b"].untyped_storage())
    with lending(on_one_host, tensors):
        assert pulled(on_one_host, "a")[0] == 1
    del tensors
    assert wait_until(lambda: gc.collect() >= 0 and watched() is None, LONG)


def test_lent_tensors_that_may_not_be_read_in_place_come_in_messages(
    on_one_host: Members, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise rtr.LaneUnavailable("it", "the kernel does not allow it")

    for lane in on_one_host.members["a"].tensor_lanes.values():
        monkeypatch.setattr(lane, "gather", refuse)
    with lending(on_one_host, model(3)):
        assert all(bool((tensor == 3).all()) for tensor in pulled(on_one_host, "a")[1].values())
    assert "weight store 'w' comes in messages from 'home'" in caplog.text


def test_a_reader_in_place_that_is_late_learns_that_it_may_be_torn(
    on_one_host: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, go_on = threading.Event(), threading.Event()
    for lane in on_one_host.members["a"].tensor_lanes.values():
        gather = lane.gather
        late = lambda *args, gather=gather: (begins.set(), go_on.wait(LONG), gather(*args))  # noqa: E731
        monkeypatch.setattr(lane, "gather", late)
    tensors = model(1)
    with on_one_host.acting("home"):
        block = rtr.WeightStore("w", home="home").lend(tensors, timeout=0.05)
        block.__enter__()
    with on_one_host.acting("a"):
        slow = in_thread(lambda: error_of(rtr.WeightStore("w", home="home")))
        assert begins.wait(LONG)
    with on_one_host.acting("home"):
        block.__exit__(None, None, None)
    go_on.set()
    assert "taken back version 1" in slow()


def test_pieces_are_read_in_place(on_one_host: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose memory every lane of its host reads where it is."""

    def lent(tensors: list[torch.Tensor]) -> VersionMemory:
        memory = made(tensors)
        memory.readable, memory.spans = snapshots._storages(memory.tensors)
        return memory

    made = VersionMemory.lent
    monkeypatch.setattr(VersionMemory, "lent", lent)
    monkeypatch.setattr(published, "ExposedMemory", lambda *_: None)
    with on_one_host.acting("home"):
        store = rtr.WeightStore("w", home="home")
    for value in (1.0, 2.0, 3.0):  # the second pull uses the plan of the first
        tensors = model(value)
        tensors["b"][3] = 7 * value
        with lending(on_one_host, tensors), on_one_host.acting("a"):
            target = empty()
            assert store.pull(target) == value
            assert all(torch.equal(target[name], tensors[name]) for name in tensors)
            small = {"a": torch.zeros(3, 4, dtype=torch.float64), "b": torch.zeros(28)}
            store.pull(small, convert=True, strict=False)
            assert torch.equal(small["a"], tensors["a"].double()) and torch.equal(small["b"], tensors["b"])


def test_a_store_that_copies_a_version_still_tells_the_one_before(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is written for the next by then."""
    copy, seen = snapshots.copy_tensors, list[Any]()

    def copy_slowly(*args: Any) -> None:
        seen.append((store.version(), members.served("weight store", "w").kept))
        copy(*args)

    monkeypatch.setattr("raytorchrpc.patterns.weights.published.copy_tensors", copy_slowly)
    with members.acting("home"):
        store = rtr.WeightStore("w", home="home")
        for value in (1, 2, 3):
            store.publish(model(value))
        assert seen == [(0, ()), (1, ()), (2, ())] and store.version() == 3
