"""What a lane is: the interfaces, and the data that crosses them.

A lane is opened once per member and group, told of its peers, and closed with the group. It never imports
another lane, the group or the member; it gets all it needs here.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from raytorchrpc.errors import PeerLost
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.cuda_streams import nothing
from raytorchrpc.tensors.dtypes import Shape


class Message(NamedTuple):
    """One request or one reply.

    header: a tuple of small builtins (str, int, float, tuples of them), readable without unpickling the body.
    body: the encoded arguments or result.
    manifests: what the message says of tensors that travel beside it (see ``shipping``); builtins only.
    make_current: to be called by the thread that will use the tensors, before it does: makes CUDA work queued by
        the lane precede that thread's own.
    unread_bytes: size of a message that this process had no memory for; its body is lost. 0: the body is here.
    """

    header: tuple[Any, ...]
    body: Encoded
    make_current: Callable[[], None] = nothing
    manifests: tuple[Any, ...] = ()
    unread_bytes: int = 0


class Pending(ABC):
    """One request under way. Completed exactly once, by the lane, with a reply or an error."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Block until the reply or an error is there, at most ``timeout_s``; False if it is not."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when done, on a lane's thread (at once, on this one, if it is done already).

        It must be short and must not block: the lane carries nothing else meanwhile.
        """

    @abstractmethod
    def take(self) -> Message:
        """The reply; only once done. Raises PeerLost, RpcTimeout or another RayTorchRpcError."""


#: ``reply(message)``: answers one request; exactly once, now or later, from any thread. Sends before it returns;
#: raises PeerLost if the caller is gone.
Reply = Callable[[Message], None]
#: ``serve(message, reply)``: called on a lane's thread for each request. Never blocks. May return work, the
#: running of the method: the lane does it on a thread it can spare, or hands it to ``spawn``. The socket lane calls
#: it in the order in which a caller sent.
Serve = Callable[[Message, Reply], Callable[[], None] | None]
Spawn = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class Capabilities:
    """What a lane can do, as data, so that nobody asks which lane it is."""

    in_band_bytes: int | None
    """CPU tensors up to this many bytes a message travel in it; None: any number. More need another lane."""
    in_band_cuda: bool
    """CUDA tensors travel in it."""
    copies_at_once: bool
    """``call`` and ``reply`` have taken the tensors' data when they return; else they take it later."""
    rrefs: bool
    """Carries torch RRefs, and records the hop in torch's distributed autograd."""

    def carries(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a message may hold these tensors."""
        if not tensors:
            return True
        if not self.in_band_cuda and any(tensor.is_cuda for tensor in tensors):
            return False
        return self.in_band_bytes is None or sum(tensor.nbytes for tensor in tensors) <= self.in_band_bytes


class PeerAddress(NamedTuple):
    """Where one lane of one member can be reached; small, picklable, made by ``MessageLane.open``."""

    peer: str
    address: Any
    devices_back: Mapping[int, int] = {}
    """Where CUDA results of that peer's calls arrive: this process's GPU -> the peer's."""


class MessageLane(ABC):
    """Carries requests and replies between this member and its peers. Thread-safe."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def open(self, serve: Serve, spawn: Spawn) -> Any:
        """Start to listen; returns the address that peers ``connect`` to. Raises LaneUnavailable."""

    @abstractmethod
    def connect(self, peers: Sequence[PeerAddress]) -> None:
        """Make these peers reachable. May connect lazily; a peer that is gone shows at the first call."""

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> Any:
        """From now on these are the peers that TCP leads to, and ``tcp_host`` is where they reach this member.

        Returns the lane's address if that has changed by it, else None. Raises LaneUnavailable.
        """
        return None

    @abstractmethod
    def call(
        self,
        peer: str,
        message: Message,
        timeout_s: float,
        *,
        caller_waits: bool = False,
        on_released: Callable[[], None] | None = None,
    ) -> Pending:
        """Send a request. Returns before the reply.

        ``caller_waits``: the caller is about to wait, on this thread; a lane may skip other arrangements.
        ``on_released``: called once the call is over: answered, however late, or lost. It is short. Any thread may call
        it, perhaps also if this raises.

        The tensors in ``message`` belong to the lane until the call is done and must not change meanwhile.
        Raises LaneUnavailable if nothing was sent and nothing can be, for instance for a CUDA tensor
        without a device map; PeerLost, with ``may_have_run`` False, for a peer that is not there (any more).
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer; calls under way to it fail with PeerLost."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing behind: no thread, no socket, no file. Idempotent, never raises, at most 2 s."""


# --- lanes for tensors alone -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorCapabilities:
    """What a tensor lane can do, as data."""

    devices: frozenset[str]
    """Device types it carries: "cpu", "cuda"."""
    one_sided: bool
    """The receiver fetches without the sender's help."""
    same_host: bool
    """Only between processes of one host."""
    zero_copy: bool
    """The receiver uses the memory that arrived, without a copy of its own."""
    takes_cuda: bool = False
    """CUDA tensors may be exported to arrive as CPU tensors."""
    in_parts: bool = False
    """It has ``scatter_into``."""
    parallel_move: bool = False
    """``move`` copies with several threads."""


def never_fetched(peer: str) -> PeerLost:
    """What ``fetch`` raises for tensors of a process that is not there any more."""
    return PeerLost(peer, "its process ended, or left the group, before its tensors were fetched")


#: Parts below this take longer to ask for than to copy (bytes).
SMALL = 256 << 10


class Part(NamedTuple):
    """What a tensor that is there already gets out of a flat one that comes."""

    offset: int
    """Where it begins, in bytes."""
    target: torch.Tensor
    """Without autograd; any strides, on any device."""


class Export(ABC):
    """Tensors laid out for one peer to fetch once."""

    descriptor: Any
    """Builtins only (int, str, bytes, tuples of them); rides in the message."""

    @abstractmethod
    def cancel(self) -> None:
        """Take it back: the message that carries the descriptor was not sent."""

    def finished(self) -> None:  # noqa: B027 - most lanes need nothing here
        """The call is over, so the receiver has fetched it. To be called on the thread that exported: its CUDA work
        from now on comes after the receiver's copy.
        """


class TensorLane(ABC):
    """Carries tensors beside the messages. The sender exports, the receiver fetches. Thread-safe.

    The sender keeps what it exported until the receiver has fetched or discarded it, or is gone.
    """

    name: ClassVar[str]
    capabilities: ClassVar[TensorCapabilities]

    @abstractmethod
    def open(self) -> Any:
        """Get ready; returns the address that peers ``connect`` to. Raises LaneUnavailable."""

    @abstractmethod
    def connect(self, peers: Sequence[PeerAddress]) -> None:
        """Learn of these peers; what is costly waits for the first fetch."""

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> Any:
        """See MessageLane."""
        return None

    @abstractmethod
    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        """Lay out all tensors of one message for ``peer``. The caller may drop them afterwards; it may change CPU
        tensors, and CUDA tensors after ``Export.finished``.

        ``devices``: where tensors are to arrive, this process's GPU -> the peer's; either may be "cpu", and entries
        with it concern no lane but those whose capabilities say ``takes_cuda``.

        Raises LaneUnavailable if it cannot (no room, memory of a kind it cannot share); then another lane can.
        """

    def share(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        """As ``export``, for CUDA tensors and a peer on the very same GPU: the receiver may get this memory itself.

        Then both see what either writes, and this process keeps the memory until the receiver has dropped its last
        tensor on it. A lane that cannot do that copies.
        """
        return self.export(tensors, peer, devices)

    def lend(self, size: int) -> torch.Tensor | None:
        """So many bytes of this process's memory, as flat uint8, that peers can read where they are: tensors in it are
        exported without a copy, and whoever fetches them gets a copy or fills tensors of his own.

        The owner must not change it until all that was exported from it has been fetched; nobody tells it. It is lent
        for as long as a tensor on it lives. None if this lane has no such memory, or has no room.
        """
        return None

    def move(self, target: int, source: int, size: int) -> None:
        """Copy so many bytes from one address of this process to another, with all threads that this lane has for it.

        Raises LaneUnavailable once it was closed.
        """
        ctypes.memmove(target, source, size)

    @abstractmethod
    def fetch(
        self, peer: str, descriptor: Any, shapes: Sequence[Shape], into: Sequence[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor]:
        """Get the tensors, in the thread that will use them. Once for each descriptor.

        ``into``: for each tensor, one of that dtype and shape that is to hold it, or None; on any device, with any
        strides, without autograd. What the lane can bring there without a copy in between, it does, after the work that
        this thread has queued on it, and returns that tensor. Otherwise it returns one of its own, which the caller
        copies and drops. When this has returned or raised, nothing but what is queued on this thread's streams writes
        there any more.

        Raises PeerLost if the peer is not there any more, or does not have them any more; LaneUnavailable if it is
        there and this process cannot get at its memory.
        """

    def scatter_into(
        self, peer: str, descriptor: Any, sizes: Sequence[int], parts: Sequence[Sequence[Part]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Instead of ``fetch``, for flat uint8 tensors of so many bytes: bring parts of each to where they belong, and
        nothing else, as ``fetch`` does with ``into``. Returns those left: (target, what the caller is to copy there).
        """
        raise NotImplementedError

    def used(self, peer: str, descriptor: Any) -> None:  # noqa: B027 - matters where memory is shared
        """The method that was called with these has returned. To be called on its thread, before the answer: CUDA work
        that it queued precedes what the sender queues after the answer.
        """

    def fence(self, device: int) -> None:  # noqa: B027 - matters where receivers copy by themselves
        """What this thread queues from now on, on its current stream of that GPU, comes after the copies of all that
        was exported from there and has been fetched. Does not wait for the GPU.
        """

    @abstractmethod
    def discard(self, peer: str, descriptor: Any) -> None:
        """Give up a descriptor that nobody will fetch. Quick; never raises for a peer that is gone."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer that left or died, and take back what it had not given back."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing behind but the memory that tensors still use. Idempotent, never raises."""
