"""Hands CUDA tensors from one thread to another, ordered on the GPU without blocking the CPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.cuda_driver import is_idle

#: The handle of the default stream.
_DEFAULT = 0


def handoff_streams(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Call this on the thread (and streams) that made the tensors; call the result on the thread that uses them.

    The user's streams then wait for the maker's, on the GPU, without blocking the CPU. ``record_stream`` keeps the
    allocator from reusing the memory while the user's kernels read it.
    """
    # One tensor for each storage, which is the allocator's unit.
    on_gpu = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.is_cuda}
    if not on_gpu:
        return nothing
    kept: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in on_gpu.values():
        kept.setdefault(tensor.device, []).append(tensor)
    follow = follow_streams(kept)

    def make_current() -> None:
        follow()
        for device, on_device in kept.items():
            stream = torch.cuda.current_stream(device)
            for tensor in on_device:
                tensor.record_stream(stream)

    return make_current


def follow_streams(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Call this on the thread (and streams) that use tensors of these GPUs; call the result on the next such thread.

    Its streams then wait for the first one's. The memory must outlive what its streams do with it.
    """
    made = {}
    for device in devices:
        stream = torch.cuda.current_stream(device)
        if not is_idle(stream):  # else the next thread has nothing to wait for
            made[device] = stream.record_event()

    def make_current() -> None:
        for device, event in made.items():
            torch.cuda.current_stream(device).wait_event(event)

    return make_current


def finish_stream(device: torch.device) -> None:
    """Block until that GPU has done what this thread has queued on its current stream there. Does not spin."""
    stream = torch.cuda.current_stream(device)
    if not stream.query():
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()


def follow_thread() -> Callable[[], None]:
    """As ``follow_streams``, for all GPUs on which this thread does not use the default stream, which all share."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nothing
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return follow_streams([each for each in devices if torch.cuda.current_stream(each).cuda_stream])


def own_streams(tensors: Sequence[torch.Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """Call this on the thread (and streams) that made the tensors; enter the result on the thread that uses them.

    Within, that thread has other streams, which follow what made the tensors and nothing that was queued since.
    """
    make_current = handoff_streams(tensors)
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as entered:
            for device in devices:
                stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                entered.enter_context(torch.cuda.stream(stream))
            make_current()
            yield

    return enter


class _Current(threading.local):
    main: int | None = None
    """The handle of the stream beside which this thread uses another one of ``SideStreams``."""


_current = _Current()


def runs_beside(stream: int) -> bool:
    """Whether what this thread queues on its current stream, of that handle, runs beside what the program computes."""
    return (stream if _current.main is None else _current.main) != _DEFAULT


class SideStreams:
    """Other streams for this thread, beside its current one on a GPU. What each is given runs at the same time."""

    def __init__(self, device: torch.device) -> None:
        """They follow what has been queued on the current stream so far."""
        self._device, self._follow = device, follow_streams([device])
        self._main = torch_internals.current_cuda_stream(device.index)
        self._ends: list[Callable[[], None]] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        """Within, this thread has another stream. The memory that is used there must outlive ``join``."""
        with torch.cuda.stream(_side_stream(self._device, len(self._ends))):
            self._follow()
            _current.main = self._main
            try:
                yield
            finally:
                _current.main = None
                self._ends.append(follow_streams([self._device]))

    def join(self) -> None:
        """Have the current stream follow all of them."""
        for follow in self._ends:
            follow()


@functools.cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
