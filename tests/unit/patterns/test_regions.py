"""Regions: rows of tensors that members of one process read, in place and in messages."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import raytorchrpc as rtr
from tests.insides import needs_nixl
from tests.polling import wait_until
from tests.unit.members import Members

LONG = 20.0


@pytest.fixture(params=["shm", pytest.param("nixl", marks=needs_nixl), "messages"])
def members(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    beside = {} if request.param == "messages" else {"cpu": request.param}
    monkeypatch.setenv("UCX_TLS", "all")  # here is no RDMA
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), by_socket=True, beside=beside) as made:
        yield made


def tensors(rows: int = 40, dtype: torch.dtype = torch.int64, **settings: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"wide": (rows, 3, 50), "also wide": (rows, 3, 50), "narrow": (rows, 2), "flat": (rows,)}
    return {name: torch.randint(100, shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def region(members: Members, given: Any = None, name: str = "kv", **settings: Any) -> rtr.Region:
    with members.acting("home"):
        return rtr.Region(name, tensors() if given is None else given, **settings)


def read(members: Members, into: Any, name: str = "kv", reader: str = "a", **settings: Any) -> None:
    with members.acting(reader):
        rtr.read("home", name, into=into, **settings).wait(LONG)


def room(rows: int = 40, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    return {name: torch.full((rows, *tensor.shape[1:]), 101).to(dtype) for name, tensor in tensors().items()}


@pytest.mark.parametrize("reader", ["a", "home"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_scattered_rows_arrive_where_they_are_wanted(members: Members, reader: str, dtype: torch.dtype) -> None:
    region(members, tensors(dtype=dtype))
    into, rows, at = room(60, dtype), [39, 0, 17], torch.tensor([1, 59, 30])
    read(members, into, reader=reader, rows=rows, at=at)
    for name, tensor in tensors(dtype=dtype).items():
        assert torch.equal(into[name][at].double(), tensor[rows].double()), name
        others = torch.ones(60, dtype=torch.bool).index_fill_(0, at, False)
        assert torch.equal(into[name][others].double(), room(60, dtype)[name][others].double()), name


def test_all_rows_of_some_tensors_by_name_and_in_order(members: Members) -> None:
    given = tensors()
    region(members, given)
    one = {"flat": torch.zeros(40, dtype=torch.int64)}
    read(members, one)
    assert torch.equal(one["flat"], given["flat"])
    region(members, [*given.values()], "list")
    into = [*room(2).values()]
    read(members, into, "list", rows=numpy.array([7, 3]))
    assert all(torch.equal(got, tensor[[7, 3]]) for got, tensor in zip(into, given.values(), strict=True))


def test_what_the_owner_writes_later_is_read_later(members: Members) -> None:
    given = tensors()
    region(members, given)
    for value in (5, 6):
        given["flat"].fill_(value)
        into = {"flat": torch.zeros(40, dtype=torch.int64)}
        read(members, into)
        assert bool((into["flat"] == value).all())


def test_rows_may_be_strided_in_any_dimension_and_part_of_larger_tensors(members: Members) -> None:
    whole = torch.arange(2 * 32 * 6 * 8).view(2, 32, 6, 8)
    region(members, [whole[:, :, 2:4]], dim=1)
    into = torch.zeros(2, 5, 2, 16, dtype=torch.int64)[..., ::2]
    read(members, [into], rows=[31, 4], at=[4, 0])
    assert torch.equal(into[:, [4, 0]], whole[:, [31, 4], 2:4])
    assert not into[:, 1:4].any()
    region(members, [whole.movedim(1, 0)], "moved")
    moved = torch.zeros(3, 2, 6, 8, dtype=torch.int64)
    read(members, [moved], "moved", rows=[1, 2, 30])
    assert torch.equal(moved, whole.movedim(1, 0)[[1, 2, 30]])


def test_tensors_made_under_inference_mode_and_parameters(members: Members) -> None:
    """As the caches of engines are. Autograd learns that the others have changed."""
    with torch.inference_mode():
        given, into = torch.ones(4, 3), torch.zeros(4, 3)
    region(members, {"a": given, "b": torch.nn.Parameter(torch.ones(4, 3))})
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    version = parameter._version
    read(members, {"a": into, "b": parameter}, rows=[1, 2])
    assert into[:2].all() and not into[2:].any() and float(parameter.detach().sum()) == 6
    assert parameter._version > version and parameter.requires_grad


def test_no_rows_and_empty_tensors(members: Members) -> None:
    region(members, [torch.ones(4, 0), torch.ones(4, 2)])
    into = [torch.zeros(4, 0), torch.zeros(4, 2)]
    read(members, into, rows=[])
    assert not into[1].any()
    read(members, into)
    assert into[1].all()


def test_a_read_is_awaited_and_asked_without_a_wait(members: Members) -> None:
    region(members)
    into = room()

    async def both() -> None:
        first = rtr.read("home", "kv", into=into)
        with pytest.raises(rtr.RayTorchRpcError, match="await read"):
            first.wait() if not first.done() else rtr.read("home", "kv", into=into).wait()
        await first
        first.wait()

    with members.acting("a"):
        asyncio.run(both())
        later = rtr.read("home", "kv", into=into)
        assert wait_until(later.done, LONG)


def test_a_lease_keeps_rows_until_they_are_read(members: Members) -> None:
    made = region(members)
    with members.acting("home"):
        lease = made.lease([5, 9], timeout=LONG)
    assert made.leased([4, 5, 9]).tolist() == [False, True, True] and int(made.leased().sum()) == 2
    assert not made.wait([5], timeout=0.01) and made.wait([4], timeout=0) and not lease.done()
    into = room(2)
    read(members, into, lease=pickle.loads(pickle.dumps(lease)))
    assert torch.equal(into["flat"], tensors()["flat"][[5, 9]])
    assert lease.ended == "read" and lease.wait(0) and not made.leased().any()


def test_several_reads_end_a_lease(members: Members) -> None:
    made = region(members)
    lease = made.lease([5], timeout=LONG, reads=2)
    read(members, room(1), lease=lease, last=False)
    read(members, room(1), lease=lease)
    assert not lease.done()
    read(members, room(1), lease=lease, reader="b")
    assert lease.ended == "read"


def test_a_program_may_ask_the_owner_itself_whether_a_read_was_right(
    members: Members, request: pytest.FixtureRequest
) -> None:
    given = tensors()
    made = region(members, given)
    read(members, room(), last=False)
    made.close()
    if request.node.callspec.params["members"] == "shm":  # in messages, the owner is asked for the rows
        read(members, room(), last=False)
    with pytest.raises(rtr.NotFound):
        read(members, room())


@pytest.mark.parametrize("how", ["expired", "released", "closed"])
def test_a_read_after_the_end_of_its_lease_is_told(members: Members, how: str) -> None:
    made = region(members)
    with members.acting("home"):
        lease = made.lease([5, 9], timeout=0.01 if how == "expired" else LONG)
        if how == "released":
            lease.release()
        elif how == "closed":
            made.close()
    assert wait_until(lease.done, LONG)
    assert lease.ended == how and not made.leased().any()
    error = rtr.NotFound if how == "closed" else rtr.RpcTimeout
    with pytest.raises(error, match="kv"):
        read(members, room(2), lease=pickle.loads(pickle.dumps(lease)))


def test_a_wait_goes_on_if_another_method_has_leased_the_rows(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait lets other methods of the actor run, and returns only when it is its turn again."""
    made, regained = region(members), list[rtr.Lease]()

    def wait_and_regain(pending: Any, timeout_s: float) -> bool:
        is_over: bool = pending.wait(timeout_s)
        if not regained:
            regained.append(made.lease([5], timeout=LONG))
        return is_over

    monkeypatch.setattr("raytorchrpc.patterns.regions.region.wait_serving", wait_and_regain)
    assert not made.wait([5], timeout=0.05)
    regained[0].release()
    assert made.wait([5], timeout=LONG)


