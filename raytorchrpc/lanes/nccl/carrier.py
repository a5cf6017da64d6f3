"""NCCL as the nccl lane needs it: channels of two processes, over the few calls of the library that torch has loaded.

Communicators do not block: every call returns at once, and ``enqueued`` tells when the operation is done. So no thread
can be stuck in NCCL when a peer dies. NCCL allows one thread at a time for a communicator. Tests subclass ``Carrier``
and ``Channel``, to run the lane's protocol, deadlines and failures without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.common import packing
from raytorchrpc.process import threads
from raytorchrpc.process.cuda_driver import identity_of
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.dtypes import Shape

#: Whether a device has reached a point in its queue of work. Never waits.
Mark = Callable[[], bool]
#: The two ends of a channel.
SENDER, RECEIVER = 0, 1
#: ncclResult_t, ncclDataType_t and the constants of ncclConfig_t that are used here.
_SUCCESS, _IN_PROGRESS, _UINT8 = 0, 7, 1
_UNDEFINED = -(1 << 31)
_MAGIC = 0xCAFEBEEF
#: The header whose ncclConfig_t this is; newer libraries fill in what they have added since.
_CONFIG_VERSION = 21805
_STREAM_NON_BLOCKING = 1


class Broken(Exception):
    """A channel has failed for good. The text says why."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    ]


