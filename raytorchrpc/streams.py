"""CUDA tensors that pass from one thread to another: order without waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def nothing() -> None:
    """For tensors that need no hand-over."""


def hand_over(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Called on the thread (and streams) that made the tensors; the result is called on the one that uses them.

    The user's streams then wait for the maker's, on the GPU, without blocking the CPU. ``record_stream`` keeps
    the memory from being handed out again while the user's kernels still read it.
    """
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    if not on_gpu:
        return nothing
    made = {tensor.device: torch.cuda.current_stream(tensor.device).record_event() for tensor in on_gpu}

    def adopt() -> None:
        for device, event in made.items():
            torch.cuda.current_stream(device).wait_event(event)
        for tensor in on_gpu:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    return adopt
