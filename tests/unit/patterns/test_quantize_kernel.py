"""The kernel that converts to fp8, from its real source: bit for bit as torch does it on a CPU."""

from __future__ import annotations

import pytest
import torch

from raytorchrpc.patterns.weights import conversions
from raytorchrpc.patterns.weights.quantize_kernel import QUANTIZE
from tests.unit.host_kernels import guarded, use

FP8 = torch.float8_e4m3fn
NAN = 0x7F
SHAPES = [
    ((300, 264), (128, 128)),
    ((129, 7), (4, 8)),
    ((1, 1), (128, 128)),
    ((33, 64), (16, 24)),
    ((5, 1000), (1, 128)),
    ((40, 24), (8, 3)),
]


def converted(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, with one NaN alone, and scales. Nothing around them is written."""
    name = f"float8_e4m3fn/{block[0]}x{block[1]}"
    shape = conversions.blocks_in(tuple(weight.shape), block)
    values, scales = torch.full(weight.shape, 1.0).to(FP8), torch.full(shape, -1.0)
    (codes_memory, values), (scales_memory, scales) = guarded(values), guarded(scales)
    conversions.convert(name, weight, [values, scales])
    for memory in (codes_memory, scales_memory):
        assert bool((memory[:64] == 0xA5).all() and (memory[-64:] == 0xA5).all())
    codes = values.view(torch.uint8).clone()
    codes[codes & NAN == NAN] = NAN
    return codes, scales.clone()


def same(weight: torch.Tensor, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> bool:
    expected = converted(weight, block)
    with monkeypatch.context() as with_kernel:
        driver = use(with_kernel, QUANTIZE)
        found = converted(weight, block)
    assert len(driver.launched) == 1
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_matrices(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(shape[0])
    weight = (torch.randn(shape) * torch.logspace(-8, 4, shape[1])).to(dtype)
    assert same(weight, block, monkeypatch)
    elements = weight.view(-1)
    elements[0], elements[-1] = 0, float("inf")
    elements[len(elements) // 2], elements[len(elements) // 3] = float("nan"), -float("inf")
    weight[: block[0], : block[1]] *= 0
    assert same(weight, block, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_element_that_16_bits_can_be(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.abs() <= 448]
    rows = every[: len(every) // 255 * 255].view(-1, 255)
    whole = torch.cat([rows, torch.full((len(rows), 1), 448.0, dtype=dtype)], 1)  # so that the scale is 1
    assert same(whole, (1, 256), monkeypatch)


def test_a_matrix_at_an_odd_address(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randn(1 + 64 * 64).to(torch.bfloat16)
    assert same(memory[1:].view(64, 64), (32, 32), monkeypatch)


def test_what_the_kernel_does_not_take_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 300)
    expected = converted(weight, (512, 512))
    driver = use(monkeypatch, QUANTIZE)
    assert all(map(torch.equal, converted(weight, (512, 512)), expected))
    assert not driver.launched