class Carrier:
    """The library, in this process."""

    def __init__(self) -> None:
        """Raises LaneUnavailable if there is none."""
        self._idle: dict[int, list[torch.cuda.Stream]] = {}
        """By device. No stream is destroyed: torch's allocator keeps memory by stream."""
        self._lock = Lock()
        try:
            self._nccl = ctypes.CDLL(_path())
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LaneUnavailable("nccl", f"no NCCL library: {error}; install a torch build with CUDA") from error
        pointer, out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        signatures: dict[str, list[Any]] = {
            "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
            "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
            "ncclCommInitRankConfig": [out, ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)],
            "ncclCommGetAsyncError": [pointer, ctypes.POINTER(ctypes.c_int)],
            "ncclCommAbort": [pointer],
            "ncclGroupStart": [],
            "ncclGroupEnd": [],
            "ncclSend": [pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer],
            "ncclRecv": [pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer],
        }
        try:
            for name, arguments in signatures.items():
                function = getattr(self._nccl, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
            for name, argument in (("ncclGetErrorString", ctypes.c_int), ("ncclGetLastError", pointer)):
                function = getattr(self._nccl, name)
                function.argtypes, function.restype = [argument], ctypes.c_char_p
        except AttributeError as error:
            raise LaneUnavailable("nccl", f"this NCCL library is too old: {error}") from error
        version = ctypes.c_int()
        self._nccl.ncclGetVersion(ctypes.byref(version))
        if version.value < _CONFIG_VERSION:
            raise LaneUnavailable("nccl", f"NCCL {version.value} is too old: this lane needs 2.18.5 or newer")

    def open(self, devices: Sequence[int]) -> Mapping[int, str]:
        """Return a globally unique identity of each device."""
        return {index: identity_of(index) for index in devices}

    def device(self, index: int) -> torch.device:
        return torch.device("cuda", index)

    def mark(self, device: int) -> Mark:
        """Return a mark behind what the calling thread has queued on this device so far."""
        return _mark(torch.cuda.current_stream(device))

    def ticket(self) -> bytes:
        """Make the token that both ends pass to ``join``: an ncclUniqueId, on which this process listens for the other
        end. Raises Broken.
        """
        unique = _UniqueId()
        self.check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
        return bytes(unique.internal)

    def join(self, ticket: bytes, end: int, device: int) -> Channel:
        """Begin to join. ``end``: SENDER or RECEIVER. The ticket comes from the receiver. Raises Broken."""
        return Channel(self, ticket, end, device)

    def begin(self, ticket: bytes, end: int, device: int) -> ctypes.c_void_p:
        """Begin to make a communicator of two ranks."""
        undefined = (_UNDEFINED,) * 3
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, *undefined, None, _UNDEFINED)
        comm, unique = ctypes.c_void_p(), _UniqueId.from_buffer_copy(ticket)
        with torch.cuda.device(device):
            code = self._nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, unique, end, ctypes.byref(config))
        try:
            self.check(code, "ncclCommInitRankConfig")
        except Broken:
            if comm.value:
                self.abort(comm)
            raise
        return comm

    def enqueued(self, comm: ctypes.c_void_p) -> bool:
        state = ctypes.c_int()
        self.check(self._nccl.ncclCommGetAsyncError(comm, ctypes.byref(state)), "ncclCommGetAsyncError", comm)
        self.check(state.value, "NCCL", comm)
        return state.value == _SUCCESS

    def move(self, comm: ctypes.c_void_p, end: int, tensors: Sequence[torch.Tensor], stream: int) -> None:
        """Begin to send or receive tensors, as one group."""
        each, other = (self._nccl.ncclSend, RECEIVER) if end == SENDER else (self._nccl.ncclRecv, SENDER)
        codes = [self._nccl.ncclGroupStart()]
        codes += [each(tensor.data_ptr(), tensor.nbytes, _UINT8, other, comm, stream) for tensor in tensors]
        codes.append(self._nccl.ncclGroupEnd())
        for code in codes:
            self.check(code, "ncclSend" if end == SENDER else "ncclRecv", comm)

    def abort(self, comm: ctypes.c_void_p) -> None:
        """Abort the communicator and its kernels. May wait for the device."""
        self._nccl.ncclCommAbort(comm)

    def check(self, code: int, function: str, comm: ctypes.c_void_p | None = None) -> None:
        """Raise Broken unless the result code is success or in progress."""
        if code in (_SUCCESS, _IN_PROGRESS):
            return
        texts = [self._nccl.ncclGetErrorString(code), self._nccl.ncclGetLastError(comm)]
        text = ": ".join(text.decode(errors="replace").strip() for text in texts if text)
        raise Broken(f"{function} failed: {text}")

    def take_stream(self, device: int) -> torch.cuda.Stream:
        """Return a CUDA stream that no other channel uses. torch hands out its own repeatedly, and two channels on one
        stream would wait for each other.
        """
        with self._lock:
            if idle := self._idle.get(device):
                return idle.pop()
        handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).query()  # makes the device's context current on this thread
            code = self._cuda.cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(_STREAM_NON_BLOCKING))
        if code != 0 or handle.value is None:
            raise Broken(f"cuStreamCreate failed with driver error {code}")
        return torch.cuda.ExternalStream(handle.value, device=device)  # type: ignore[no-untyped-call]

    def give_back(self, device: int, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._idle.setdefault(device, []).append(stream)


def _path() -> str:
    """The path of libnccl: as loaded in this process, else in torch's package, else for the loader to find."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            name = line.split(maxsplit=5)[-1]
            if re.search(r"/libnccl\.so[.\d]*$", name):
                return name
    with contextlib.suppress(ImportError, ValueError):
        package = importlib.util.find_spec("nvidia.nccl")
        for folder in (package.submodule_search_locations or ()) if package else ():
            if (path := Path(folder) / "lib" / "libnccl.so.2").exists():
                return str(path)
    return "libnccl.so.2"


@functools.cache
def carrier() -> Carrier:
    """Return this process's Carrier, which keeps its streams for all lanes. Raises LaneUnavailable."""
    return Carrier()


def _mark(stream: torch.cuda.Stream) -> Mark:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    reached: Mark = event.query
    return reached


class Channel:
    """Joins two processes, to move tensors in one direction: a communicator of two ranks, with a stream of its own.

    Both ends begin the same transfers in the same order. No method waits for the peer or the device: it begins an
    operation, and the next one may begin once ``enqueued`` returns True. ``abort`` may be called at any time, the other
    methods by one thread at a time.
    """

    def __init__(self, carrier: Carrier, ticket: bytes, end: int, device: int) -> None:
        self._carrier, self._end, self._device = carrier, end, device
        self._lock = Lock()
        self._last: Mark | None = None
        self._stream = carrier.take_stream(device)
        try:
            self._comm: ctypes.c_void_p | None = carrier.begin(ticket, end, device)
        except BaseException:
            carrier.give_back(device, self._stream)
            raise

    def _with_comm(self, use: Callable[[ctypes.c_void_p], Any]) -> Any:
        with self._lock:  # so that ``abort`` does not free a communicator in use
            if self._comm is None:
                raise Broken("the channel was aborted")
            return use(self._comm)

    def enqueued(self) -> bool:
        """Whether the device has queued the last operation (the join, or a transfer). Raises Broken."""
        return bool(self._with_comm(self._carrier.enqueued))

    def room(self, shapes: Sequence[Sequence[Shape]]) -> list[torch.Tensor]:
        """Allocate memory for each piece of a message: a tensor for one shape, a flat one for several of one dtype."""
        # On this channel's stream, so that it need not wait for what the user has queued.
        with torch.cuda.stream(self._stream):
            return [packing.room(piece, torch.device("cuda", self._device)) for piece in shapes]

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send tensors, which are contiguous and complete. Keeps their memory until sent. Raises Broken."""
        for tensor in tensors:
            tensor.record_stream(self._stream)
        self._move(tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to receive into contiguous tensors, from ``room`` or passed to ``follow``. Raises Broken."""
        self._move(tensors)

    def _move(self, tensors: Sequence[torch.Tensor]) -> None:
        stream: int = self._stream.cuda_stream
        self._with_comm(lambda comm: self._carrier.move(comm, self._end, tensors, stream))

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Order the next operation after what the calling thread has queued so far on its own tensors."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def mark(self) -> Mark:
        """Return a mark behind all operations, which must be enqueued. Raises Broken."""
        return _mark(self._stream)

    def make_current(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand tensors that have arrived over to the calling thread's stream."""
        stream = torch.cuda.current_stream(self._device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def precede(self) -> None:
        """Order what the calling thread queues from now on after what was sent. From any thread; never raises."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def abort(self) -> None:
        """Abandon transfers in progress and free everything, in the background. Idempotent; never waits or raises."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            # It waits for the device, as does the memory that it frees, so it runs on a thread of its own.
            threads.start(self._free, comm, name="raytorchrpc-nccl-abort")

    def _free(self, comm: ctypes.c_void_p) -> None:
        self._carrier.abort(comm)
        self._last = self.mark()
        self._carrier.give_back(self._device, self._stream)

    def over(self) -> bool:
        """After ``abort``: whether it writes no more. Never waits."""
        return self._last is not None and self._last()
