"""The contracts of lanes for messages and for tensors, and the data that crosses them.

Each member opens a lane once per group, connects it to its peers, and closes it with the group. A lane never imports
another lane, the group or the member: ``LaneSetup`` and these interfaces give it all it needs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError
from raytorchrpc.process.completion import Completion, nothing
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.dtypes import Shape, view_at
from raytorchrpc.tensors.kept_errors import again

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: Why a peer was disconnected. A lane is not told which.
GONE = "it left the group, or its process ended"


class Message(NamedTuple):
    """One request or one reply.

    header: a tuple of small builtins (str, int, float, tuples of them), readable without unpickling the body.
    body: the encoded arguments or result.
    manifests: describe tensors that travel out of band (see ``calls.payload``); builtins only.
    make_current: the thread that will use the tensors calls it first; CUDA work that the lane queued then precedes that
        thread's own.
    unread_bytes: size of a message for which this process had no memory; its body is lost. 0 if the body arrived.
    take_back: called once if ``MessageLane.call`` or a Reply has returned, and the message is not sent after all.
    """

    header: tuple[Any, ...]
    body: Encoded
    make_current: Callable[[], None] = nothing
    manifests: tuple[Any, ...] = ()
    unread_bytes: int = 0
    take_back: Callable[[], object] = nothing


#: See ``MessageLane.call``.
Released = Callable[[], None] | None


class Pending(Completion):
    """One request in flight. The lane completes it exactly once, with a reply or an error.

    Its callbacks run on a thread of the lane, which carries nothing else meanwhile: they must be short and not block.
    """

    __slots__ = ("_error", "_message", "_on_released")

    unsent = False
    """It waits for a connection, and will never be sent if it still does at its deadline."""

    def __init__(self, on_released: Released = None, lock: Any = None) -> None:
        """``on_released``: see MessageLane.call. ``lock``: see Completion."""
        self._lock = Lock() if lock is None else lock
        self._callbacks, self.done = [], False  # as Completion does, in the time that a call of it would take
        self._on_released = on_released
        self._message: Message | None = None
        self._error: Exception | None = None

    def settle(self, message: Message | None, error: Exception | None = None) -> None:
        """Complete it with a message or an error. Once, from any thread, which runs the callbacks."""
        self._message, self._error = message, error
        if self._on_released is not None:  # first: the caller may send its next call as soon as it sees this one done
            self._on_released()
        self.complete()

    def take(self) -> Message:
        """Return the reply of a completed request. Raises PeerLost, RpcTimeout or another RayTorchRpcError."""
        if self._error is not None:
            raise again(self._error)
        assert self._message is not None
        return self._message


#: ``reply(message)``: answers one request, exactly once, now or later, from any thread. Sends before it returns; on an
#: event loop a thread may go on sending. Raises PeerLost if the caller is gone.
Reply = Callable[[Message], None]
#: ``serve(message, reply)``: the lane calls it for each request, on one of its threads. It never blocks. It may return
#: work, which runs the method: the lane runs the work on a thread that it can spare, or passes it to ``spawn``. The
#: socket lane calls ``serve`` in the order in which a caller sent its requests.
Serve = Callable[[Message, Reply], Callable[[], None] | None]
Spawn = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class Capabilities:
    """What a message lane can do, as data, so that no code depends on which lane it is."""

    in_band_bytes: int | None
    """Above so many bytes, CPU tensors are better carried by a tensor lane, if one takes them; None: never. Messages
    carry any number of bytes."""
    in_band_cuda: bool
    """Messages may contain CUDA tensors. Otherwise those that no tensor lane takes are copied to the CPU first."""
    copies_at_once: bool
    """``call`` and ``reply`` have copied the tensors' data when they return; otherwise they read it later."""
    rrefs: bool
    """Carries torch RRefs, and records the hop in torch's distributed autograd."""


class PeerAddress(NamedTuple):
    """How to reach one lane of one member."""

    peer: str
    """The member's name."""
    address: Any
    """What the peer's lane returned from ``open`` or ``reach``; small and picklable."""
    devices_back: Mapping[int, int] = {}
    """Where CUDA results of that peer's calls arrive: this process's GPU -> the peer's."""


