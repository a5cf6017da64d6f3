"""Any object to (bytes, tensors) and back, without Ray and without a wire."""

from __future__ import annotations

import collections
import dataclasses
import io
import pickle
import re
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from raytorchrpc.errors import SerializationError
from raytorchrpc.tensors.codec import LIFT_BUFFER_BYTES, Codec


class ByValue(pickle.Pickler):
    """As cloudpickle does it: functions that cannot be imported travel as code, by ``reducer_override``."""

    def __init__(self, file: io.BytesIO, protocol: int | None = None, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and "<" in obj.__qualname__:
            import marshal

            cells = tuple(cell.cell_contents for cell in obj.__closure__ or ())
            return _make_function, (marshal.dumps(obj.__code__), obj.__name__, obj.__defaults__, cells)
        return NotImplemented


def _make_function(code: bytes, name: str, defaults: Any, cells: tuple[Any, ...]) -> Any:
    import marshal

    closure = tuple(types.CellType(value) for value in cells)
    return types.FunctionType(marshal.loads(code), globals(), name, defaults, closure)


@pytest.fixture
def codec() -> Codec:
    return Codec()


def through(obj: Any, codec: Codec | None = None) -> Any:
    """Encode and decode, as if a lane had copied the tensors."""
    codec = codec or Codec()
    encoded = codec.encode(obj)
    copied = [tensor.clone() for tensor in encoded.tensors]
    return codec.decode(encoded.payload, copied, encoded.rrefs, encoded.buffers)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit (NaN too), in type and shape."""
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
#: Without the quantized ones, and those that torch itself cannot copy.
PLAIN_DTYPES = [dtype for dtype in DTYPES if not re.match(r"torch\.(q|bits|u?int[1-7]$)", str(dtype))]


# --- tensors -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_is_lifted_without_a_copy(codec: Codec, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(2, 3)
    encoded = codec.encode({"x": tensor})
    assert [lifted.data_ptr() for lifted in encoded.tensors] == [tensor.data_ptr()]
    assert len(encoded.payload) < 400
    assert same(through({"x": tensor})["x"], tensor)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4], ids=str)
def test_quantized_tensors_arrive_whole(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():  # torch wants them gone one day
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.tensor([-1.0, 0.0, 2.0]), 0.1, 3, dtype)
        arrived = through([tensor])[0]
        assert arrived.dtype == dtype
        assert torch.equal(arrived.dequantize(), tensor.dequantize())


def test_a_large_tensor_adds_nothing_to_the_payload_and_is_the_callers_own(codec: Codec) -> None:
    tensor = torch.zeros(10_000_000)
    encoded = codec.encode([tensor, tensor[5:]])
    assert len(encoded.payload) < 400
    assert encoded.tensors[0].data_ptr() == tensor.data_ptr()
    assert encoded.tensors[1].data_ptr() == tensor[5:].data_ptr()
    whole, tail = codec.decode(*encoded)
    assert whole.data_ptr() == tensor.data_ptr()
    assert tail.data_ptr() == tensor[5:].data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0),
        lambda: torch.empty(0, 7, dtype=torch.int16),
        lambda: torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        lambda: torch.arange(12.0).view(3, 4).T,
        lambda: torch.arange(20)[::3],
        lambda: torch.arange(3.0).expand(5, 3),
        lambda: torch.arange(8.0).view(1, 2, 2, 2).to(memory_format=torch.channels_last),
    ],
    ids=["scalar", "empty", "empty 2d", "permuted", "transposed", "strided", "expanded", "channels last"],
)
def test_every_shape_and_stride(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    arrived = through(tensor)
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        lambda: torch.arange(12.0).view(3, 4).T,
        lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.arange(240.0).view(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d).requires_grad_(),
        lambda: torch.nn.Parameter(torch.arange(12.0).view(3, 4).T),
        lambda: torch.arange(12.0).view(3, 4).T.as_subclass(Marked),
    ],
    ids=["permuted", "transposed", "channels last", "channels last 3d", "parameter", "subclass"],
)
def test_a_dense_tensor_keeps_its_strides_and_is_not_copied(codec: Codec, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    encoded = codec.encode(tensor)
    assert encoded.tensors[0].is_contiguous(), "a lane would copy it element by element"
    assert encoded.tensors[0].data_ptr() == tensor.data_ptr()
    arrived = through(tensor)
    assert arrived.stride() == tensor.stride()
    assert type(arrived) is type(tensor)
    assert torch.equal(arrived, tensor)


def test_two_views_of_one_storage_arrive_apart_and_one_tensor_twice_as_one() -> None:
    """As with pickle: what two views share is not told, however the lane carries them."""
    whole = torch.arange(10.0)
    left, right, again = through([whole[:6], whole[4:], whole.view(10)])
    left.fill_(1)
    assert right.tolist() == [4, 5, 6, 7, 8, 9]
    assert again.tolist() == whole.tolist()

    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    arrived = through(module)
    assert arrived[1].weight is arrived[0].weight, "tied parameters stay tied"


def test_many_tensors_together_arrive_as_each_alone(codec: Codec) -> None:
    """A container of many is taken apart at once, if nothing in it needs more."""
    noted, freed = torch.ones(3), torch.ones(1000)
    noted.note = "mine"  # type: ignore[attr-defined]
    freed.untyped_storage().resize_(0)
    others = [torch.full((2,), float(number)) for number in range(20)]
    turned = torch.arange(12.0).view(3, 4).T
    assert through([*others, noted])[20].note == "mine"
    assert through({str(index): tensor for index, tensor in enumerate([*others, turned])})["20"].stride() == (1, 4)
    assert [tensor.shape for tensor in through([*others, torch.empty(0, 3)])[19:]] == [(2,), (0, 3)]
    with pytest.raises(SerializationError, match="has no memory"):
        codec.encode([*others, freed])


def test_attributes_of_a_tensor_travel_with_it() -> None:
    """As with pickle."""
    tensor, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    tensor.note, parameter.partner = "mine", tensor  # type: ignore[attr-defined]
    arrived, arrived_parameter = through([tensor, parameter])
    assert arrived.note == "mine"
    assert arrived_parameter.partner is arrived
    assert isinstance(through(torch.nn.Buffer(torch.ones(3))), torch.nn.Buffer)


def test_a_tensor_whose_storage_was_freed_is_refused(codec: Codec) -> None:
    """As FSDP does between its uses of a parameter; a lane that read it would end the process."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match=r"shape \(1000,\) has no memory"):
        codec.encode({"x": tensor})
    assert codec.encode(torch.empty(0, 3)).tensors


def test_conjugated_and_negated_views_arrive_as_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for view in (tensor.conj(), tensor.conj().imag):
        assert view.is_conj() or view.is_neg()
        assert torch.equal(through(view), view.resolve_conj().resolve_neg())


def test_the_same_tensor_twice_is_one_tensor_there(codec: Codec) -> None:
    tensor = torch.ones(3)
    encoded = codec.encode({"a": tensor, "b": [tensor]})
    assert len(encoded.tensors) == 1
    arrived = codec.decode(*encoded)
    assert arrived["a"] is arrived["b"][0]


def test_requires_grad_is_kept_and_the_arrival_is_a_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        arrived = through(tensor)
        assert arrived.requires_grad
        assert arrived.is_leaf
    assert not through(torch.ones(2)).requires_grad


def test_a_parameter_stays_a_parameter() -> None:
    weight, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    arrived = through((weight, frozen))
    assert [type(parameter) for parameter in arrived] == [torch.nn.Parameter] * 2
    assert [parameter.requires_grad for parameter in arrived] == [True, False]


def test_keep_graph_lifts_the_tensor_with_its_history(codec: Codec) -> None:
    leaf = torch.nn.Parameter(torch.ones(2))
    product = leaf * 3
    encoded = codec.encode([product, leaf, torch.ones(1)], keep_graph=True)
    assert encoded.tensors[0].grad_fn is product.grad_fn
    arrived = codec.decode(*encoded)
    (arrived[0].sum() + arrived[1].sum()).backward()
    assert torch.equal(leaf.grad, torch.full((2,), 4.0))
    assert not arrived[2].requires_grad


def test_without_keep_graph_nothing_leads_back_to_the_sender(codec: Codec) -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in codec.encode(leaf * 2).tensors)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.eye(4).to_sparse_bsc((2, 2)),
        lambda: torch.sparse_coo_tensor([[0, 0, 1], [0, 0, 1]], [1.0, 2.0, 3.0], (4, 4)),
        lambda: torch.zeros(4, 4).to_sparse().to(torch.bfloat16),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc", "not coalesced", "nothing in it"],
)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    arrived = through(tensor)
    assert (arrived.layout, arrived.dtype) == (tensor.layout, tensor.dtype)
    if tensor.layout is torch.sparse_coo:
        assert arrived.is_coalesced() == tensor.is_coalesced()
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors(layout: torch.layout) -> None:
    rows = [torch.arange(6.0).view(2, 3), torch.ones(4, 3), torch.empty(0, 3)]
    arrived = through(torch.nested.nested_tensor(rows, layout=layout))
    assert arrived.is_nested and arrived.layout is layout
    assert all(torch.equal(*both) for both in zip(arrived.unbind(), rows, strict=True))


