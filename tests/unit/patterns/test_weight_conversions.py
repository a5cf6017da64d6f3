"""Weights that arrive in fp8 with a scale for each block, between members of one process."""

from __future__ import annotations

import bisect
import math
import threading
from functools import partial
from typing import Any

import numpy
import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights import conversions
from tests.polling import wait_until
from tests.unit.members import Members, in_thread, spied

FP8 = torch.float8_e4m3fn
NAN = 0x7F

#: What each code of the format stands for, by the definition of e4m3fn: sign, 4 bits of exponent, 3 of mantissa.
CODES = [math.ldexp((code & 7) / 8 + (code >> 3 > 0), max(code >> 3, 1) - 7) for code in range(NAN)]


def coded(value: float) -> int:
    """The code of the nearest number, ties to the even code."""
    if math.isnan(value):
        return NAN
    above = min(bisect.bisect_left(CODES, abs(value)), NAN - 1)
    code = min(max(above - 1, 0), above, key=lambda code: (abs(CODES[code] - abs(value)), code % 2))
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def reference(weight: torch.Tensor, block: tuple[int, int]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The codes and the scales of a matrix, one element after the other."""
    given = weight.float().numpy()
    codes = numpy.zeros(given.shape, numpy.uint8)
    scales = numpy.zeros([-(-extent // most) for extent, most in zip(given.shape, block, strict=True)], numpy.float32)
    for i, j in numpy.ndindex(*scales.shape):
        where = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        elements = given[where]
        finite = [abs(value) for value in elements.flat if numpy.isfinite(value)]
        scale = numpy.float32(max(finite, default=0.0)) / numpy.float32(448)
        scales[i, j] = scale if scale >= 2.0**-126 else 1
        for at, value in numpy.ndenumerate(elements):
            divided = float(value / scales[i, j]) if numpy.isfinite(value) else math.nan
            codes[where][at] = coded(divided)
    return codes, scales


def target(shape: tuple[int, ...], block: tuple[int, int] = (128, 128), suffix: str = "_scale_inv") -> dict[str, Any]:
    scales = [-(-extent // most) for extent, most in zip(shape, block, strict=True)]
    return {"w": torch.zeros(shape, dtype=FP8), "w" + suffix: torch.full(scales, -1.0)}


def codes_of(tensor: torch.Tensor) -> numpy.ndarray:
    codes = tensor.clone().view(torch.uint8).numpy()
    codes[codes & NAN == NAN] = NAN  # a NaN has a sign, which says nothing
    return codes


def is_quantized(model: dict[str, torch.Tensor], weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> bool:
    """Whether it is bit for bit as the reference makes it."""
    codes, scales = reference(weight, block)
    right = numpy.array_equal(codes_of(model["w"]), codes)
    return right and numpy.array_equal(model["w_scale_inv"].clone().numpy().view(numpy.int32), scales.view(numpy.int32))


def published(members: Members, model: dict[str, Any], **options: Any) -> int:
    with members.acting("home"):
        return rtr.WeightStore("w", **options).publish(model)


def pulled(members: Members, model: dict[str, Any], reader: str = "a", **options: Any) -> dict[str, Any]:
    with members.acting(reader):
        rtr.WeightStore.find("w").pull(model, **{"convert": rtr.BlockFp8(), **options})
    return model


def readers(members: Members) -> int:
    return int(members.served("weight store", "w").pool.readers)


def refused(members: Members, model: dict[str, Any], **options: Any) -> str:
    before = {name: (value.tensor if isinstance(value, rtr.Shard) else value).clone() for name, value in model.items()}
    with pytest.raises(rtr.ConfigurationError) as error:
        pulled(members, model, **options)
    for name, value in model.items():
        now = value.tensor if isinstance(value, rtr.Shard) else value
        assert torch.equal(now.view(torch.uint8), before[name].view(torch.uint8)), "nothing is written"
    return str(error.value)


@pytest.mark.parametrize("reader", ["home", "a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "block"), [((131, 140), (128, 128)), ((9, 20), (4, 8)), ((8, 16), (4, 8)), ((1, 3), (2, 2))]
)
def test_each_block_is_as_the_definition_says(
    members: Members, reader: str, dtype: torch.dtype, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    torch.manual_seed(shape[0])
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).to(dtype)
    published(members, {"w": weight})
    model = pulled(members, target(shape, block), reader, convert=rtr.BlockFp8(block=block))
    assert is_quantized(model, weight, block)


def test_a_reader_without_conversion_does_not_wait_for_one(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one that converts the same gets it when it is done; nobody converts it again."""
    quantize, began, goes_on = conversions._quantize, threading.Event(), threading.Event()
    made: list[Any] = []

    def converts(*args: Any) -> None:
        made.append(args)
        began.set()
        assert goes_on.wait(20)
        quantize(*args)

    monkeypatch.setattr(conversions, "_quantize", converts)
    weight = torch.ones(130, 130)
    published(members, {"w": weight})
    store, models = members.served("weight store", "w"), [target((130, 130)) for _ in range(2)]

    def reads(model: dict[str, Any]) -> Any:
        snapshot = store.pool.leased(store.lease(0, None, None, 0, None).lease)
        names = rtr.BlockFp8().values, rtr.BlockFp8().scales
        for tensor, converted in zip(model.values(), snapshot.tensors([(0, name) for name in names]), strict=True):
            tensor.copy_(converted)
        return model

    both = [in_thread(partial(reads, model)) for model in models]
    assert began.wait(20)
    assert torch.equal(pulled(members, {"w": torch.zeros(130, 130)}, convert=False)["w"], weight)
    goes_on.set()
    assert all(is_quantized(model(), weight) for model in both) and len(made) == 1


def test_rows_are_converted_in_pieces_that_give_the_same(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(conversions._AT_ONCE, "cpu", 5 * 24)
    weight = torch.randn(23, 24)
    published(members, {"w": weight})
    assert is_quantized(pulled(members, target((23, 24), (4, 8)), convert=rtr.BlockFp8((4, 8))), weight, (4, 8))


def test_zeros_tiny_numbers_and_what_is_not_finite(members: Members) -> None:
    weight = torch.randn(16, 16)
    weight[:4, :4] = 0
    weight[4:8, :4] = 1e-38
    weight[8:12, :4] = 1e-30
    weight[12:, :4] = 3e38
    weight[1, 5], weight[2, 6], weight[6, 9] = math.nan, math.inf, -math.inf
    weight[8:12, 8:12] = math.nan
    published(members, {"w": weight})
    model = pulled(members, target((16, 16), (4, 4)), convert=rtr.BlockFp8((4, 4)))
    assert is_quantized(model, weight, (4, 4))
    whole = model["w"].float() * model["w_scale_inv"].repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert torch.equal(torch.isfinite(whole), torch.isfinite(weight)), "the others of their blocks keep their values"
    assert bool((whole[:8, :4] == 0).all())
    finite = torch.isfinite(weight)
    finite[4:8, :4] = False
    assert torch.allclose(whole[finite], weight[finite], rtol=2.0**-4, atol=0.02)


def test_all_others_are_converted_to_the_dtype_of_the_model(members: Members) -> None:
    given = {"w": torch.randn(4, 4), "norm": torch.randn(5), "same": torch.randn(3, 3), "count": torch.tensor(7)}
    published(members, given)
    model = {**target((4, 4)), "norm": torch.zeros(5, dtype=torch.bfloat16), "same": torch.zeros(3, 3)}
    pulled(members, {**model, "count": (count := torch.tensor(0))})
    assert is_quantized(model, given["w"])
    assert torch.equal(model["norm"], given["norm"].bfloat16()) and torch.equal(model["same"], given["same"])
    assert int(count) == 7


def test_what_was_published_in_fp8_arrives_as_it_is(members: Members) -> None:
    given = {"w": torch.randn(4, 4).to(FP8), "w_scale_inv": torch.rand(1, 1)}
    published(members, given)
    model = pulled(members, target((4, 4)))
    assert torch.equal(model["w"].view(torch.uint8), given["w"].view(torch.uint8))
    assert torch.equal(model["w_scale_inv"], given["w_scale_inv"])


def test_it_is_made_once_for_each_version_and_memory_is_used_again(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = spied(monkeypatch, "raytorchrpc.patterns.weights.conversions._quantize")
    for version in range(1, 7):
        weight = torch.full((130, 130), float(version))
        published(members, {"w": weight})
        for reader in ("home", "a", "b", "a"):
            assert is_quantized(pulled(members, target((130, 130)), reader), weight)
        assert len(made) == version
        assert wait_until(lambda: readers(members) == 0, 20), "they end their leases without waiting for that"
    assert len({values.data_ptr() for _, values, *_ in made}) == 1, "what was made of a retired version is overwritten"


def test_half_the_bytes_cross(members: Members) -> None:
    weight, brought = torch.randn(256, 256).bfloat16(), []
    published(members, {"w": weight})
    for model, convert in ((target((256, 256)), rtr.BlockFp8()), ({"w": torch.zeros_like(weight)}, False)):
        pulled(members, model, convert=convert)
        with members.acting("a"):
            brought.append(rtr.WeightStore.find("w").stats().brought)
    assert brought[1] == weight.nbytes and brought[0] < 0.51 * weight.nbytes


def test_since_brings_the_scales_of_what_has_changed(members: Members) -> None:
    given = {"w": torch.ones(4, 4), "other": torch.ones(3)}
    published(members, given, track=True)
    with members.acting("a"):
        store, model = rtr.WeightStore.find("w"), {**target((4, 4)), "other": torch.zeros(3)}
        version = store.pull(model, convert=rtr.BlockFp8())
        model["other"].fill_(-1)
    given["w"].mul_(2)
    published(members, given, track=True)
    with members.acting("a"):
        assert store.pull(model, since=version, convert=rtr.BlockFp8()) == 2
    assert is_quantized(model, given["w"]) and bool((model["other"] == -1).all())


def test_a_fused_parameter_has_the_scales_of_its_parts(members: Members) -> None:
    parts = {"q": torch.randn(8, 6), "k": torch.randn(4, 6), "v": torch.randn(3, 6)}
    published(members, parts)
    fp8, mapping = rtr.BlockFp8((4, 4)), {"w": ["q", "k", "v"]}
    assert is_quantized(
        pulled(members, target((15, 6), (4, 4)), convert=fp8, mapping=mapping), torch.cat(list(parts.values())), (4, 4)
    )
    text = refused(members, target((15, 6), (4, 4)), convert=fp8, mapping={"w": ["v", "q", "k"]})
    assert "'w' is made of 'v', whose 3 rows are not a multiple of a block of 4 x 4" in text


def test_a_prefetch_brings_values_and_scales(members: Members) -> None:
    class Quantized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4, 4, dtype=FP8), requires_grad=False)
            self.w_scale_inv = torch.nn.Parameter(torch.zeros(1, 1), requires_grad=False)

    model = Quantized()
    for _ in range(3):
        weight = torch.randn(4, 4)
        published(members, {"w": weight})
        with members.acting("a"):
            rtr.WeightStore.find("w").prefetch(model, convert=rtr.BlockFp8()).swap()
        assert is_quantized(dict(model.state_dict()), weight)


def test_what_does_not_fit_is_named_before_anything_moves(members: Members) -> None:
    published(members, {"w": torch.ones(4, 4), "v": torch.ones(4), "d": torch.ones(4, 4, dtype=torch.float64)})
    fp8, w = torch.zeros(4, 4, dtype=FP8), target((4, 4))
    assert "no 'w_scale_inv' for the scales of 'w': float32 (1, 1), one for each block of 128 x 128" in refused(
        members, {"w": fp8}
    )
    wide = "'w_scale_inv' is float32 (1, 1) in the model, and the scales of 'w' are float32 (2, 1)"
    assert wide in refused(members, w, convert=rtr.BlockFp8((2, 4)))
    half = {**w, "w_scale_inv": torch.ones(1, 1, dtype=torch.float16)}
    assert "'w_scale_inv' is float16 (1, 1) in the model" in refused(members, half)
    assert "'v' has shape (4,), and BlockFp8 converts matrices" in refused(members, {"v": torch.zeros(4, dtype=FP8)})
    assert "'d' is float64 as published, and BlockFp8 converts bfloat16, float16, float32" in refused(
        members, {"d": fp8, "d_scale_inv": torch.ones(1, 1)}
    )
    assert "'w' is (4, 4) as published, and (4, 5) in the model" in refused(members, target((4, 5)))
    assert "pass convert=BlockFp8()" in refused(members, w, convert=rtr.BlockFp8)
    other = {"w": torch.ones(4, 4), "w_scale_inv": torch.ones(1, 1)}
    published(members, other)
    assert "'w_scale_inv' was published, but convert=BlockFp8 makes it of 'w'" in refused(members, w)
    for wrong in ({"block": (0, 4)}, {"block": 4}, {"block": (4,)}, {"suffix": ""}):
        with pytest.raises(rtr.ConfigurationError, match=f"{next(iter(wrong))}="):
            rtr.BlockFp8(**wrong)  # type: ignore[arg-type]


# --- shards ------------------------------------------------------------------------------------------------------


def rows(tensor: torch.Tensor, first: int, last: int, unit: int = 1) -> rtr.Shard:
    """Rows of a matrix, or of its scales."""
    whole = tuple(tensor.shape)
    return rtr.Shard(tensor[first // unit : -(-last // unit)].clone(), whole, (first // unit, 0))


def publish_shards(members: Members, weight: torch.Tensor, cut: int) -> None:
    for name, first, last in (("home", 0, cut), ("a", cut, weight.shape[0])):
        with members.acting(name):
            rtr.WeightStore("w", publishers=["home", "a"]).publish({"w": rows(weight, first, last)})


@pytest.mark.parametrize("cut", [0, 4, 8, 11])
def test_publishers_quantize_their_own_shards(members: Members, cut: int) -> None:
    weight, fp8 = torch.randn(11, 10), rtr.BlockFp8((4, 4))
    publish_shards(members, weight, cut)
    with members.acting("b"):
        store = rtr.WeightStore("w", publishers=["home", "a"])
        whole = target((11, 10), (4, 4))
        store.pull(whole, convert=fp8)
        assert is_quantized(whole, weight, (4, 4))
        for first, last in ((0, 4), (4, 11), (4, 8), (0, 11)):
            part = {
                name: rows(torch.zeros_like(value), first, last, unit)
                for (name, value), unit in zip(whole.items(), (1, 4), strict=True)
            }
            store.pull(part, convert=fp8)
            assert torch.equal(part["w"].tensor.view(torch.uint8), whole["w"][first:last].view(torch.uint8))
            assert torch.equal(part["w_scale_inv"].tensor, whole["w_scale_inv"][first // 4 : -(-last // 4)])


def test_a_shard_that_cuts_a_block_is_named(members: Members) -> None:
    weight, fp8 = torch.randn(12, 8), rtr.BlockFp8((4, 4))
    publish_shards(members, weight, 6)
    with members.acting("b"):
        store = rtr.WeightStore("w", publishers=["home", "a"])
        model = target((12, 8), (4, 4))
        with pytest.raises(rtr.ConfigurationError, match=r"'w': the shard \[0:6, 0:8\] of \(12, 8\) by 'home' cuts a"):
            store.pull(model, convert=fp8)
        assert not model["w"].view(torch.uint8).any()
    publish_shards(members, weight, 8)
    with members.acting("b"):
        odd = {"w": rows(model["w"], 2, 8), "w_scale_inv": rows(model["w_scale_inv"], 0, 2)}
        with pytest.raises(
            rtr.ConfigurationError, match=r"'w': the model's shard \[2:8, 0:8\] of \(12, 8\) cuts a block"
        ):
            store.pull(odd, convert=fp8)
        odd = {"w": rows(model["w"], 4, 8), "w_scale_inv": rows(model["w_scale_inv"], 0, 1)}
        with pytest.raises(rtr.ConfigurationError, match=r"are float32 \(1, 2\) at \(1, 0\) of \(3, 2\)"):
            store.pull(odd, convert=fp8)