def test_a_reader_gives_its_lease_back(members: Members) -> None:
    made = region(members)
    lease = made.lease([5, 9], timeout=LONG)
    with (
        members.acting("a"),
        pickle.loads(pickle.dumps(lease)) as there,
        pytest.raises(rtr.RayTorchRpcError, match="only 'home'"),
    ):
        there.done()
    assert wait_until(lease.done, LONG)
    assert lease.ended == "released"


def test_a_lease_for_one_reader_ends_with_it(members: Members) -> None:
    made = region(members)
    with members.acting("home"):
        lease = made.lease([5], timeout=LONG, reader="b")
    with pytest.raises(rtr.RpcTimeout, match="another member"):
        read(members, room(1), lease=lease)
    members.mark_away("home", "b", "it ended", for_good=True)
    members.members["home"].services.lose(2, True)
    assert wait_until(lease.done, LONG)
    assert lease.ended == "lost"


def test_another_region_of_the_name_is_not_read_by_what_was_known(members: Members) -> None:
    """As after a restart of the owner: its new process has another region."""
    made = region(members)
    read(members, room())
    lease = made.lease([1], timeout=LONG)
    made.close()
    made.close()
    region(members, {"flat": torch.full((40,), 7)})
    into = {"flat": torch.zeros(40, dtype=torch.int64)}
    read(members, into)
    assert bool((into["flat"] == 7).all())
    with pytest.raises(rtr.NotFound, match="kv"):
        read(members, {"flat": torch.zeros(1, dtype=torch.int64)}, lease=lease)


