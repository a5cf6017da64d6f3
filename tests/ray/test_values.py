"""Values of every kind through calls: by each lane that carries them, both ways, and into memory of one's own."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.conformance.peers import ALL_DTYPES, huge, is_huge, random, resident_bytes, same, shared_mappings
from tests.freed import FREED
from tests.insides import in_actor
from tests.polling import suspend, wait_until
from tests.ray.call_actors import LARGE, Store
from tests.ray.conftest import Spawn
from tests.ray.test_tensor_lanes import all_given_back, bytes_by_lane, used

MIB = 1 << 20
#: Which lanes a group may use, by the one that then carries a large CPU tensor.
LANES = {"shm": None, "torchrpc": ("torchrpc",), "torchrpc beside socket": ("socket", "torchrpc")}


class Buffer(Store):
    """Keeps what it gets, and gives it back."""

    @rtr.method
    def echo(self, value: Any) -> Any:
        return value

    @rtr.method
    def store(self, *values: Any) -> None:
        self.kept += values

    @rtr.method(keep=True)
    def store_own(self, *values: Any, **more: Any) -> list[bool]:
        """Whether each tensor is the only one on its memory."""
        assert all(value.flags.writeable for value in values if isinstance(value, numpy.ndarray))
        self.kept += [*values, *more.values()]
        tensors = [value for value in self.kept if isinstance(value, torch.Tensor)]
        return [tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors]

    @rtr.method
    def recall(self) -> list[Any]:
        return self.kept

    @rtr.method
    def give_freed(self, how: str) -> torch.Tensor:
        return FREED[how]()

    @rtr.method
    def is_huge(self, tensor: torch.Tensor) -> bool:
        return is_huge(tensor)

    @rtr.method(concurrent=True)
    def now(self) -> int:
        return os.getpid()

    def ask(self, target: str) -> None:
        """Have a result arrive, and take it later."""
        self.asked = rtr.rpc_async(target).echo(torch.ones(LARGE))
        assert wait_until(self.asked.done, 10)

    def take_asked(self) -> str:
        with pytest.raises(rtr.PeerLost) as caught:
            self.asked.wait()
        assert caught.value.may_have_run
        return str(caught.value)


class AsyncBuffer(Buffer):
    """The same on an event loop."""

    @rtr.method(keep=True)
    async def astore_own(self, *values: Any) -> None:
        self.kept += values


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> list[Any]:
    return [spawn_for_module(Buffer) for _ in range(3)]


@pytest.fixture(params=LANES)
def sender(request: pytest.FixtureRequest, actors: list[Any]) -> Iterator[Any]:
    """A member ``a`` whose tensors to ``b`` go by the lane in the parameter."""
    config = rtr.GroupConfig(lanes=LANES[request.param])
    with rtr.init_group(dict(zip("abc", actors, strict=True)), config=config):
        yield actors[0]


@pytest.fixture
def form(actors: list[Any]) -> Iterator[Callable[..., rtr.Group]]:
    """Forms a group with an arena of 64 MiB; ends it after the test, with nothing kept by anybody."""
    formed: list[rtr.Group] = []

    def form_one(*others: Any, **settings: Any) -> rtr.Group:
        members = dict(zip("abcd", [*actors, *others], strict=False))
        formed.append(rtr.init_group(members, config=rtr.GroupConfig(**{"shm_bytes": 64 * MIB, **settings})))
        return formed[-1]

    yield form_one
    for actor in actors:
        ray.get(actor.take_kept.remote(), timeout=60)
    for group in formed:
        group.shutdown()


# --- kinds -------------------------------------------------------------------------------------------------------


def _sparse(layout: torch.layout, size: int) -> torch.Tensor:
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else ()
    side = size * (2 if block else 1)
    steps, values = torch.arange(size + 1), torch.arange(float(size * (4 if block else 1))).view(size, *block)
    return torch.sparse_compressed_tensor(steps, steps[:-1], values, (side, side), layout=layout, check_invariants=True)


def _nested(layout: torch.layout, size: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(3.0 * size).view(size, 3), torch.ones(4, 3)], layout=layout)


def _quantized(dtype: torch.dtype, size: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(float(size)), 0.5, 3, dtype)


class Marked(torch.Tensor):
    """A subclass."""


class Pair(torch.Tensor):
    """A subclass made of two other tensors, as libraries for quantization have them."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)  # type: ignore[attr-defined]

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Pair, (self.first, self.second)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} was called while it was only carried")


