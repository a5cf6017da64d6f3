"""Every error the package raises on purpose.

Two families are kept apart: what the caller can mend before trying again (``ConfigurationError``,
``BootstrapError``, ``NotAMember``) and what happened to a call on its way (``LaneUnavailable``,
``PeerLost``, ``RpcTimeout``, ``RemoteError``). Each message names the thing and the remedy.

All of them survive pickling, so a member can hand one to its driver through Ray unchanged.
"""

from __future__ import annotations

import queue
from typing import Any


class RayTorchRpcError(Exception):
    """Base class: ``except RayTorchRpcError`` catches whatever this package raises itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take more than the message; rebuild from the attributes, not from a constructor.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(cls: type[RayTorchRpcError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(RayTorchRpcError, ValueError):
    """The request itself cannot work: a malformed device map, a duplicate actor, an unknown lane."""


class BootstrapError(RayTorchRpcError):
    """A group could not be formed. ``members`` names who stood in the way; the others were rolled back."""

    def __init__(self, message: str, members: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.members = members


class NotAMember(RayTorchRpcError):
    """This process, or the named target, is not (or is no longer) in the group."""


class SerializationError(RayTorchRpcError, TypeError):
    """An argument or a result cannot be pickled, or cannot be unpickled at the other end; the message says which."""


class LaneUnavailable(RayTorchRpcError):
    """A lane cannot carry this between these two members, which are both there.

    Arguments have not been sent then. A method whose result cannot be carried did run.

    Attributes:
        lane: the lane's name, as in ``GroupConfig.lanes``.
        reason: what was seen and what would change it.
    """

    def __init__(self, lane: str, reason: str) -> None:
        super().__init__(f"lane {lane!r} is not available: {reason}")
        self.lane = lane
        self.reason = reason


class PeerLost(RayTorchRpcError, ConnectionError):
    """The other member went away, or the route to it broke, while a call was under way.

    Attributes:
        peer: the member's name.
        cause: what was seen ("connection reset", "actor died", ...).
        may_have_run: False only if the call provably never reached the peer.
    """

    def __init__(self, peer: str, cause: str, may_have_run: bool = True) -> None:
        tail = "the call may have run there" if may_have_run else "the call did not run there"
        super().__init__(f"lost member {peer!r}: {cause}; {tail}")
        self.peer = peer
        self.cause = cause
        self.may_have_run = may_have_run


class PeerBusy(RayTorchRpcError):
    """As much is under way to that member as ``GroupConfig`` allows; nothing has been sent.

    Attributes:
        peer: the member's name.
        calls: how many calls to it wait for an answer.
        bytes: of their arguments.
    """

    def __init__(self, message: str, peer: str, calls: int, bytes: int) -> None:
        super().__init__(message)
        self.peer = peer
        self.calls = calls
        self.bytes = bytes


class RpcTimeout(RayTorchRpcError, TimeoutError):
    """A call's deadline passed before its result arrived. The call may still run to its end there."""


class NotFound(RayTorchRpcError, LookupError):
    """A member has no queue, topic or weights of that name, or not that version; what it has is named."""


class Empty(RayTorchRpcError, queue.Empty):
    """Nothing came within the time given; the queue is still open."""


class Full(RayTorchRpcError, queue.Full):
    """There was no room within the time given.

    Attributes:
        accepted: how many items of the call are in the queue: the first so many. 0 but for ``put_many``.
    """

    def __init__(self, message: str, accepted: int = 0) -> None:
        super().__init__(message)
        self.accepted = accepted


class Closed(RayTorchRpcError):
    """It takes nothing any more; or, for a consumer, everything that was in it has been taken.

    Attributes:
        accepted: as for ``Full``.
    """

    def __init__(self, message: str, accepted: int = 0) -> None:
        super().__init__(message)
        self.accepted = accepted


class TransferFailed(RayTorchRpcError):
    """The tensors of an ObjectRef did not arrive. The actors at both ends go on; the next transfer can work.

    Attributes:
        object_id: hex id of the object, as in ``ObjectRef.hex()``.
        source: who has, or had, its tensors.
    """

    def __init__(self, object_id: str, source: str, cause: str) -> None:
        super().__init__(f"the tensors of object {object_id} did not arrive from {source}: {cause}")
        self.object_id = object_id
        self.source = source


class ProcessGroupLost(RayTorchRpcError, ConnectionError):
    """This member has no torch.distributed process group now; the text says what became of it, and who makes the next.

    A collective that was under way raises what torch does: a RuntimeError, or a ValueError if it begins afterwards.
    """


class RemoteError(RayTorchRpcError):
    """The remote method raised something that cannot be raised again here under its own type.

    Attributes:
        type_name: qualified name of the remote exception's class.
        traceback_text: the remote traceback, ready to print.
    """

    def __init__(self, message: str, type_name: str = "", traceback_text: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.traceback_text = traceback_text


def shown(error: BaseException) -> str:
    """Any exception for a message, in one line: its class, and its text if that can be had."""
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # a user's own __str__
        return f"{kind} (its __str__ fails)"
    return f"{kind}: {text}" if text else kind