class PeerLane(ABC):
    """What both kinds of lanes have. Thread-safe."""

    name: ClassVar[str]

    def connect(self, peers: Sequence[PeerAddress]) -> None:  # noqa: B027 - some lanes have no connections
        """Make these peers reachable. May connect lazily; then the first call or read fails if a peer is gone."""

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> Any:
        """Replace ``LaneSetup.tcp_host`` and ``by_tcp``, because members joined.

        Returns the lane's new address if that changes it, else None. Raises LaneUnavailable.
        """
        return None

    def disconnect(self, peer: str) -> None:  # noqa: B027 - likewise
        """Forget a peer that left or died: calls in flight to it fail with PeerLost, and its exports are reclaimed."""

    def close(self) -> None:  # noqa: B027 - likewise
        """Release everything (threads, sockets, files) but the memory that tensors still use.

        Idempotent, never raises. A message lane takes at most 2 s.
        """


class MessageLane(PeerLane):
    """Carries requests and replies between this member and its peers."""

    capabilities: ClassVar[Capabilities]

    @property
    def beside(self) -> TensorLane | None:
        """Carries tensors by the same mechanism beside the messages of another lane."""
        return None

    @property
    def has_unread(self) -> bool:
        """Whether requests have arrived that it has not handled yet, as far as it can tell."""
        return False

    @abstractmethod
    def open(self, serve: Serve, spawn: Spawn) -> Any:
        """Start to listen; returns the address that peers ``connect`` to. Raises LaneUnavailable."""

    @abstractmethod
    def call(
        self, peer: str, message: Message, timeout_s: float, *, caller_waits: bool = False, on_released: Released = None
    ) -> Pending:
        """Send a request. Returns before the reply, and perhaps before there is a connection.

        ``caller_waits``: the caller will wait next, on this thread, so a lane may let that thread read the reply.
        ``on_released``: called when the call is over (answered, however late, or lost), before its reply is taken. It
        is short and idempotent, and does not raise. Any thread may call it, perhaps also if this raises.

        The tensors in ``message`` belong to the lane until the call is over and must not change meanwhile. Raises
        LaneUnavailable if nothing was sent and nothing can be, for instance for a CUDA tensor without a device map;
        PeerLost, with ``may_have_run`` False, for an unknown peer or one that is gone.
        """

    def watch(self, reply: Reply) -> Pending:
        """What fails when the connection ends that brought a request. ``reply``: what answers that. Raises PeerLost."""
        raise LaneUnavailable(self.name, "it has no connections of its own")

    def _unknown(self, peer: str) -> PeerLost:
        return PeerLost(peer, GONE, may_have_run=False)


# --- what a tensor lane can do, and what its peers may send ------------------------------------------------


@dataclass(frozen=True)
class TensorCapabilities:
    """What a tensor lane can do, as data."""

    devices: frozenset[str]
    """Device types it carries: "cpu", "cuda"."""
    takes_cuda: bool = False
    """CUDA tensors may be exported to arrive as CPU tensors."""
    reads_later: bool = False
    """CPU tensors too must not change before ``Export.finished``."""
    in_place: bool = False
    """``read`` copies out of the sender's own memory, and only what is asked for; see ``TensorLane.lend``."""


def never_fetched(peer: str) -> PeerLost:
    """The error that ``read`` raises for tensors of a process that is gone."""
    return PeerLost(peer, "its process ended, or left the group, before its tensors were fetched")


#: Errors that an invalid descriptor causes. A descriptor comes from an authenticated member, but that may be of another
#: release, broken, or have ended: it must not make this process access memory out of bounds.
MALFORMED = (TypeError, ValueError, LookupError, OverflowError, ctypes.ArgumentError)