def _channels_last(size: int) -> torch.Tensor:
    return torch.arange(24.0 * size).view(2, 3, 4, size).to(memory_format=torch.channels_last)


def _parts(value: Any) -> list[torch.Tensor]:
    """Dense tensors that tell two values apart."""
    if isinstance(value, numpy.ndarray):
        return [torch.from_numpy(numpy.ascontiguousarray(value))]
    if isinstance(value, Pair):
        return [value.first, value.second]
    if value.is_nested:
        return list(value.unbind())
    if value.is_quantized:
        return [value.int_repr(), value.dequantize()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return [(value.to_dense() if value.is_sparse else value.as_subclass(torch.Tensor)).resolve_conj()]


SIZES = {"small": 40, "large": 100_000}
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
KINDS: dict[str, Callable[[int], Any]] = {
    **{str(layout): lambda size, layout=layout: _sparse(layout, size) for layout in COMPRESSED},
    "sparse_coo": lambda size: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1] * size]), torch.ones(3 * size), (9,), check_invariants=True
    ),
    "nested": partial(_nested, torch.strided),
    "jagged": partial(_nested, torch.jagged),
    "qint8": partial(_quantized, torch.qint8),
    "quint8": partial(_quantized, torch.quint8),
    "qint32": partial(_quantized, torch.qint32),
    "quint4x2": partial(_quantized, torch.quint4x2),
    "subclass": lambda size: torch.arange(float(size)).as_subclass(Marked),
    "subclass of parts": lambda size: Pair(torch.arange(size), torch.ones(size, dtype=torch.bool)),
    "channels last": _channels_last,
    "transposed": lambda size: torch.arange(4.0 * size).view(4, size).T,
    "expanded": lambda size: torch.arange(4.0).expand(size, 4),
    "conjugated": lambda size: random((size,), torch.int16).to(torch.complex64).conj(),
    "array backwards": lambda size: numpy.arange(float(size))[::-1],
    "array in columns": lambda size: numpy.asfortranarray(numpy.arange(4.0 * size).reshape(4, size)),
    "array every other": lambda size: numpy.arange(8 * size).reshape(4, -1)[:, ::2],
}


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_value_arrives(sender: Any, size: str) -> None:
    def check(count: int) -> list[str]:
        wrong = []
        for kind, make in KINDS.items():
            value = make(count)
            for arrived in (rtr.rpc_sync("b").echo(value), rtr.rpc_sync("a").echo({"in": [value]})["in"][0]):
                equal = all(same(*both) for both in zip(_parts(arrived), _parts(value), strict=True))
                if not equal or type(arrived) is not type(value):
                    wrong.append(kind)
                if isinstance(arrived, torch.Tensor) and arrived.layout is not value.layout:
                    wrong.append(f"{kind}: {arrived.layout}")
                if kind in ("channels last", "transposed") and arrived.stride() != value.stride():
                    wrong.append(f"{kind}: {arrived.stride()}")
        return wrong

    assert in_actor(sender, check, SIZES[size]) == []


def test_every_dtype_arrives_small_and_large(sender: Any) -> None:
    def check() -> list[str]:
        wrong = []
        for dtype in ALL_DTYPES:
            for shape in ((3, 5), (700, 1000)):
                tensor = random(shape, dtype)
                values = [tensor, tensor.T, tensor[1:, ::2]]
                if not all(same(*both) for both in zip(rtr.rpc_sync("b").echo(values), values, strict=True)):
                    wrong.append(f"{dtype} {shape}")
        return wrong

    assert in_actor(sender, check) == []


def test_what_no_lane_can_carry_is_refused_by_name(sender: Any) -> None:
    def check() -> None:
        with pytest.raises(rtr.SerializationError, match=r"argument of b\.echo.*Opaque"):
            rtr.rpc_sync("b").echo(torch.ones(3, 3).to_mkldnn())
        assert rtr.rpc_sync("b").double(4) == 8

    in_actor(sender, check)


