"""CUDA tensors between actors under Ray's own masking: to the same and to another GPU, shared, to and from the CPU, and
out of memory that CUDA cannot share.

``a``, ``b`` and ``x`` are on one GPU, and ``x``'s memory comes from expandable segments; ``h`` has no GPU; ``c`` is on
another GPU, where there is one. Each actor sees its GPU as cuda:0.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import ray
import torch
from torch.distributed import autograd as dist_autograd

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until

pytestmark = pytest.mark.gpu

#: Elements: in float32 above and below what travels in a message.
LARGE, SMALL = 3_000_000, 1000
MAPS = {
    "a": {"b": {0: 0}, "h": {0: "cpu"}, "x": {0: 0}},
    "h": {"a": {"cpu": 0}},
}
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@ray.remote
class Worker:
    """Does with tensors what it is told."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("raytorchrpc").addHandler(handler)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    @rtr.method
    def echo(self, value: Any) -> Any:
        return value

    @rtr.method
    def describe(self, value: dict[str, Any]) -> dict[str, Any]:
        return {key: describe(item) for key, item in value.items()}

    @rtr.method
    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @rtr.method
    def zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, device="cuda")

    @rtr.method
    def add_later(self, tensor: torch.Tensor, value: float) -> None:
        """Only queued when it returns."""
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            tensor.add_(value)

    @rtr.method
    def keep_and_add_later(self, tensor: torch.Tensor, value: float) -> None:
        self.kept["tensor"] = tensor
        self.add_later(tensor, value)

    @rtr.method(share=True)
    def state(self) -> torch.Tensor:
        return self.kept["state"]  # type: ignore[no-any-return]

    @rtr.method(share=True)
    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @rtr.method
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_cuda
        return tensor @ self.kept["weight"]

    @rtr.method
    def gradient(self, context: int) -> torch.Tensor:
        return dist_autograd.get_gradients(context)[self.kept["weight"]].cpu()


def describe(item: Any) -> tuple[Any, ...]:
    if isinstance(item, torch.Tensor):
        total = float(item.detach().double().sum())
        return str(item.device), type(item).__name__, item.requires_grad, item.is_leaf, total
    return type(item).__name__, float(numpy.sum(item))