def test_a_lost_owner(members: Members) -> None:
    region(members)
    read(members, room())
    members.members["home"].leave()
    with pytest.raises(rtr.PeerLost):
        read(members, room())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "vk"}, "has no region 'vk'.*kv"),
        ({"rows": [40]}, "rows from 0 to 39, and not 40"),
        ({"rows": [-1]}, "rows from 0 on, and not -1"),
        ({"rows": [1, 1]}, "more than once"),
        ({"rows": [1.5]}, "integers"),
        ({"rows": [1], "at": [40]}, "into= has rows from 0 to 39"),
        ({"rows": [1], "at": [1, 2]}, "at= has 2 rows, and rows= 1"),
        ({"into": {"flut": torch.zeros(1)}}, "no 'flut'; it has 'wide'"),
        ({"into": [torch.zeros(1)]}, "has 4 tensors, and into= 1"),
        ({"into": {"flat": torch.zeros(40)}}, "'flat' of .* is int64"),
        ({"into": {"narrow": torch.zeros(40, 3, dtype=torch.int64)}}, r"\(40, 2\), and of into= int64 \(40, 3\)"),
        ({"into": {"flat": torch.zeros(1, dtype=torch.int64).expand(40)}}, "expanded"),
        ({"into": {"flat": 3}}, "'flat' of into= is no tensor, but int"),
        ({"lease": "kv"}, "lease= is what the owner's Region.lease returned, not 'kv'"),
        ({"into": torch.zeros(1)}, "in a mapping or a sequence, not Tensor"),
        (
            {"rows": range(3), "into": {"flat": torch.zeros(2, dtype=torch.int64)}},
            "into= has rows from 0 to 1, and not 2",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    members: Members, settings: dict[str, Any], message: str
) -> None:
    region(members)
    into = settings.setdefault("into", room())
    before = (
        [tensor.clone() for tensor in into.values() if isinstance(tensor, torch.Tensor)] if type(into) is dict else []
    )
    error = rtr.NotFound if "name" in settings else rtr.ConfigurationError
    with pytest.raises(error, match=message):
        read(members, **settings)
    assert all(
        torch.equal(one, other) for one, other in zip(before, dict(into).values() if before else [], strict=True)
    )


def test_regions_that_cannot_be(members: Members) -> None:
    region(members)
    with pytest.raises(rtr.ConfigurationError, match="close"):
        region(members)
    for given, message in (
        ({}, "no tensors"),
        ([torch.ones(3), torch.ones(4)], "differ in their rows"),
        ([torch.ones(3, device="meta")], "to_empty"),
        ([torch.tensor(1)], "0 dimensions"),
        ([[1.0]], "0 of region 'other' is no tensor, but list"),
    ):
        with pytest.raises(rtr.ConfigurationError, match=message):
            region(members, given, "other")
    with pytest.raises(rtr.ConfigurationError, match="dim= of region 'other' is a whole number, not 'a'"):
        region(members, [torch.ones(3)], "other", dim="a")
    with members.acting(None), pytest.raises(rtr.NotAMember):
        rtr.Region("kv", [torch.ones(3)])