def test_a_tensor_whose_storage_was_freed_ends_no_process(sender: Any) -> None:
    """Whichever way it is to be read or written, it is refused by name."""

    def check() -> None:
        queue, store, model = rtr.Queue("freed"), rtr.WeightStore("freed"), {"x": torch.ones(2, 3)}
        store.publish(model)
        for how, make in FREED.items():
            for refused, said in (
                (lambda make=make: rtr.rpc_sync("b").echo(make()), r"argument of b\.echo"),
                (lambda make=make: rtr.remote("b").echo(make()).to_here(), r"argument of b\.echo"),
                (lambda how=how: rtr.rpc_sync("b").give_freed(how), r"the result of b\.give_freed"),
                (lambda make=make: rtr.rpc_sync("b", into=[make()]).echo(model["x"]), "buffer 0 of into="),
                (lambda make=make: queue.put({"x": make()}), "an item for queue 'freed'"),
                (lambda make=make: rtr.Topic("freed").publish(make()), "an item for topic 'freed'"),
                (lambda make=make: store.publish({"x": make()}), "'x' of the weights for 'freed'"),
                (lambda make=make: store.publish(iter([("x", make())])), "'x' of the weights for 'freed'"),
                (lambda make=make: store.pull({"x": make()}), "'x' of the weights for 'freed'"),
            ):
                with pytest.raises(rtr.RayTorchRpcError, match=f"(?s){said}.* has no memory: its storage was freed"):
                    refused()
        assert queue.qsize() == 0 and store.version() == 1 and rtr.rpc_sync("b").double(4) == 8

    in_actor(sender, check)


def use_like_any(target: str) -> None:
    """What programs do with tensors, whatever lane brings them and whatever comes with them."""
    text, small = ["secret" * 200_000], torch.arange(10.0)
    for others in ([], text, [torch.ones(20_000)], [torch.ones(400_000) for _ in range(3)]):
        kept = rtr.rpc_sync(target, timeout=60).echo([small, *others, torch.ones(60_000)])
        saved = pickle.dumps(kept[0])
        assert len(saved) < 1000 and b"secret" not in saved
        weight = torch.ones(1, requires_grad=True)
        loss = (weight * kept[0]).sum()
        kept[-1].mul_(2)  # not what the loss needs
        loss.backward()
        assert kept[0].resize_(20)[9] == 9 and kept[-1].resize_(100_000)[59_999] == 2
        kept[-1].untyped_storage().resize_(0)
    mask = torch.arange(3.0).expand(1000, 1000, 3)
    for arrived in (rtr.rpc_sync(target).echo(mask), rtr.rpc_sync(target).echo({"mask": [mask]})["mask"][0]):
        assert (arrived.shape, arrived.stride(), arrived.untyped_storage().nbytes()) == (mask.shape, mask.stride(), 12)
        assert torch.equal(arrived[999, 999], mask[0, 0])
    large = {"text": ["x" * (1 << 20)] * 3, "number": 7}
    assert rtr.rpc_sync(target).echo(large) == large
    with pytest.raises(rtr.ConfigurationError, match="it has 0 tensors, and into= 1"):
        rtr.rpc_sync(target, into=[torch.zeros(1)]).echo(large)


def test_what_arrives_is_used_like_what_ray_brings(sender: Any) -> None:
    in_actor(sender, partial(use_like_any, "b"))


@pytest.mark.parametrize("count", [40, LARGE])
def test_views_of_one_storage_arrive_apart(sender: Any, count: int) -> None:
    """By every lane, as with pickle. The same tensor twice stays one."""

    def check() -> None:
        whole = torch.zeros(2 * count)
        left, right, same_left = rtr.rpc_sync("b").echo([whole[: count + 5], whole[count:], whole[: count + 5]])
        left.fill_(1)
        same_left.fill_(2)
        assert not right.any()
        once, again = rtr.rpc_sync("b").echo([whole, whole])
        assert once is again
        array = numpy.zeros(2 * count)
        front, back = rtr.rpc_sync("b").echo([array[: count + 5], array[count:]])
        front.fill(1)
        assert not back.any()
        assert not whole.any() and not array.any()

    in_actor(sender, check)


