"""Any object to (bytes, tensors) and back, without Ray and without a wire."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import marshal
import math
import pickle
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch

from raytorchrpc.errors import SerializationError
from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.dtypes import UNCOPIED
from raytorchrpc.tensors.plain_values import LIFT_BUFFER_BYTES, MOST_TEXT
from tests.freed import FREED, freed
from tests.threads import in_threads


class ByValue(pickle.Pickler):
    """As cloudpickle does it: functions that cannot be imported travel as code, by ``reducer_override``."""

    def __init__(self, file: io.BytesIO, protocol: int | None = None, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and "<" in obj.__qualname__:
            cells = tuple(cell.cell_contents for cell in obj.__closure__ or ())
            return _make_function, (marshal.dumps(obj.__code__), obj.__name__, obj.__defaults__, cells)
        return NotImplemented


def _make_function(code: bytes, name: str, defaults: Any, cells: tuple[Any, ...]) -> Any:
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


def noted(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "mine"  # type: ignore[attr-defined]
    return tensor


# --- tensors -------------------------------------------------------------------------------------------------

#: Lifted without a copy; of what is dense, the strides arrive.
LIFTED: dict[str, Callable[[], torch.Tensor]] = {
    **{
        str(dtype): lambda dtype=dtype: torch.randint(0, 2, (96,), dtype=torch.uint8).view(dtype)  # type: ignore[misc]
        for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
        if dtype not in UNCOPIED and not str(dtype).startswith("torch.q")
    },
    "scalar": lambda: torch.tensor(3.5),
    "permuted": lambda: torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "transposed": lambda: torch.arange(12.0).view(3, 4).T,
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: (
        torch.arange(240.0).view(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d).requires_grad_()
    ),
    "one of each": lambda: torch.arange(8.0).view(1, 2, 2, 2).to(memory_format=torch.channels_last),
    "parameter": lambda: torch.nn.Parameter(torch.arange(12.0).view(3, 4).T),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "buffer of a module": lambda: torch.nn.Buffer(torch.ones(3)),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "with a history": lambda: torch.ones(2, requires_grad=True) * 2,
    "attributes": lambda: noted(torch.ones(3)),
    "subclass": lambda: noted(torch.arange(12.0).view(3, 4).T.as_subclass(Marked)),
    "subclass that requires grad": lambda: torch.ones(3).as_subclass(Marked).requires_grad_(),
}
#: Others, of which some are copied, and some are pickled by torch.
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(0),
    "empty 2d": lambda: torch.empty(0, 7, dtype=torch.int16),
    "strided": lambda: torch.arange(20)[::3],
    "expanded": lambda: torch.arange(3.0).expand(5, 3),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "not coalesced": lambda: torch.sparse_coo_tensor([[0, 0, 1], [0, 0, 1]], [1.0, 2.0, 3.0], (4, 4)),
    "sparse, nothing in it": lambda: torch.zeros(4, 4).to_sparse().to(torch.bfloat16),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.empty(0, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.empty(0, 3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, 4, device="meta", dtype=torch.int8),
    **{
        str(dtype): lambda dtype=dtype: torch.quantize_per_tensor(torch.tensor([-1.0, 0.0, 2.0]), 0.1, 3, dtype)  # type: ignore[misc]
        for dtype in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
    },
}


def check_alike(arrived: torch.Tensor, sent: torch.Tensor) -> None:
    for name in ("dtype", "layout", "device", "requires_grad", "is_quantized", "is_nested"):
        assert getattr(arrived, name) == getattr(sent, name), name
    assert type(arrived) is type(sent) and arrived.is_leaf
    assert sent.is_nested or (arrived.shape, vars(arrived)) == (sent.shape, vars(sent))
    if sent.is_nested:
        assert all(torch.equal(*both) for both in zip(arrived.unbind(), sent.unbind(), strict=True))
    elif sent.layout is not torch.strided:
        assert sent.layout is not torch.sparse_coo or arrived.is_coalesced() == sent.is_coalesced()
        assert torch.equal(arrived.to_dense(), sent.to_dense())
    elif sent.is_quantized:
        assert torch.equal(arrived.dequantize(), sent.dequantize())
    elif not sent.is_meta:
        bare = [tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg() for tensor in (arrived, sent)]
        raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in bare]  # NaN too
        assert torch.equal(*raw)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [*LIFTED.values(), *OTHERS.values()], ids=[*LIFTED, *OTHERS])
def test_every_tensor_arrives_as_it_was(make: Callable[[], torch.Tensor]) -> None:
    """Alone, as an argument, inside an object, and among many, which are taken apart as a whole if all are ordinary."""
    tensor = make()
    many = [torch.full((2, 3), float(number)) for number in range(20)]
    check_alike(through(tensor), tensor)
    check_alike(through(((tensor, 7), {"name": "x"}))[0][0], tensor)
    check_alike(through({"x": [[tensor]]})["x"][0][0], tensor)
    arrived = through([*many, tensor])
    check_alike(arrived[20], tensor)
    assert all(torch.equal(*both) for both in zip(arrived[:20], many, strict=True))
    check_alike(through({str(index): each for index, each in enumerate([*many, tensor])})["20"], tensor)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", LIFTED.values(), ids=LIFTED)
def test_dense_tensors_are_lifted_without_a_copy_and_keep_their_strides(
    codec: Codec, make: Callable[[], torch.Tensor]
) -> None:
    tensor = make()
    encoded = codec.encode({"x": [tensor]})
    assert [lifted.data_ptr() for lifted in encoded.tensors] == [tensor.data_ptr()]
    assert all(lifted.is_contiguous() for lifted in encoded.tensors), "a lane would copy it element by element"
    assert all(lifted.grad_fn is None and not lifted.requires_grad for lifted in encoded.tensors), "leads back"
    assert len(encoded.payload) < 400
    assert through(tensor).stride() == tensor.stride()


@pytest.mark.parametrize(
    ("make", "elements"),
    [
        (lambda: torch.tensor(3.0).expand(500, 1000, 1000), 1),
        (lambda: torch.arange(6.0).view(1, 2, 3).expand(64, 2, 3), 6),
        (lambda: torch.arange(10.0).unfold(0, 4, 1), 10),
        (lambda: torch.arange(24.0).view(4, 6)[:, ::2].unsqueeze(1).expand(4, 9, 3), 23),
        (lambda: torch.nn.Parameter(torch.ones(3).expand(1000, 3)), 3),
        (lambda: torch.ones(3, requires_grad=True).expand(1000, 3).detach().requires_grad_(), 3),
    ],
    ids=["scalar", "batch", "unfold", "gaps", "parameter", "requires grad"],
)
def test_elements_that_share_a_place_travel_once(codec: Codec, make: Callable[[], torch.Tensor], elements: int) -> None:
    sent = make()
    encoded = codec.encode({"x": sent})
    assert [tensor.numel() for tensor in encoded.tensors] == [elements]
    arrived = codec.decode(*encoded)["x"]
    assert (type(arrived), arrived.shape, arrived.stride()) == (type(sent), sent.shape, sent.stride())
    assert arrived.requires_grad == sent.requires_grad and arrived.is_leaf
    assert torch.equal(arrived.detach().flatten()[:1000], sent.detach().flatten()[:1000])


def test_a_wrapper_is_made_again_of_its_parts(codec: Codec) -> None:
    inner = torch.arange(100_000, dtype=torch.int8)
    encoded = codec.encode(Wrapping(inner))
    assert [tensor.data_ptr() for tensor in encoded.tensors] == [inner.data_ptr()]  # its parts are lifted
    wrapped = codec.decode(*encoded)
    assert type(wrapped) is Wrapping and torch.equal(wrapped.inner, inner)


def test_two_views_of_one_storage_arrive_apart() -> None:
    """As with pickle: what two views share is not told, however the lane carries them."""
    whole = torch.arange(10.0)
    left, right, again = through([whole[:6], whole[4:], whole.view(10)])
    left.fill_(1)
    assert right.tolist() == [4, 5, 6, 7, 8, 9]
    assert again.tolist() == whole.tolist()


def test_what_is_one_object_stays_one_object(codec: Codec) -> None:
    one, many = torch.ones(2), _many()
    assert len(codec.encode({"a": one, "b": [one]}).tensors) == 1
    arrived = through({"a": one, "b": [one]})
    assert arrived["a"] is arrived["b"][0]
    first, second = through((one, one))
    assert first is second
    arrived = through([one] * 10)
    assert all(tensor is arrived[0] for tensor in arrived)
    first, second = through((many, many))
    assert first is second
    first, (second,) = through((many, [many[3]]))
    assert first[3] is second
    partner = torch.nn.Parameter(torch.ones(3))
    partner.partner = one  # type: ignore[attr-defined]
    tensor, parameter = through([one, partner])
    assert parameter.partner is tensor
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    arrived = through(module)
    assert arrived[1].weight is arrived[0].weight, "tied parameters stay tied"
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    arrived = through(loop)
    assert arrived[1] is arrived


@pytest.mark.parametrize("kind", [*FREED, "conjugated"])
@pytest.mark.parametrize("keep_graph", [False, True])
def test_a_tensor_whose_storage_was_freed_is_refused(codec: Codec, kind: str, keep_graph: bool) -> None:
    """A lane that read it would end the process. So would the look at a conjugated one."""
    tensor = FREED[kind]() if kind in FREED else freed(torch.ones(2, 3, dtype=torch.complex64).conj())
    for obj in (tensor, ((tensor,), {}), {"x": tensor}, [*_many(), tensor], {"x": [*_many(), tensor]}):
        with pytest.raises(SerializationError, match=r"shape \(2, 3\) has no memory: its storage was freed or shrunk"):
            codec.encode(obj, keep_graph=keep_graph)


def test_tensors_without_elements_need_no_memory(codec: Codec) -> None:
    base = torch.ones(110)
    empty, rest = base[110:], freed(base[:10], 40)
    for obj in (empty, [empty, rest], [*_many(), empty, rest], [*_many(), torch.empty(0, 3)]):
        assert len(codec.encode(obj).tensors) == (len(obj) if isinstance(obj, list) else 1)


def test_keep_graph_lifts_the_tensor_with_its_history(codec: Codec) -> None:
    leaf = torch.nn.Parameter(torch.ones(2))
    product = leaf * 3
    encoded = codec.encode([product, leaf, torch.ones(1), product.as_subclass(Marked)], keep_graph=True)
    assert encoded.tensors[0].grad_fn is product.grad_fn
    arrived = codec.decode(*encoded)
    (arrived[0].sum() + arrived[1].sum()).backward()
    assert torch.equal(leaf.grad, torch.full((2,), 4.0))
    assert not arrived[2].requires_grad
    assert type(arrived[3]) is Marked and arrived[3].grad_fn is not None


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


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda arrays: {str(number): each for number, each in enumerate(arrays)}]
)
def test_many_large_arrays_are_lifted_as_a_whole(codec: Codec, kind: Callable[..., Any]) -> None:
    arrays = [numpy.full((2, LARGE), number, dtype) for number, dtype in enumerate("fdqifdqifd")]
    sent = [kind(arrays), numpy.arange(LARGE), torch.ones(3), {"more": [torch.ones(2)] * 1}]
    encoded = codec.encode(sent)
    assert (len(encoded.tensors), encoded.buffers) == (13, 11) and len(encoded.payload) < 1000
    assert encoded.tensors[2].data_ptr() == arrays[0].ctypes.data, "without a copy"
    arrived = codec.decode(encoded.payload, [tensor.clone() for tensor in encoded.tensors], (), encoded.buffers)
    assert type(arrived[0]) is type(sent[0])
    for one, other in zip(
        *(each.values() if type(each) is dict else each for each in (arrived[0], sent[0])), strict=True
    ):
        numpy.testing.assert_array_equal(one, other, strict=True)
        assert one.flags.writeable
    numpy.testing.assert_array_equal(arrived[1], sent[1])
    assert arrived[2].tolist() == [1, 1, 1] and arrived[3]["more"][0].tolist() == [1, 1]


@pytest.mark.parametrize("odd", ["read-only", "strided", "small", "big-endian", "twice", "text", "masked"])
def test_arrays_that_are_not_all_alike_arrive_too(codec: Codec, odd: str) -> None:
    arrays = [numpy.arange(LARGE) + number for number in range(9)]
    if odd == "read-only":
        arrays[3].flags.writeable = False
    else:
        arrays[3] = {
            "strided": arrays[3][::2],
            "small": numpy.arange(3),
            "big-endian": arrays[3].astype(">i8"),
            "twice": arrays[2],
            "text": arrays[3].astype(str),
            "masked": numpy.ma.masked_array(arrays[3], mask=arrays[3] == 7),
        }[odd]
    arrived = codec.decode(*codec.encode(arrays))
    for one, other in zip(arrived, arrays, strict=True):
        numpy.testing.assert_array_equal(one, other, strict=True)
    assert (arrived[2] is arrived[3]) == (odd == "twice")


def test_read_only_arrays_as_they_come_from_rays_store(codec: Codec) -> None:
    small, array = numpy.arange(3), numpy.arange(LARGE)
    small.flags.writeable = False
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of each read-only buffer
        encoded, encoded_small = codec.encode(array), codec.encode(small)
    address = array.ctypes.data
    assert encoded.tensors[0].data_ptr() == address
    assert codec.decode(*encoded).flags.writeable and codec.decode(*encoded_small).flags.writeable
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


@pytest.mark.parametrize("layers", [1, 8])
def test_state_dicts_and_whole_modules(codec: Codec, layers: int) -> None:
    made = [torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300)] * layers
    module, fresh = torch.nn.Sequential(*made), torch.nn.Sequential(*made)
    state = module.state_dict()
    assert len(codec.encode(state).payload) < 2000 * layers
    arrived = through(state)
    assert type(arrived) is type(state) and list(arrived) == list(state) and arrived._metadata == state._metadata
    fresh.load_state_dict(arrived)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), module.parameters(), strict=True))
    copied = through(module)
    assert all(type(parameter) is torch.nn.Parameter for parameter in copied.parameters())
    x = torch.ones(2, 300)
    module.eval(), copied.eval()
    assert torch.equal(copied(x), module(x))


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
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        encoded = codec.encode([torch.full((3,), number)] * 3)
        barrier.wait(10)
        for _ in range(300):
            assert all(int(tensor[0]) == number for tensor in codec.decode(*encoded))

    in_threads(work, 4)


class Refusing(pickle.Pickler):
    def dump(self, obj: Any) -> None:
        raise AssertionError("a pickler was started")


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    """A subclass, whose type must arrive."""


#: Values that need no pickler, and values that get one.
PLAIN = [
    *(1, True, -0.0, 1 << 200, 2 + 3j, "lone \ud800 surrogate", b"\x80\x05", "x" * MOST_TEXT, (), [], {}),
    *((1, "a", None), [1.5, False], {"a": 1, "b": b""}, ((1, "a"), {}), ((), {"key": None, "other": 2.0})),
    *([[1]], ((1, (2, [b"x"])), [True, []]), {"a": [1, ("b",)]}, ((*range(9),), {})),
]
PICKLED = [
    *(Level.HIGH, Name("n"), "x" * (MOST_TEXT + 1), bytes(MOST_TEXT + 1), ..., {1: 2}, {1, 2}),
    *([[[[[1]]]]], [[*range(8)]], [{}], collections.OrderedDict(a=1)),
]


@pytest.mark.parametrize("value", [*PLAIN, *PICKLED], ids=lambda value: f"{value!r:.30}")
def test_plain_values_need_no_pickler_and_arrive_as_with_one(value: Any) -> None:
    plain = any(value is one for one in PLAIN)
    arrived = through(value, Codec(Refusing if plain else pickle.Pickler))
    assert (arrived, repr(arrived), type(arrived)) == (value, repr(value), type(value))
    assert plain or pickle.loads(Codec().encode(value).payload) == value


def test_plain_values_with_tensors_need_no_pickler_either() -> None:
    assert math.isnan(through(math.nan, Codec(Refusing)))
    a, b = torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)
    args, kwargs = through(((a, 7), {"other": b, "name": "x"}), Codec(Refusing))
    assert torch.equal(args[0], a) and args[1] == 7
    assert torch.equal(kwargs["other"], b) and kwargs["name"] == "x" and list(kwargs) == ["other", "name"]
    shared = [1]
    first, second = through((shared, shared), Codec(Refusing))
    assert first == [1] and first is second


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


def test_results_in_large_containers_lead_nowhere_back(codec: Codec) -> None:
    sent = _many()
    lifted = codec.encode(sent).tensors
    assert all(
        mine is not theirs and mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(lifted, sent, strict=True)
    )
    assert all(mine is theirs for mine, theirs in zip(codec.encode(sent, own=True).tensors, sent, strict=True))


# --- what cannot be pickled ------------------------------------------------------------------------------------------


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


def test_a_recursion_too_deep_is_an_error_not_a_crash(codec: Codec) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(SerializationError, match="RecursionError"):
        codec.encode(nested)
    while nested:  # taken apart by hand: letting go of it at once recurses as deeply
        nested = nested[0]


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(SerializationError) as raised:
        Codec().encode((args, kwargs))
    return Codec().explain_argument("b.double", args, kwargs, raised.value)


LOCK = threading.Lock()

WHY = ": TypeError: cannot pickle '_thread.lock' object"


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((LOCK,), {}, "the 1st argument of b.double (_thread.lock) cannot be pickled"),
        ((1, torch.ones(2), LOCK), {"x": 1}, "the 3rd argument of b.double (_thread.lock) cannot be pickled"),
        ((*range(10), LOCK), {}, "the 11th argument of b.double (_thread.lock) cannot be pickled"),
        ((1,), {"batch": LOCK}, "argument 'batch' of b.double (_thread.lock) cannot be pickled"),
        (
            ([1, {"x": LOCK}],),
            {},
            "the 1st argument of b.double (list) cannot be pickled, because of its [1]['x'] (_thread.lock)",
        ),
        (
            (Holder((torch.ones(1), LOCK)),),
            {},
            f"the 1st argument of b.double ({__name__}.Holder) cannot be pickled, because of its held[1] "
            "(_thread.lock)",
        ),
    ],
)
def test_the_argument_and_its_part_are_named(args: tuple[Any, ...], kwargs: dict[str, Any], said: str) -> None:
    assert message(*args, **kwargs) == said + WHY


def test_an_object_that_holds_itself_ends_the_search() -> None:
    loop: list[Any] = [LOCK]
    loop.insert(0, loop)
    assert message(loop).startswith("the 1st argument of b.double (list) cannot be pickled, because of its [0]")


class Counted:
    """No message may hold one."""


def refuse(counted: Counted) -> None:
    raise SerializationError("not counted here")


class Counting(ByValue):
    refusals: ClassVar = {Counted: refuse}


def test_what_a_pickler_refuses_is_refused_wherever_it_is() -> None:
    codec, counted = Codec(Counting), Counted()

    def uses() -> Any:
        return counted

    for value, where in (
        (counted, ""),
        ([1, {"x": (counted,)}], ", because of its [1]['x'][0]"),
        (Holder((torch.ones(1), counted)), ", because of its held[1]"),
        ([uses], ", because of its [0] variable 'counted'"),
    ):
        with pytest.raises(SerializationError) as raised:
            codec.encode(value)
        part = f"{where} ({__name__}.Counted)" if where else ""
        assert codec.explain("it", value, raised.value).endswith(f" cannot be pickled{part}: not counted here")
    assert through(Holder(1), codec).held == 1, "the others go on as before"
