"""Converts a matrix on a GPU to fp8 with a scale for each block, by one kernel.

torch takes about fifteen operations, which move 70 bytes for each element; this reads each element once from the GPU's
memory, and writes its byte.
"""

from __future__ import annotations

import struct

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.process.cuda_driver import KernelSource

_THREADS = 256
#: Elements of the largest block that stays in a processor's cache until it is read again.
_LARGEST_BLOCK = 1 << 16
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: As ``Matrix`` in the source below.
_MATRIX = struct.Struct("@3Q6I")

QUANTIZE = KernelSource(
    "quantize",
    """
typedef unsigned long long Long;
struct Matrix { Long source, values, scales; unsigned height, width, rows, columns, across, kind; };

union Word { unsigned bits; float number; };
__device__ float as_float(unsigned bits) { Word word; word.bits = bits; return word.number; }
__device__ unsigned as_bits(float number) { Word word; word.number = number; return word.bits; }

// float32 from bfloat16 (kind 0) and float16 (1).
__device__ float widened(unsigned short half, unsigned kind) {
    if (kind == 0) return as_float(unsigned(half) << 16);
    const unsigned rest = half & 0x7fffu, sign = unsigned(half & 0x8000u) << 16;
    if (rest >= 0x7c00u) return as_float(sign | 0x7f800000u | rest << 13);
    return as_float(sign | as_bits(as_float(rest << 13) * as_float(0x77800000u)));  // 2 ** 112
}
__device__ float widened(float number, unsigned) { return number; }

// The nearest e4m3, ties to even, of a number from 0 to 464.
__device__ unsigned char rounded(float number) {
#if __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(two) : "f"(number));
    return two & 0xff;
#else
    const unsigned bits = as_bits(number);
    if (bits < 0x3c800000u)  // below 2 ** -6: a multiple of 2 ** -9
        return as_bits(number + 16384.0f) - 0x46800000u;
    return ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - 960;
#endif
}

// Divides numbers that are not negative by one number, as IEEE 754 rounds. Where no step underflows, this takes fewer
// instructions than a division.
struct Divisor {
    float number, inverse;
    bool is_small;
    __device__ explicit Divisor(float it) : number(it), inverse(1.0f / it), is_small(it < as_float(0x17800000u)) {}
    __device__ float operator()(float dividend) const {  // is_small: below 2 ** -80
        if (is_small) return dividend / number;
        float quotient = dividend * inverse;
        quotient = fmaf(fmaf(-quotient, number, dividend), inverse, quotient);
        return fmaf(fmaf(-quotient, number, dividend), inverse, quotient);
    }
};

template <class Element, int AT_ONCE> struct alignas(AT_ONCE * sizeof(Element)) Vector { Element elements[AT_ONCE]; };

template <class Element, int AT_ONCE> __device__ void convert(const Matrix& matrix, unsigned* largest) {
    const unsigned block_row = blockIdx.x / matrix.across, block_column = blockIdx.x - block_row * matrix.across;
    const Long row = Long(block_row) * matrix.rows, column = Long(block_column) * matrix.columns;
    const unsigned height = matrix.height - row < matrix.rows ? matrix.height - row : matrix.rows;
    const unsigned width = matrix.width - column < matrix.columns ? matrix.width - column : matrix.columns;
    const Long first = row * matrix.width + column;
    const Element* source = reinterpret_cast<const Element*>(matrix.source) + first;
    unsigned char* values = reinterpret_cast<unsigned char*>(matrix.values) + first;
    typedef Vector<Element, AT_ONCE> Read;
    typedef Vector<unsigned char, AT_ONCE> Written;
    // Threads go along rows side by side, and down by as many rows as they fill.
    const unsigned in_row = width / AT_ONCE, side_by_side = in_row < blockDim.x ? in_row : blockDim.x;
    const unsigned at_once = blockDim.x / side_by_side, first_row = threadIdx.x / side_by_side;
    const unsigned first_in_row = first_row < at_once ? threadIdx.x - first_row * side_by_side : in_row;

    unsigned highest = 0;
    for (unsigned down = first_row; down < height; down += at_once)
    for (unsigned along = first_in_row; along < in_row; along += side_by_side) {
        const Read read = reinterpret_cast<const Read*>(source + Long(down) * matrix.width)[along];
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const unsigned rest = as_bits(widened(read.elements[k], matrix.kind)) & 0x7fffffffu;
            if (rest < 0x7f800000u && rest > highest) highest = rest;
        }
    }
    largest[threadIdx.x] = highest;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half; half /= 2) {
        if (threadIdx.x < half && largest[threadIdx.x + half] > largest[threadIdx.x])
            largest[threadIdx.x] = largest[threadIdx.x + half];
        __syncthreads();
    }
    float scale = as_float(largest[0]) / 448.0f;
    if (scale < as_float(0x00800000u)) scale = 1.0f;  // 2 ** -126
    if (threadIdx.x == 0) reinterpret_cast<float*>(matrix.scales)[blockIdx.x] = scale;

    const Divisor divided(scale);
    for (unsigned down = first_row; down < height; down += at_once)
    for (unsigned along = first_in_row; along < in_row; along += side_by_side) {
        const Read read = reinterpret_cast<const Read*>(source + Long(down) * matrix.width)[along];
        Written written;
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const unsigned bits = as_bits(widened(read.elements[k], matrix.kind)), rest = bits & 0x7fffffffu;
            const unsigned code = rest < 0x7f800000u ? rounded(divided(as_float(rest))) : 0x7f;
            written.elements[k] = code | (bits >> 24 & 0x80);
        }
        reinterpret_cast<Written*>(values + Long(down) * matrix.width)[along] = written;
    }
}

extern "C" __global__ void quantize(const __grid_constant__ Matrix matrix) {
    __shared__ unsigned largest[256];
    const bool aligned = matrix.source % 16 == 0 && matrix.values % 8 == 0;
    const bool in_eights = aligned && matrix.width % 8 == 0 && matrix.columns % 8 == 0;
    if (matrix.kind == 2) {
        if (in_eights) convert<float, 4>(matrix, largest);
        else convert<float, 1>(matrix, largest);
    } else {
        if (in_eights) convert<unsigned short, 8>(matrix, largest);
        else convert<unsigned short, 1>(matrix, largest);
    }
}
""",
)


def quantize(source: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> bool:
    """Queue the conversion of a contiguous matrix on this thread's current stream.

    Returns False if it has to be done by torch: on a CPU, for large blocks, and as long as the kernel is not compiled.
    """
    if block[0] * block[1] > _LARGEST_BLOCK or not all(each.is_contiguous() for each in (source, values, scales)):
        return False
    kernel = QUANTIZE.ready_on(source.device)
    if kernel is None:
        return False
    addresses = source.data_ptr(), values.data_ptr(), scales.data_ptr()
    matrix = _MATRIX.pack(*addresses, *source.shape, *block, scales.shape[1], _KINDS[source.dtype])
    device = source.get_device()
    with kernel.driver.on(device):
        kernel.launch((scales.numel(), 1), _THREADS, matrix, torch_internals.current_cuda_stream(device))
    return True