# --- memory of one's own -------------------------------------------------------------------------------------------


def test_a_method_that_keeps_gets_memory_of_its_own(actors: list[Any], form: Callable[..., rtr.Group]) -> None:
    form()

    def send() -> int:
        large, array = torch.arange(float(LARGE)), numpy.arange(float(LARGE))
        for _ in range(3):
            small = [torch.full((100 + number,), number) for number in range(20)]
            lonely = rtr.rpc_sync("b").store_own(large, large.view(2, -1).T, array, small=small[3], another=small[4])
            assert all(lonely)
            large += 1
        return used()

    assert in_actor(actors[0], send) == 0, "the arena is not empty, though everything was copied out"
    kept = ray.get(actors[1].take_kept.remote(), timeout=60)
    for turn in range(3):
        large, turned, array, three, four = kept[5 * turn : 5 * turn + 5]
        assert torch.equal(large, torch.arange(float(LARGE)) + turn)
        assert torch.equal(turned.T.reshape(-1), large)
        assert (array == numpy.arange(float(LARGE))).all()
        assert (three == 3).all() and (four == 4).all()


def test_without_keep_what_is_kept_stays_in_the_senders_memory(
    actors: list[Any], form: Callable[..., rtr.Group]
) -> None:
    """What ``keep`` is for: the same calls without it."""
    form()

    def send(method: str) -> int:
        getattr(rtr.rpc_sync("b"), method)(torch.ones(LARGE), numpy.ones(LARGE))
        return used()

    assert in_actor(actors[0], send, "store") >= 12 * LARGE
    assert in_actor(actors[0], send, "store_own") >= 12 * LARGE
    ray.get(actors[1].take_kept.remote(), timeout=60)
    assert all_given_back(actors)


@pytest.mark.parametrize("verb", ["sync", "async"])
def test_a_caller_that_keeps_gets_memory_of_its_own(
    actors: list[Any], form: Callable[..., rtr.Group], verb: str
) -> None:
    form()

    def collect(verb: str) -> None:
        instance = insides.actor()
        for number in range(10):
            sent = {"tensor": torch.full((LARGE,), number), "array": numpy.full(LARGE, number)}
            if verb == "sync":
                instance.kept.append(rtr.rpc_sync("b", keep=True).echo(sent))
            else:
                instance.kept.append(rtr.rpc_async("b", keep=True).echo(sent).wait())

    in_actor(actors[0], collect, verb)
    assert all_given_back(actors), "what was kept is still in the sender's arena"
    kept = ray.get(actors[0].take_kept.remote(), timeout=60)
    assert [int(one["tensor"].sum()) for one in kept] == [number * LARGE for number in range(10)]
    assert [int(one["array"].sum()) for one in kept] == [number * LARGE for number in range(10)]


def test_a_coroutine_may_keep_too(spawn: Spawn, actors: list[Any], form: Callable[..., rtr.Group]) -> None:
    form(spawn(AsyncBuffer))

    def send() -> tuple[int, float]:
        rtr.rpc_sync("d").astore_own(torch.ones(LARGE))
        return used(), float(rtr.rpc_sync("d").recall()[0].sum())

    assert in_actor(actors[0], send) == (0, LARGE)


# --- what one member does to the others -------------------------------------------------------------------------------


