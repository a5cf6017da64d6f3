"""The errors that this package raises.

Two families: errors that the caller can fix before trying again (``ConfigurationError``, ``BootstrapError``,
``NotAMember``, ``NoSuchMethod``), and errors of a call in flight (``LaneUnavailable``, ``PeerLost``, ``RpcTimeout``,
``CancelledError``, ``RemoteError``).
Messages say what failed and what to do.

All of them can be pickled, so an actor can raise one to its driver through Ray.
"""

from __future__ import annotations

import concurrent.futures
import queue
from typing import Any


class RayTorchRpcError(Exception):
    """Base class of all errors of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take more than the message; rebuild from the attributes, not from a constructor.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(cls: type[RayTorchRpcError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(RayTorchRpcError, ValueError):
    """The request cannot work: for instance a malformed device map, a duplicate actor or an unknown lane."""


class BootstrapError(RayTorchRpcError):
    """A group could not be formed or changed. ``members`` names the members that failed; the others were rolled
    back.
    """

    def __init__(self, message: str, members: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.members = members


class NotAMember(RayTorchRpcError):
    """This process, or the target of a call, is not a member of the group, or no longer."""


class NoSuchMethod(RayTorchRpcError, AttributeError):
    """The target's class has no method of that name, or the method is not decorated with ``@raytorchrpc.method``.

    Nothing ran. The message names the methods that may be called.
    """


class SerializationError(RayTorchRpcError, TypeError):
    """An argument or a result cannot be pickled, or cannot be unpickled by the receiver. The message says which."""


class LaneUnavailable(RayTorchRpcError):
    """A lane cannot carry this message between two members that are both reachable.

    Arguments were not sent. A method whose result cannot be carried did run.

    Attributes:
        lane: the lane's name, as in ``GroupConfig.lanes``.
        reason: why, and what would change it.
    """

    def __init__(self, lane: str, reason: str) -> None:
        super().__init__(f"lane {lane!r} is not available: {reason}")
        self.lane = lane
        self.reason = reason


class PeerLost(RayTorchRpcError, ConnectionError):
    """The other member was lost, or the connection to it broke, while a call was in flight.

    Attributes:
        peer: the member's name.
        cause: what was observed ("connection reset", "actor died", ...).
        may_have_run: False only if the call certainly did not run there.
    """

    def __init__(self, peer: str, cause: str, may_have_run: bool = True) -> None:
        tail = "the call may have run there" if may_have_run else "the call did not run there"
        super().__init__(f"lost member {peer!r}: {cause}; {tail}")
        self.peer = peer
        self.cause = cause
        self.may_have_run = may_have_run


class PeerBusy(RayTorchRpcError):
    """As many calls or bytes are in flight to that member as ``GroupConfig`` allows; nothing was sent.

    Attributes:
        peer: the member's name.
        calls: the number of calls to it in flight.
        bytes: the size of their arguments.
    """

    def __init__(self, message: str, peer: str, calls: int, bytes: int) -> None:
        super().__init__(message)
        self.peer = peer
        self.calls = calls
        self.bytes = bytes


class RpcTimeout(RayTorchRpcError, TimeoutError):
    """A call's deadline passed before its result arrived. The method may still be running."""


class CancelledError(RayTorchRpcError, concurrent.futures.CancelledError):
    """The call was cancelled by ``Future.cancel``. An ``await`` raises ``asyncio.CancelledError`` instead."""


class NotFound(RayTorchRpcError, LookupError):
    """A member has no queue, topic or weights of that name, or not that version. The message names what it has."""


class Empty(RayTorchRpcError, queue.Empty):
    """No item arrived before the timeout. The queue is still open."""


class _NotAllAccepted(RayTorchRpcError):
    def __init__(self, message: str, accepted: int = 0) -> None:
        super().__init__(message)
        self.accepted = accepted


class Full(_NotAllAccepted, queue.Full):
    """The queue had no room before the timeout.

    Attributes:
        accepted: how many of the call's items, from the first, are in the queue. Always 0 except for ``put_many``.
    """


class Closed(_NotAllAccepted):
    """The queue or topic is closed. A consumer gets this after the last item.

    Attributes:
        accepted: as for ``Full``.
    """


class TransferFailed(RayTorchRpcError):
    """The tensors of an ObjectRef did not arrive. Both actors keep running; the next transfer can succeed.

    Attributes:
        object_id: hex id of the object, as in ``ObjectRef.hex()``.
        source: the member or process that held its tensors.
    """

    def __init__(self, object_id: str, source: str, cause: str) -> None:
        super().__init__(f"the tensors of object {object_id} did not arrive from {source}: {cause}")
        self.object_id = object_id
        self.source = source


class ProcessGroupLost(RayTorchRpcError, ConnectionError):
    """This member has no torch.distributed process group. The message says why, and how to create the next one.

    A collective that was running raises torch's own RuntimeError; one that starts afterwards raises ValueError.
    """


class RemoteError(RayTorchRpcError):
    """The remote method raised an exception that cannot be reconstructed here with its own type.

    Attributes:
        type_name: qualified name of the remote exception's class.
        traceback_text: the remote traceback, ready to print.
    """

    def __init__(self, message: str, type_name: str = "", traceback_text: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.traceback_text = traceback_text


def no_memory(process: str, subject: str, cause: BaseException) -> MemoryError:
    """The error of a process that has no memory to receive, pickle or unpickle ``subject``."""
    return MemoryError(
        f"{process} has no memory for {subject} ({shown(cause)}): send less at a time, or raise its limit on memory "
        f"(ulimit -v, the container's)"
    )


def shown(error: BaseException) -> str:
    """One line for a message: the exception's class, and its text if it has one."""
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # a user's own __str__
        return f"{kind} (its __str__ fails)"
    return f"{kind}: {text}" if text else kind