def test_meta_tensors_arrive_with_their_shape() -> None:
    arrived = through(torch.empty(3, 4, device="meta", dtype=torch.int8))
    assert arrived.is_meta
    assert (arrived.shape, arrived.dtype) == ((3, 4), torch.int8)


class Marked(torch.Tensor):
    """A subclass with nothing of its own."""

    note: str


class Wrapping(torch.Tensor):
    """As FP8 and quantization libraries make them: a tensor made of other tensors."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapping, (self.inner,)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} was called while it was only carried")


def test_tensor_subclasses_keep_their_class(codec: Codec) -> None:
    marked = torch.arange(10_000.0).as_subclass(Marked)
    marked.note = "mine"
    encoded = codec.encode(marked)
    assert [tensor.data_ptr() for tensor in encoded.tensors] == [marked.data_ptr()], "lifted as any other"
    arrived = through(marked)
    assert type(arrived) is Marked
    assert arrived.note == "mine"
    assert torch.equal(arrived.as_subclass(torch.Tensor), torch.arange(10_000.0))
    arrived = through(torch.ones(3).as_subclass(Marked).requires_grad_())
    assert type(arrived) is Marked and arrived.requires_grad and arrived.is_leaf
    product = torch.ones(3, requires_grad=True).as_subclass(Marked) * 2
    kept = codec.decode(*codec.encode(product, keep_graph=True))
    assert type(kept) is Marked and kept.grad_fn is not None

    inner = torch.arange(100_000, dtype=torch.int8)
    encoded = codec.encode(Wrapping(inner))
    assert [tensor.data_ptr() for tensor in encoded.tensors] == [inner.data_ptr()]  # its parts are lifted
    wrapped = codec.decode(*encoded)
    assert type(wrapped) is Wrapping
    assert torch.equal(wrapped.inner, inner)


# --- numpy ---------------------------------------------------------------------------------------------------

LARGE = LIFT_BUFFER_BYTES  # in float64 elements: far above the limit


@pytest.mark.parametrize("order", ["C", "F"])
def test_large_arrays_are_lifted_without_a_copy(codec: Codec, order: Any) -> None:
    array = numpy.asarray(numpy.arange(LARGE, dtype=numpy.float64).reshape(16, -1), order=order)
    encoded = codec.encode({"a": array})
    assert encoded.buffers == 1
    assert encoded.tensors[-1].data_ptr() == array.ctypes.data
    assert len(encoded.payload) < 400
    arrived = codec.decode(*encoded)["a"]
    assert arrived.ctypes.data == array.ctypes.data
    assert (arrived.dtype, arrived.flags.f_contiguous) == (array.dtype, array.flags.f_contiguous)
    numpy.testing.assert_array_equal(arrived, array)


def test_read_only_arrays_as_they_come_from_rays_store(codec: Codec) -> None:
    array = numpy.arange(LARGE)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of each read-only buffer
        encoded = codec.encode(array)
    address = array.ctypes.data
    assert encoded.tensors[0].data_ptr() == address
    expected = array.copy()
    del array  # the lifted tensor alone keeps the memory
    numpy.testing.assert_array_equal(encoded.tensors[0].numpy().view(expected.dtype), expected)


def test_small_arrays_and_arrays_of_objects_travel_in_the_payload(codec: Codec) -> None:
    for array in (numpy.arange(10), numpy.arange(20)[::-2], numpy.array(["a", None] * LARGE, dtype=object)[::2]):
        encoded = codec.encode(array)
        assert encoded.buffers == 0
        numpy.testing.assert_array_equal(codec.decode(*encoded), array)


@pytest.mark.parametrize(
    "turn",
    [
        lambda array: array[::2],
        lambda array: array[::-1],
        lambda array: array.reshape(4, -1)[:, ::-3],
        lambda array: array.reshape(4, 8, -1).transpose(1, 0, 2),
        lambda array: numpy.broadcast_to(array, (2, array.size)),
    ],
    ids=["every other", "backwards", "backwards in rows", "transposed", "broadcast"],
)
def test_arrays_that_are_not_contiguous_are_copied_once_and_lifted(codec: Codec, turn: Callable[..., Any]) -> None:
    array = turn(numpy.arange(2 * LARGE))
    encoded = codec.encode([array, array])
    assert encoded.buffers == 1, "it is one array, twice"
    assert len(encoded.payload) < 400
    first, second = codec.decode(*encoded)
    assert first is second
    numpy.testing.assert_array_equal(first, array)
    first[...] = 0
    assert array.any(), "the sender's own was written"


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "complex128", "datetime64[s]", "U5", "i4,f8"])
def test_array_dtypes(dtype: str) -> None:
    array = numpy.zeros(LARGE * 2, dtype=dtype)
    arrived = through(array)
    assert arrived.dtype == array.dtype
    numpy.testing.assert_array_equal(arrived, array)


def test_tensors_and_arrays_in_one_object_find_their_own_places(codec: Codec) -> None:
    obj = [numpy.full(LARGE, 1.0), torch.full((3,), 2.0), numpy.full(LARGE, 3.0), torch.full((4,), 4.0)]
    encoded = codec.encode(obj)
    assert encoded.buffers == 2
    assert [len(part) for part in through(obj)] == [LARGE, 3, LARGE, 4]
    assert [float(part[0]) for part in through(obj)] == [1.0, 2.0, 3.0, 4.0]


# --- objects -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    extra: dict[str, Any]
    parent: Batch | None = None


Pair = collections.namedtuple("Pair", "left right")


def test_tensors_anywhere_inside_nested_objects() -> None:
    inner = Batch(torch.arange(3), {"list": [torch.ones(2), (torch.zeros(1),)]})
    outer = Batch(torch.arange(4), {"pair": Pair(torch.ones(1), {1, 2}), "array": numpy.arange(LARGE)}, inner)
    arrived = through(outer)
    assert isinstance(arrived, Batch) and isinstance(arrived.parent, Batch)
    assert torch.equal(arrived.inputs, torch.arange(4))
    assert torch.equal(arrived.parent.extra["list"][1][0], torch.zeros(1))
    assert arrived.extra["pair"].right == {1, 2}
    assert torch.equal(arrived.extra["pair"].left, torch.ones(1))


def test_state_dicts_and_whole_modules(codec: Codec) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    state = module.state_dict()
    encoded = codec.encode(state)
    assert len(encoded.payload) < 2000
    arrived = through(state)
    assert isinstance(arrived, collections.OrderedDict)
    assert arrived._metadata == state._metadata
    fresh = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    fresh.load_state_dict(arrived)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), module.parameters(), strict=True))

    copied = through(module)
    assert all(type(parameter) is torch.nn.Parameter for parameter in copied.parameters())
    x = torch.ones(2, 300)
    module.eval(), copied.eval()
    assert torch.equal(copied(x), module(x))


def test_an_object_that_contains_itself() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    arrived = through(loop)
    assert arrived[1] is arrived


def test_functions_by_value_with_the_pickler_that_knows_them() -> None:
    weight = torch.arange(3.0)
    codec = Codec(ByValue)
    encoded = codec.encode(lambda x: x * weight)
    assert [tensor.data_ptr() for tensor in encoded.tensors] == [weight.data_ptr()]  # in the closure, still lifted
    assert torch.equal(codec.decode(*encoded)(2), torch.tensor([0.0, 2.0, 4.0]))
    with pytest.raises(SerializationError):
        Codec().encode(lambda: None)


def test_a_decode_inside_a_decode(codec: Codec) -> None:
    """User code that runs while unpickling may use the codec itself."""
    outer = codec.encode([Nested(torch.ones(2)), torch.zeros(3)])
    nested, after = codec.decode(*outer)
    assert torch.equal(nested.value, torch.ones(2))
    assert torch.equal(after, torch.zeros(3))


class Nested:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __getstate__(self) -> Any:
        return tuple(Codec().encode(self.value))

    def __setstate__(self, state: Any) -> None:
        self.value = Codec().decode(*state)


def test_threads_do_not_mix_their_tables(codec: Codec) -> None:
    wrong: list[int] = []
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        encoded = codec.encode([torch.full((3,), number)] * 3)
        barrier.wait(10)
        for _ in range(300):
            if any(int(tensor[0]) != number for tensor in codec.decode(*encoded)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Unwilling:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


@pytest.mark.parametrize(
    ("obj", "names"),
    [
        (threading.Lock(), "lock"),
        ((number for number in ()), "generator"),
        (Unwilling(), "RuntimeError: I stay here"),
        ([{"deep": io.StringIO}, {"deep": open}, threading.Event()], "lock"),
    ],
)
def test_what_cannot_be_pickled_is_named(codec: Codec, obj: Any, names: str) -> None:
    with pytest.raises(SerializationError, match=names) as caught:
        codec.encode({"key": obj})
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None
    assert codec.decode(*codec.encode([torch.ones(1)]))[0] == 1  # and the codec goes on


def test_a_tensor_without_memory_of_its_own_is_refused_like_any_other_object(codec: Codec) -> None:
    with pytest.raises(SerializationError, match="data pointer"):
        torch.func.vmap(codec.encode)(torch.ones(2, 2))


def test_a_recursion_too_deep_is_an_error_not_a_crash(codec: Codec) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(SerializationError, match="RecursionError"):
        codec.encode(nested)
    while nested:  # taken apart by hand: letting go of it at once recurses as deeply
        nested = nested[0]


# --- containers full of tensors ----------------------------------------------------------------------------------


def _many(count: int = 20) -> list[torch.Tensor]:
    return [torch.full((2, 3), number, dtype=torch.float32) for number in range(count)]


@pytest.mark.parametrize(
    "make",
    [
        _many,
        lambda: tuple(_many()),
        lambda: {str(number): tensor for number, tensor in enumerate(_many())},
        lambda: ((_many(), 3, "text", {"more": _many(9), "one": torch.ones(2)}), {"key": tuple(_many())}),
        lambda: {1: _many(), None: 2.5},
    ],
    ids=["list", "tuple", "dict", "arguments", "a dict with other keys"],
)
def test_containers_full_of_tensors_arrive_as_they_were(codec: Codec, make: Callable[[], Any]) -> None:
    sent = make()
    payload = codec.encode(sent).payload
    assert payload.count(b"_take_tensor") <= 1, "taken apart one by one"
    arrived = through(sent)
    assert pickle.dumps(jsonable(arrived)) == pickle.dumps(jsonable(sent))


def jsonable(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.tolist()
    if isinstance(obj, dict):
        return [type(obj).__name__, [(key, jsonable(value)) for key, value in obj.items()]]
    return [type(obj).__name__, *map(jsonable, obj)] if isinstance(obj, (list, tuple)) else obj


def test_a_modules_state_dict_keeps_its_metadata(codec: Codec) -> None:
    state = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(8)]).state_dict()
    arrived = through(state)
    assert type(arrived) is type(state)
    assert list(arrived) == list(state)
    assert arrived._metadata == state._metadata
    assert all(torch.equal(arrived[key], state[key]) for key in state)


def test_what_is_one_object_stays_one_object_in_large_containers_too() -> None:
    one, many = torch.ones(2), _many()
    arrived = through([one] * 10)
    assert all(tensor is arrived[0] for tensor in arrived)
    first, second = through((many, many))
    assert first is second
    first, (second,) = through((many, [many[3]]))
    assert first[3] is second


ODD: dict[str, Callable[[], Any]] = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "meta": lambda: torch.empty(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "no tensor": lambda: "no tensor",
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_a_container_with_an_odd_one_is_left_to_the_pickler(make: Callable[[], Any]) -> None:
    odd = make()
    arrived = through([*_many(), odd])
    assert [tensor.tolist() for tensor in arrived[:-1]] == [tensor.tolist() for tensor in _many()]
    assert type(arrived[-1]) is type(odd)
    if isinstance(odd, torch.Tensor) and not odd.is_meta:
        assert arrived[-1].requires_grad == odd.requires_grad
        assert arrived[-1].layout == odd.layout
        if odd.layout is torch.strided and not odd.is_nested:
            assert torch.equal(arrived[-1].resolve_neg(), odd.resolve_neg())


def test_results_in_large_containers_lead_nowhere_back(codec: Codec) -> None:
    sent = _many()
    lifted = codec.encode(sent).tensors
    assert all(
        mine is not theirs and mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(lifted, sent, strict=True)
    )
    assert all(mine is theirs for mine, theirs in zip(codec.encode(sent, own=True).tensors, sent, strict=True))