def test_a_member_that_keeps_everything_does_not_push_the_others_off_shm(
    actors: list[Any], form: Callable[..., rtr.Group]
) -> None:
    group = form()

    def flood() -> int:
        for number in range(60):
            rtr.rpc_sync("b").store(torch.full((MIB // 2,), float(number)))
            assert float(rtr.rpc_sync("c").total(torch.ones(2 * MIB))) == 2 * MIB
        return used()

    assert 16 * MIB <= in_actor(actors[0], flood) <= 32 * MIB
    assert "torchrpc" not in bytes_by_lane(group, "a", "b") | bytes_by_lane(group, "a", "c")
    kept = ray.get(actors[1].take_kept.remote(), timeout=60)
    assert [float(tensor[-1]) for tensor in kept] == list(range(60))


def test_what_is_larger_than_the_arena_stays_in_the_message_with_one_warning(
    actors: list[Any], form: Callable[..., rtr.Group]
) -> None:
    group = form(shm_bytes=8 * MIB)

    def exchange() -> list[str]:
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("raytorchrpc").addHandler(handler)
        try:
            for count in (3, 4, 5):
                tensor = torch.arange(count * MIB)
                assert torch.equal(rtr.rpc_sync("b").echo(tensor), tensor)
                assert torch.equal(rtr.rpc_sync("c").echo(tensor), tensor)
        finally:
            logging.getLogger("raytorchrpc").removeHandler(handler)
        assert used() == 0
        return said

    (said,) = in_actor(actors[0], exchange)
    assert "go by socket instead of shm" in said and "8 MiB" in said and "shm_bytes" in said
    assert bytes_by_lane(group, "a", "b")["socket"][0] >= 12 * 8 * MIB


def test_what_a_killed_member_held_comes_back(spawn: Spawn, actors: list[Any], form: Callable[..., rtr.Group]) -> None:
    """In the middle of a call that holds its argument, and with results of its own on their way."""
    victim = spawn(Buffer)
    group = form(victim)

    def fill() -> int:
        rtr.rpc_sync("d").store(torch.ones(6 * MIB))
        assert rtr.rpc_sync("d").echo(torch.ones(MIB)).sum() == MIB
        future = rtr.rpc_async("d").echo(torch.ones(MIB))
        held = used()
        pid = rtr.rpc_sync("d").now()
        os.kill(pid, signal.SIGKILL)
        future.exception(30)
        assert wait_until(lambda: _is_over(pid), 30)  # its connections close before the last of it is gone
        return held

    def go_on() -> None:
        for _ in range(3):
            assert rtr.rpc_sync("b").total(torch.ones(12 * MIB)) == 12 * MIB

    assert in_actor(actors[0], fill) >= 24 * MIB
    in_actor(actors[0], go_on)
    assert "torchrpc" not in bytes_by_lane(group, "a", "b"), "the arena was full of what a dead member held"
    for actor in actors:
        in_actor(actor, gc.disable)
    try:
        group.shutdown()
        for actor in actors:
            assert in_actor(actor, _no_shared_memory), "the memory of a member that was killed is still mapped"
    finally:
        for actor in actors:
            in_actor(actor, gc.enable)


def _is_over(pid: int) -> bool:
    try:
        return not os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return True


def test_a_result_that_nobody_took_before_the_group_ended_is_refused(
    actors: list[Any], form: Callable[..., rtr.Group]
) -> None:
    group = form()
    ray.get(actors[0].ask.remote("b"), timeout=60)
    group.shutdown()
    assert "has left the group" in ray.get(actors[0].take_asked.remote(), timeout=60)


def _no_shared_memory() -> bool:
    """Without a garbage collection: what is gigabytes may not wait for one."""
    return wait_until(lambda: not any("raytorchrpc" in path for path in shared_mappings()), 20)


def test_a_member_that_stands_still_gives_back_when_it_goes_on(
    actors: list[Any], form: Callable[..., rtr.Group]
) -> None:
    """The deadline passes in the middle of the transfer: sent, and not taken."""
    form()
    pid = in_actor(actors[1], os.getpid)
    suspend(pid)
    try:

        def give_up() -> int:
            for _ in range(3):
                with pytest.raises((rtr.RpcTimeout, rtr.PeerLost)):
                    rtr.rpc_sync("b", timeout=0.2).total(torch.ones(LARGE))
            return used()

        assert in_actor(actors[0], give_up) >= 4 * LARGE
    finally:
        os.kill(pid, signal.SIGCONT)
    assert all_given_back(actors)


@pytest.mark.slow
def test_a_tensor_of_more_than_2_gib(actors: list[Any], form: Callable[..., rtr.Group]) -> None:
    group = form(shm_bytes=6 << 30)
    assert in_actor(actors[0], lambda: rtr.rpc_sync("b", timeout=100).is_huge(huge(2.1)))
    assert bytes_by_lane(group, "a", "b")["shm"][0] > 2 << 30
    assert all_given_back(actors)
    group.shutdown()
    assert in_actor(actors[0], _no_shared_memory)
    assert in_actor(actors[0], lambda: wait_until(lambda: resident_bytes() < 1 << 30, 20))