def checked(method: F) -> F:
    """Decorate a lane's ``read`` or ``view``: invalid descriptors raise LaneUnavailable with the peer."""

    @functools.wraps(method)
    def call(lane: Any, peer: str, *args: Any) -> Any:
        try:
            return method(lane, peer, *args)
        except RayTorchRpcError:  # some of these are ValueErrors and the like too
            raise
        except MALFORMED as error:
            raise LaneUnavailable(
                lane.name,
                f"the descriptor of the tensors of member {peer!r} is invalid ({type(error).__name__}: {error}), so "
                f"nothing was read; run one release of raytorchrpc everywhere",
            ) from error

    return cast(F, call)


# --- copies ------------------------------------------------------------------------------------------------

#: Smaller copies take longer to request than to make (bytes).
SMALL = 256 << 10


class Target(NamedTuple):
    """Where a copy goes: memory by its address, because to view the tensors of a model takes longer than to queue
    copies to them.
    """

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Target:
        return Target(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


class Copy(NamedTuple):
    """One copy of a read: all of an exported tensor, or a region of one that is flat uint8. Holds no memory."""

    source: int
    """Which of the exported tensors."""
    target: Target | None
    """With any strides, on any device. None: all of the tensor, in memory of its own, which the lane provides."""
    offset: int = 0
    """Where the region begins, in bytes."""
    strides: tuple[int, ...] | None = None
    """Where its elements lie, from ``offset`` on: a stride for each dimension of the target, in elements of its dtype,
    not negative. None: contiguous.
    """

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """View what the target is to receive of the exported tensor. Raises OutOfBounds."""
        _, target, offset, strides = self
        is_whole = not offset and strides is None
        if target is None or (is_whole and tensor.dtype is target.dtype and tensor.shape == target.shape):
            return tensor
        return view_at(tensor, offset, (target.dtype, target.shape), strides)


#: What lanes prepare for the copies of one read: for each place where a publisher may have it.
_MOST_PREPARED = 16


class Copies(Sequence[Copy]):
    """The copies of one read, and the tensors that they fill. Those of a model come again for each version: what a lane
    has worked out about them once, it keeps here; see ``prepared``.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        targets: Sequence[torch.Tensor | None],
        filled: Sequence[torch.Tensor] | None = None,
        nbytes: int | None = None,
        known: dict[Hashable, Any] | None = None,
    ) -> None:
        """
        Args:
            copies: they hold no memory, so they may be kept for as long as addresses stay the same.
            targets: the tensor that each copy fills, without autograd; None where the lane provides it.
            filled: tensors that have the memory of all targets, if not the targets themselves.
            nbytes: of all targets, if that is known.
            known: what lanes have worked out about the same copies before.
        """
        self._copies, self._targets, self._filled, self._nbytes = copies, targets, filled, nbytes
        self._known: dict[Hashable, Any] = {} if known is None else known

    @classmethod
    def whole(cls, targets: Sequence[torch.Tensor | None]) -> Copies:
        """Each exported tensor goes to the target in its place."""
        described = [None if target is None else Target.of(target) for target in targets]
        return cls(list(map(Copy, range(len(targets)), described)), targets)

    def __len__(self) -> int:
        return len(self._copies)

    def __getitem__(self, index: Any) -> Any:
        return self._copies[index]

    def __iter__(self) -> Iterator[Copy]:
        return iter(self._copies)

    def target(self, index: int) -> torch.Tensor | None:
        """The tensor that a copy fills."""
        return self._targets[index]

    @property
    def filled(self) -> Sequence[torch.Tensor]:
        """Tensors that have the memory of all targets."""
        if self._filled is None:
            self._filled = [target for target in self._targets if target is not None]
        return self._filled

    @property
    def nbytes(self) -> int:
        """Of all targets."""
        if self._nbytes is None:
            targets = [target for _, target, _, _ in self._copies if target is not None]
            self._nbytes = sum([size_of((target.dtype, target.shape)) for target in targets])
        return self._nbytes

    def prepared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, or what it returned before for this key. It must not hold the targets' memory."""
        if key not in self._known:
            if len(self._known) >= _MOST_PREPARED:  # memory that moves all the time must not fill this one
                self._known.clear()
            self._known[key] = make()
        prepared: T = self._known[key]
        return prepared


def size_of(shape: Shape) -> int:
    """Bytes of a tensor of that dtype and shape."""
    dtype, extents = shape
    return math.prod(extents) * dtype.itemsize


class Pieces(NamedTuple):
    """Equal pieces of exposed memory to copy: arrays of one length (int64), however many there are."""

    source: numpy.ndarray
    """Which of the exposed tensors."""
    offset: numpy.ndarray
    """From its first element, in bytes."""
    target: numpy.ndarray
    """Where it goes: its address in this process."""
    width: int
    """Bytes of each."""


#: For each copy of a read: None if the lane has made it; else a tensor, on any device and with any strides, with what
#: the target is to receive. Without a target, the tensor that arrived.
Arrived = list[torch.Tensor | None]


def arrived(tensors: Sequence[torch.Tensor], copies: Copies | None) -> Arrived:
    """What ``read`` returns where the tensors of the export have arrived as a whole, some perhaps in a target."""
    if copies is None:
        return list(tensors)
    views = [(copy.target, copy.view_of(tensors[copy.source])) for copy in copies]
    return [None if target is not None and target.address == view.data_ptr() else view for target, view in views]


def whole_targets(copies: Copies | None, shapes: Sequence[Shape], device: torch.device) -> list[torch.Tensor | None]:
    """For each exported tensor, the contiguous target on ``device`` that is to receive all of it, if there is one."""
    targets: list[torch.Tensor | None] = [None] * len(shapes)
    if copies is None:
        return targets
    uses = Counter([copy.source for copy in copies])  # another copy of the same tensor reads it as it was exported
    for index, (source, target, offset, strides) in enumerate(copies):
        if target is not None and uses[source] == 1 and target.device == device and not offset and strides is None:
            tensor = copies.target(index)
            if tensor is not None and tensor.is_contiguous() and tensor.nbytes == size_of(shapes[source]):
                targets[source] = tensor
    return targets


# --- tensor lanes ------------------------------------------------------------------------------------------


class Export(NamedTuple):
    """Tensors that one peer may read once."""

    descriptor: Any
    """Travels in the message. Builtins only (int, str, bytes, tuples of them)."""
    cancel: Callable[[], object]
    """Withdraws the export, because the message with the descriptor was not sent."""
    finished: Callable[[], object] = nothing
    """Called when the call is over, so the receiver has read the tensors, on the thread that exported them.

    CUDA work that this thread queues afterwards follows the receiver's copy.
    """


class TensorLane(PeerLane):
    """Carries tensors out of band: the sender exports, the receiver reads or releases.

    The sender keeps an export until then, or until the receiver is gone. The methods behind ``release`` have a meaning
    only for lanes that read in place, or that share the memory of a GPU.
    """

    capabilities: ClassVar[TensorCapabilities]

    @abstractmethod
    def open(self) -> Any:
        """Allocate what the lane needs; returns the address that peers ``connect`` to. Raises LaneUnavailable."""

    @abstractmethod
    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        """Make all tensors of one message available to ``peer``.

        Afterwards the caller may drop the tensors. It may change CPU tensors at once (but see ``reads_later``), and
        CUDA tensors after ``Export.finished``. What lies in memory of ``lend``, or on a GPU, may not be copied before
        it is read.

        ``devices``: where tensors arrive, this process's GPU -> the peer's. Either may be "cpu"; such entries concern
        only lanes whose capabilities have ``takes_cuda``.

        Raises LaneUnavailable if it cannot (no room, or memory that it cannot share); then the message carries them.
        """

    @abstractmethod
    def read(self, peer: str, descriptor: Any, shapes: Sequence[Shape], copies: Copies | None = None) -> Arrived:
        """Receive the tensors, on the thread that will use them. Called once per descriptor.

        ``shapes``: of the exported tensors. ``copies``: what to receive, and where; None: all of each tensor, in a
        storage of its own. The lane makes those copies that it can make without an intermediate one, after the work
        that this thread has queued on the targets. It returns tensors for the others, which the caller copies and
        drops. After this returns or raises, only work queued on this thread's streams writes to the targets.

        A region outside of its tensor raises LaneUnavailable before anything is copied. Raises PeerLost if the peer is
        gone or no longer has the tensors; LaneUnavailable if the peer lives and this process cannot access its memory.
        """

    @abstractmethod
    def release(self, peer: str, descriptor: Any) -> None:
        """Give back what will not be read. Quick; never raises for a peer that is gone."""

    # --- memory that a GPU shares ------------------------------------------------------------------------------

    def share(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        """Like ``export``, for CUDA tensors and a peer on the same GPU: the receiver may get this memory itself.

        Then each process sees what the other writes, and this process keeps the memory until the receiver has dropped
        its last tensor on it. A lane that cannot share memory copies.
        """
        return self.export(tensors, peer, devices)

    def used(self, peer: str, descriptor: Any) -> None:
        """Called when the method that used the tensors has returned, on its thread, before the reply.

        CUDA work that the method queued then precedes what the sender queues after the reply.
        """

    # --- memory that is read in place --------------------------------------------------------------------------
    #
    # Its owner fills it once for many readers, and must not write to it until all that was exported from it has been
    # read: it learns that from its readers, because the lane does not report it, and calls ``fence`` before it writes.

    def lend(self, size: int) -> torch.Tensor | None:
        """Allocate ``size`` bytes as a flat uint8 CPU tensor, which are exported without a copy; None without room or
        support.

        The memory stays allocated while a tensor on it lives.
        """
        return None

    def mapped(self, peer: str) -> int:
        """Bytes of what a peer has lent that are mapped in this process."""
        return 0

    def move(self, target: int, source: int, size: int) -> None:
        """Copy ``size`` bytes from one address of this process to another, with all of the lane's copy threads. Blocks.

        Raises LaneUnavailable after ``close``.
        """
        ctypes.memmove(target, source, size)

    def prepare(self, peer: str, descriptor: Any) -> None:
        """Tensors in the same memory will be read soon, not these. Quick; never raises."""

    def view(self, peer: str, descriptor: Any, shapes: Sequence[Shape]) -> list[torch.Tensor] | None:
        """Like ``read``, for flat uint8 CPU tensors, but return the owner's memory, read-only.

        It stays mapped while a tensor on it lives. A write to it ends the process. None: not all of it is lent.
        """
        self.release(peer, descriptor)
        return None

    def expose(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Describe tensors of one device type, with any strides, for ``gather`` by any peer and as often as it likes.

        Builtins only. The owner keeps the tensors, until ``conceal``. Raises LaneUnavailable if peers cannot read them
        in place.
        """
        raise LaneUnavailable(self.name, "it does not read the memory of peers in place")

    def conceal(self, descriptor: Any, peers: Iterable[str]) -> None:
        """End what ``expose`` described, to these peers. A lane whose reads need the tensors keeps them until reads in
        progress have ended. Does not block.
        """

    def gather(self, peer: str, descriptor: Any, pieces: Sequence[Pieces], device: torch.device) -> None:
        """Copy pieces of what a peer has exposed to memory on ``device``, without that process's help.

        Blocks on the CPU; CUDA copies are queued on this thread's current stream. The caller has checked that each
        piece lies in its tensor and in its target. Raises PeerLost if the process that exposed it is gone, as far as
        this one can see; LaneUnavailable if this process cannot read its memory.
        """
        raise LaneUnavailable(self.name, "it does not read the memory of peers in place")

    def fence(self, device: int) -> None:
        """Order this thread's CUDA work after the copies of all exports from that GPU that have been read.

        Concerns what the thread queues on its current stream from now on. Does not wait for the GPU.
        """


def in_place(lanes: Mapping[str, TensorLane]) -> list[TensorLane]:
    """Those of a member's tensor lanes that read the memory of peers in place."""
    return [lane for lane in tuple(lanes.values()) if lane.capabilities.in_place]
