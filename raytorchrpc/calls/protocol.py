"""The headers of requests and replies.

A header crosses as a plain tuple of builtins, which every lane can marshal: ``tuple(header)`` to send it. Read it with
``RequestHeader(*fields)``, ``ControlHeader(*fields)`` or ``ReplyHeader(*fields)``.
"""

from __future__ import annotations

from typing import NamedTuple

from raytorchrpc.calls.scope import Token

# Kinds of request: the first field of every request's header.
CALL = 0
"""Run a method and reply with its result."""
REMOTE = 1
"""Run a method; the result stays in the callee, in an RRef."""
PING = 2
"""Reply at once."""
WATCH = 3
"""Never answered: the caller's lane fails the request when this process ends."""
ASK = 4
"""Run a function of this package on a worker thread. The body holds (function, arguments)."""
CANCEL = 5
"""Cancel the call of that number."""
CLOSE = 6
"""Close the stream of that number."""

# Kinds of reply.
OK = 0
RAISED = 1
STREAM = 2
"""The method is a generator: ask for its items, in the stream of that number."""


class RequestHeader(NamedTuple):
    """The header of CALL and REMOTE."""

    kind: int
    caller: int
    """The caller's rank."""
    token: str
    """Names the process that the request is for; see ``peers.process_token``."""
    method: str
    path: tuple[Token, ...]
    """The admissions held along the chain of calls; see ``scope.Scope``."""
    seconds: float
    """Time left until the deadline."""
    deadline: float | None
    """By ``time.monotonic``, if both processes share that clock."""
    mark: int | None = None
    """Links the call to its method in a trace."""
    number: int = 0
    """Names the call in a CANCEL; 0: it cannot be cancelled."""


class ControlHeader(NamedTuple):
    """The header of all other requests."""

    kind: int
    caller: int
    token: str
    number: int = 0
    """For CANCEL: of the call. For CLOSE: of the stream."""


class ReplyHeader(NamedTuple):
    """The header of every reply except those to REMOTE, which carry (whether it raised, the object itself)."""

    kind: int
    number: int = 0
    """For STREAM: of the stream."""
    ahead: int = 0
    """For STREAM: how many items to ask for ahead."""