def on(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    return ray.get(actor.run.remote(function, *args), timeout=60)


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=8)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    made = {name: Worker.options(num_gpus=0.3, num_cpus=0).remote() for name in "ab"}
    segments = {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    made["x"] = Worker.options(num_gpus=0.3, num_cpus=0, runtime_env=segments).remote()
    ray.get([actor.run.remote(lambda self: torch.cuda.init()) for actor in made.values()], timeout=60)
    made["h"] = Worker.options(num_cpus=0).remote()
    if gpus > 1:
        made["c"] = Worker.options(num_gpus=1, num_cpus=0).remote()
    yield made
    ray.shutdown()


@pytest.fixture(scope="module")
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    elsewhere = {"c": {0: 0}} if "c" in actors else {}
    maps = {**MAPS, "a": {**MAPS["a"], **elsewhere}}
    with rtr.init_group(actors, config=rtr.GroupConfig(device_maps=maps, shm_bytes=1 << 30)) as group:
        yield group


@pytest.fixture
def a(actors: dict[str, Any], group: rtr.Group) -> Any:
    return actors["a"]


@pytest.fixture
def h(actors: dict[str, Any], group: rtr.Group) -> Any:
    return actors["h"]


def lanes_used(group: rtr.Group, caller: str, peer: str) -> dict[str, tuple[int, int]]:
    """Bytes out and in, by lane."""
    rows = (row for row in group.stats() if (row.caller, row.peer) == (caller, peer))
    return {row.lane: (row.bytes_out, row.bytes_in) for row in rows}


def all_back(sender: Any, receiver: Any) -> bool:
    """Whether the sender has everything back once the receiver keeps nothing."""

    def drop(self: Any) -> None:
        self.kept.clear()
        gc.collect()

    def nothing_out(self: Any) -> bool:
        gc.collect()
        lane = insides.tensor_lane("cuda_ipc")
        return wait_until(lambda: not lane.outstanding, 5)

    on(receiver, drop)
    return bool(on(sender, nothing_out))


def test_a_map_to_a_gpu_that_does_not_exist_is_refused_before_anything_starts(actors: dict[str, Any]) -> None:
    """The first test of this file: afterwards the actors are in the group of the others."""
    pair = {name: actors[name] for name in "ab"}
    with pytest.raises(rtr.ConfigurationError, match="GPU 7"):
        rtr.init_group(pair, name="wrong", config=rtr.GroupConfig(device_maps={"a": "1_0_7"}))
    rtr.init_group(pair, name="right").shutdown()


# --- GPU to GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["b", pytest.param("c", marks=pytest.mark.gpu(2))])
def peer(request: pytest.FixtureRequest) -> str:
    """On the same GPU, and on another."""
    return str(request.param)


def test_arguments_arrive_on_the_mapped_gpu_and_results_on_the_callers(a: Any, group: rtr.Group, peer: str) -> None:
    assert group.device_map("a", peer) == {0: 0}

    def call(self: Any) -> None:
        for size in (6, LARGE, 25_000_000):
            result = rtr.rpc_sync(peer).double(torch.ones(size, device="cuda"))
            assert str(result.device) == "cuda:0" and bool((result == 2.0).all())
        back = rtr.rpc_sync(peer).echo({"cpu": torch.ones(3), "inner": [torch.ones(3, device="cuda")]})
        assert (back["cpu"].device.type, str(back["inner"][0].device)) == ("cpu", "cuda:0")
        for _ in range(2):  # a call without tensors; the second one takes the short way
            made = rtr.rpc_sync(peer).zeros(5)
            assert str(made.device) == "cuda:0" and made.tolist() == [0.0] * 5

    on(a, call)


def test_many_tensors_in_flight_keep_their_values(a: Any, peer: str) -> None:
    assert on(a, stress, peer, "cuda", 400) == 0


def stress(self: Any, peer: str, device: str, rounds: int) -> int:
    """Sizes and values change at once, so that memory handed out too early would show."""
    wrong, futures = 0, []
    for number in range(rounds):
        mine = torch.full((1 + number * 9770 % 900_000,), float(number), device=device)
        futures.append((number, len(mine), rtr.rpc_async(peer).double(mine)))
        if len(futures) > 8 or number == rounds - 1:
            expected, length, future = futures.pop(0)
            result = future.wait()
            wrong += not (len(result) == length and bool((result == 2.0 * expected).all()))
    for _, _, future in futures:
        future.wait()
    return wrong


@pytest.mark.parametrize(
    ("caller", "callee"), [("a", "b"), pytest.param("a", "c", marks=pytest.mark.gpu(2)), ("h", "a")]
)
def test_gradients_cross_with_their_tensors(actors: dict[str, Any], group: rtr.Group, caller: str, callee: str) -> None:
    def make(self: Any) -> None:
        self.kept["weight"] = torch.full((4, 4), 2.0, device="cuda", requires_grad=True)

    def train(self: Any) -> tuple[torch.Tensor, torch.Tensor]:
        device = "cpu" if caller == "h" else "cuda"
        mine = torch.full((4, 4), 3.0, device=device, requires_grad=True)
        x = torch.arange(16.0, device=device).reshape(4, 4)
        with dist_autograd.context() as context:
            y = rtr.rpc_sync(callee).forward(x @ mine)
            assert y.device.type == device
            dist_autograd.backward(context, [y.sum()])
            return dist_autograd.get_gradients(context)[mine].cpu(), rtr.rpc_sync(callee).gradient(context)

    on(actors[callee], make)
    mine, its = on(actors[caller], train)
    first, second = torch.full((4, 4), 3.0, requires_grad=True), torch.full((4, 4), 2.0, requires_grad=True)
    (torch.arange(16.0).reshape(4, 4) @ first @ second).sum().backward()
    assert torch.allclose(mine, first.grad) and torch.allclose(its, second.grad)


# --- one GPU, shared -----------------------------------------------------------------------------------------------


def test_the_plan_knows_who_is_on_one_gpu(actors: dict[str, Any], group: rtr.Group) -> None:
    uuids = [on(actors[name], lambda self: str(torch.cuda.get_device_properties(0).uuid)) for name in "abx"]
    assert len(set(uuids)) == 1
    assert group.routes().route("a", "b").same_gpus == ((0, 0),)
    assert "share=True shares the memory of cuda:0 of a, which is cuda:0 of b" in group.explain("a", "b")
    assert group.routes().route("a", "h").same_gpus == ()
    if "c" in actors:
        assert group.routes().route("a", "c").same_gpus == ()


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_shared_argument_is_the_callers_own_and_the_callers_work_follows(a: Any, peer: str, size: int) -> None:
    """For another GPU, it is copied."""
    shared = peer == "b"

    def call(self: Any) -> None:
        for number in range(3):
            mine = torch.zeros(size, device="cuda")
            rtr.rpc_sync(peer).add_later(mine, 1.0)
            assert float(mine.sum()) == 0.0, "without share it is a copy"
            rtr.rpc_sync(peer, share=True).add_later(mine, 2.0 + number)
            assert float(mine.sum()) == (2.0 + number) * size * shared
            rtr.rpc_async(peer, share=True).keep_and_add_later(mine, 1.0).wait()  # it keeps it
            assert float(mine.sum()) == (3.0 + number) * size * shared

    on(a, call)


def test_a_shared_result_is_the_callees_own_state(a: Any, actors: dict[str, Any]) -> None:
    def make(self: Any) -> None:
        self.kept["state"] = torch.arange(float(LARGE), device="cuda").view(3, -1).t()

    def take(self: Any) -> None:
        state = rtr.rpc_sync("b").state()
        assert state.shape == (LARGE // 3, 3) and not state.is_contiguous()
        state.fill_(2.0)
        torch.cuda.synchronize()

    on(actors["b"], make)
    before = on(actors["b"], lambda self: torch.cuda.memory_allocated())
    on(a, take)
    assert on(actors["b"], lambda self: float(self.kept["state"].sum())) == 2.0 * LARGE
    assert on(actors["b"], lambda self: torch.cuda.memory_allocated()) == before


def test_what_came_shared_goes_back_as_a_copy(a: Any) -> None:
    def call(self: Any) -> None:
        mine = torch.ones(LARGE, device="cuda")
        back = rtr.rpc_sync("b", share=True).same(mine)
        back.zero_()
        assert float(mine.sum()) == LARGE
        assert not any("instead of cuda_ipc" in message for message in self.messages), self.messages

    on(a, call)


def test_many_shared_calls_leave_nothing(a: Any, actors: dict[str, Any]) -> None:
    def stress(self: Any) -> int:
        wrong = 0
        for number in range(150):
            mine = torch.full((1 + number * 977 % 50_000,), float(number), device="cuda")
            result = rtr.rpc_sync("b", share=number % 3 > 0).double(mine)
            wrong += not bool((result == 2.0 * number).all())
        return wrong

    assert on(a, stress) == 0
    assert all_back(a, actors["b"])


# --- CPU to GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_cpu_arguments_arrive_on_the_gpu_and_its_results_on_the_cpu(h: Any, size: int) -> None:
    def call(self: Any) -> None:
        for value in (1.0, 2.0):
            given = {
                "tensor": torch.full((size,), value),
                "array": numpy.full(size, value),
                "turned": torch.ones(4, size).t(),
            }
            seen = rtr.rpc_sync("a").describe(given)
            assert seen["tensor"][0] == seen["turned"][0] == "cuda:0"
            assert seen["tensor"][-1] == value * size and seen["turned"][-1] == 4.0 * size
            assert seen["array"] == ("ndarray", value * size), "an array stays what it is"
            back = rtr.rpc_sync("a").echo(given)
            assert back["tensor"].device.type == back["turned"].device.type == "cpu"
            assert torch.equal(back["tensor"], given["tensor"]) and torch.equal(back["turned"], given["turned"])
            assert numpy.array_equal(back["array"], given["array"])

    on(h, call)


def test_each_dtype_crosses_both_ways(a: Any, h: Any) -> None:
    def call(self: Any, peer: str, device: str) -> None:
        for dtype in DTYPES:
            for shape in ((5, 7), (700, 1000), (0, 3), ()):
                mine = torch.randint(0, 2, shape, device=device).to(dtype)
                back = rtr.rpc_sync(peer).echo(mine)
                assert back.device.type == "cpu" and back.dtype is dtype and back.shape == mine.shape
                assert (
                    torch.equal(back.view(torch.uint8), mine.cpu().view(torch.uint8)) if shape else back == mine.cpu()
                )

    on(h, call, "a", "cpu")
    on(a, call, "h", "cuda")


# --- GPU to CPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_cuda_arguments_arrive_on_the_cpu(a: Any, group: rtr.Group, size: int) -> None:
    def call(self: Any) -> None:
        for value in (1.0, 2.0):
            base = torch.full((2, size), value, device="cuda")
            given = {"tensor": base[0], "turned": base.t(), "own": torch.full((size,), 5.0)}
            seen = rtr.rpc_sync("h").describe(given)
            assert [seen[key][0] for key in given] == ["cpu"] * 3
            assert [seen[key][-1] for key in given] == [value * size, 2 * value * size, 5.0 * size]
            torch.cuda._sleep(50_000_000)
            late = torch.full((size,), value + 1, device="cuda")  # made only later
            assert rtr.rpc_sync("h").describe({"late": late})["late"][-1] == (value + 1) * size
            assert rtr.rpc_sync("h").echo(late).device.type == "cpu", "a CPU result stays one"

    before = lanes_used(group, "a", "h")
    on(a, call)
    after = lanes_used(group, "a", "h")
    if size == LARGE:
        assert after["shm"][0] - before.get("shm", (0, 0))[0] > 16 * LARGE
    assert after.get("torchrpc") == before.get("torchrpc")


def test_many_that_cross_keep_their_values_and_give_their_memory_back(a: Any, h: Any) -> None:
    def given_back(self: Any) -> bool:
        lane = insides.tensor_lane("shm")
        gc.collect()
        return wait_until(lambda: lane.in_use() == 0, 5)

    assert on(h, stress, "a", "cpu", 120) == 0
    assert on(a, stress, "h", "cuda", 120) == 0
    for actor in (a, h):
        on(actor, lambda self: gc.collect())
    assert on(h, given_back) and on(a, given_back)


def test_a_tensor_without_a_way_names_both_remedies(actors: dict[str, Any], group: rtr.Group) -> None:
    def call(self: Any) -> None:
        rtr.rpc_sync("h").echo(torch.ones(3, device="cuda"))

    assert group.device_map("b", "h") == {}
    with pytest.raises(
        rtr.LaneUnavailable, match=r"cuda:0 has no mapping to member 'h' .device map: empty.*or to 'cpu'"
    ):
        on(actors["b"], call)


# --- memory that CUDA cannot share -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
def test_expandable_segments_cross_through_the_cpu_and_say_why(
    actors: dict[str, Any], group: rtr.Group, share: bool
) -> None:
    def call(self: Any, share: bool) -> list[str]:
        mine = torch.arange(float(LARGE), device="cuda")
        assert any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
        for _ in range(2):
            result = rtr.rpc_sync("a", share=share).double(mine)
            assert result.is_cuda and torch.equal(result, mine * 2)
        return [message for message in self.messages if "instead of cuda_ipc" in message]

    before = lanes_used(group, "x", "a").get("socket", (0, 0))[0]
    (message,) = on(actors["x"], call, share)
    assert "expandable_segments:True" in message and "PYTORCH_CUDA_ALLOC_CONF" in message
    assert lanes_used(group, "x", "a")["socket"][0] - before >= 8 * LARGE
