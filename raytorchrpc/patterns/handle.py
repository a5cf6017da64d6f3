"""What queues, topics and weights have in common: a handle that leads to what lives in one member, its home."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, ClassVar, TypeVar

from raytorchrpc.calls import rejoin
from raytorchrpc.calls import waiting as _waiting
from raytorchrpc.calls.current import current_local, process_member
from raytorchrpc.calls.exposed import Exposed
from raytorchrpc.calls.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import MAX_TIMEOUT_S, CallOptions
from raytorchrpc.calls.peers import Member, PeerRoute
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.calls.services import DeferredReply, builtin_services
from raytorchrpc.errors import ConfigurationError, NotAMember, NotFound, PeerLost, RpcTimeout

T = TypeVar("T")
H = TypeVar("H", bound="Handle")

#: The home waits for the whole timeout and then answers that nothing came; the caller waits so much longer for that
#: answer (seconds).
_ANSWER_S = 0.5
#: How long an operation with timeout 0, which waits for nothing else, waits for its answer (seconds).
_ANSWER_NOW_S = 1.0

#: What an operation has to wait for, one after another; it is sent what came of each.
Steps = Generator["Future[Any] | DeferredReply", Any, T]
#: What makes one of a kind at its home: (member, name, settings) -> it, and whether settings are those of one it has.
Maker = Callable[[LocalMember, str, Any], Any]

_makers: dict[str, Maker] = {}
_tickets = itertools.count(1)


def new_ticket() -> int:
    """Names a request of this process."""
    return next(_tickets)


def makes(kind: str, maker: Maker) -> None:
    """Register what makes objects of this kind at their home. They have ``settings``, besides what ``Served`` asks."""
    _makers[kind] = maker


def serve(name: str, function: Callable[..., Any]) -> None:
    """Every member serves this to the others: ``function(member, caller's rank, *args)``, see ``Exposed.service``."""
    builtin_services[name] = Exposed(function, True, None, False, False, False, frozen=True, service=True)


# --- waiting -------------------------------------------------------------------------------------------------


class _Waiting:
    """A Later as ``execution.wait_serving`` wants it."""

    loop_token = None

    def __init__(self, later: DeferredReply) -> None:
        self._later = later

    def wait(self, timeout_s: float) -> bool:
        """Block until it is settled."""
        try:
            self._later.exception(timeout_s)  # returns it, if there is one
        except concurrent.futures.TimeoutError:
            return False
        return True

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it is settled."""
        self._later.add_done_callback(lambda _: callback())


def run(steps: Steps[T]) -> T:
    """Go through an operation, on this thread. Blocks; serves meanwhile what comes back to this actor."""
    try:
        waiting = next(steps)
        while True:
            try:
                value = _waited_for(waiting)
            except BaseException as error:
                del waiting  # it holds what it raised, which holds this frame
                waiting = steps.throw(error)
            else:
                waiting = steps.send(value)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _waited_for(waiting: Future[Any] | DeferredReply) -> Any:
    if isinstance(waiting, Future):
        try:
            return waiting.wait()
        finally:
            del waiting
    _waiting.wait_serving(_Waiting(waiting), MAX_TIMEOUT_S)  # whoever made it sees to it that it is settled in time
    return waiting.outcome()


async def arun(steps: Steps[T]) -> T:
    """Go through an operation, from a coroutine."""
    try:
        waiting = next(steps)
        while True:
            try:
                if isinstance(waiting, Future):
                    value = await waiting
                else:
                    await asyncio.wrap_future(waiting)
                    value = waiting.outcome()
            except BaseException as error:
                del waiting
                waiting = steps.throw(error)
            else:
                waiting = steps.send(value)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def patience(local: LocalMember, timeout: float | None) -> float:
    """Seconds to wait at the home. None: as long as a call. Less if a call that is being served ends before."""
    seconds = local.config.rpc_timeout_s if timeout is None else timeout
    number: Any = seconds
    if not isinstance(number, (int, float)) or not 0 <= number <= MAX_TIMEOUT_S:
        raise ConfigurationError(f"timeout is a number of seconds from 0 to {MAX_TIMEOUT_S}, not {timeout!r}")
    deadline = current_scope.get().deadline
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RpcTimeout("no time left: the deadline of the call that is being served has passed")
        seconds = min(seconds, left - min(_ANSWER_S, left / 4))
    return float(seconds)


def membership(timeout: float | None = None) -> Steps[tuple[LocalMember, float]]:
    """To be done before all else: the member that this process is, and the ``patience`` that is left then. In a
    restarted actor it waits until the group has taken it back.
    """
    local, since = current_local(), time.monotonic()
    if local is not None:
        return local, patience(local, timeout)
    asked = _answer_within(timeout) if isinstance(timeout, (int, float)) else None
    local = yield rejoin.awaited(asked)
    return local, max(0.0, patience(local, timeout) - (time.monotonic() - since))


def _answer_within(seconds: float) -> float:
    """How long to wait for the answer to an operation that may take ``seconds`` at the home."""
    return min(MAX_TIMEOUT_S, seconds + _ANSWER_S if seconds > 0 else _ANSWER_NOW_S)


# --- handles -------------------------------------------------------------------------------------------------


class Handle:
    """Leads to an object that lives in a member, its home. Picklable.

    A handle binds to one life of the object: to the one that is there, or is made, when the handle is first used. Every
    request names that life. Once it has ended, each raises NotFound, though a new object of that name may be there.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, home: Any, settings: Any) -> None:
        """``home``: a member's name, rank or handle, or a Member; None: this member. ``settings``: what it is made
        with where there is none yet; None: it has to be there.
        """
        given: Any = name
        if not isinstance(given, str) or not given:
            raise ConfigurationError(f"a {self.kind} needs a name, not {name!r}")
        self._name, self._settings = name, settings
        local = current_local()
        if local is None and home is None:
            with contextlib.suppress(NotAMember):
                local = process_member()
        if local is not None:
            home = local.me.name if home is None else local.peers.route(home).member.name
        elif isinstance(home, Member):
            home = home.name
        elif not isinstance(home, str):
            raise ConfigurationError(
                f"{self.kind} {name!r} needs a home: this process is in no group, so say home='a member's name'"
            )
        self._home: str = home
        self._known: Any = settings
        self._life: int | None = None
        """Of the object that this handle is bound to; None before its first use."""
        self._binding = threading.Lock()
        self._begin()
        if local is not None and local.me.name == home:
            run(self._ready(local))

    @classmethod
    def find(cls: type[H], name: str, *, timeout: float | None = None) -> H:
        """The one of that name, wherever in the group it lives: asks every member, and blocks for the answers.

        Raises NotFound if nobody has one. ``timeout`` in seconds.
        """
        local = process_member(timeout)
        if (here := _find(local, local.me.rank, cls.kind, name)) is not None:
            return cls._bound(name, local.me.name, *here)
        asked: list[tuple[str, Future[tuple[Any, int] | None]]] = []
        for route in local.peers.routes:
            if route.member.rank != local.me.rank:
                try:
                    call = local.outgoing.call(route.member, _FIND, (cls.kind, name), {}, CallOptions(timeout, retry=0))
                except PeerLost:
                    continue  # it is away, and has nothing
                asked.append((route.member.name, Future(call)))
        silent = []
        for member, future in asked:
            try:
                if (there := future.wait()) is not None:
                    return cls._bound(name, member, *there)
            except (PeerLost, RpcTimeout):
                silent.append(member)
        unheard = f"; {', '.join(silent)} did not answer" if silent else ""
        raise NotFound(f"no member of group {local.group!r} has a {cls.kind} {name!r}{unheard}")

    @classmethod
    def _bound(cls: type[H], name: str, home: str, settings: Any, life: int | None) -> H:
        made = cls.__new__(cls)
        made._name, made._home, made._settings, made._known, made._life = name, home, settings, settings, life
        made._binding = threading.Lock()
        made._begin()
        return made

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    @property
    def home(self) -> str:
        """The name of the member where it lives."""
        return self._home

    def __reduce__(self) -> tuple[Any, ...]:
        with self._binding:
            settings, life = self._known, self._life
        return _handle, (type(self), self._name, self._home, settings, life)

    def __repr__(self) -> str:
        return f"<raytorchrpc.{type(self).__name__} {self._name!r} in {self._home!r}>"

    # --- for those that derive from it -----------------------------------------------------------------------

    @property
    def _object(self) -> tuple[str, str, int | None]:
        """Names the object in requests to its home; after ``_ready``."""
        return self.kind, self._name, self._life

    def _begin(self) -> None:
        """What a handle has besides, in every process anew."""

    def _route(self, local: LocalMember) -> PeerRoute | None:
        """To the home; None if that is this member."""
        route = local.peers.route(self._home)
        return None if route.member.rank == local.me.rank else route

    def _ready(self, local: LocalMember, wait_s: float | None = None) -> Steps[PeerRoute | None]:
        """Bind to the object, which is made if its home has none. To be done first; nothing later makes one.

        ``wait_s``: as for ``_ask``. Returns what ``_route`` does.
        """
        route = self._route(local)
        if self._life is None:
            args = (self.kind, self._name, self._settings)
            if route is None:
                settings, life = _open(local, local.me.rank, *args)
            else:
                settings, life = yield from self._ask(local, OPEN, args, wait_s)
            with self._binding:
                if self._life is None:  # another thread may have bound it meanwhile
                    self._known, self._life = settings, life
        return route

    def _ask(
        self, local: LocalMember, service: str, args: tuple[Any, ...], wait_s: float | None, **how: Any
    ) -> Steps[Any]:
        """What the home answers. ``wait_s``: the time of the whole operation; None: as long as a call."""
        return (yield from self._answered(self._sent(local, service, args, wait_s, **how)))

    def _answered(self, sent: Future[Any]) -> Steps[Any]:
        """What the home answers to what was sent to it."""
        try:
            return (yield sent)
        except PeerLost as lost:
            error = self._lost(lost)
        finally:
            del sent  # it holds what it raised, which holds this frame
        raise error

    def _sent(
        self, local: LocalMember, service: str, args: tuple[Any, ...], wait_s: float | None, **how: Any
    ) -> Future[Any]:
        timeout = None if wait_s is None else _answer_within(wait_s)
        try:
            return Future(local.outgoing.call(self._home, service, args, {}, CallOptions(timeout, retry=0, **how)))
        except PeerLost as lost:
            error = self._lost(lost)
        raise error

    def _lost(self, lost: PeerLost) -> PeerLost:
        home = f"it is the home of {self.kind} {self._name!r}; what was in it is gone if its process ended"
        return PeerLost(lost.peer, f"{lost.cause} ({home})", lost.may_have_run)


def _handle(cls: type[Handle], name: str, home: str, settings: Any, life: int | None) -> Handle:
    if life is not None:
        return cls._bound(name, home, settings, life)
    made = cls.__new__(cls)
    Handle.__init__(made, name, home, settings)
    return made


# --- at home -------------------------------------------------------------------------------------------------

OPEN, _FIND = "raytorchrpc.open", "raytorchrpc.find"


def _open(local: LocalMember, caller: int, kind: str, name: str, settings: Any) -> tuple[Any, int]:
    """The settings and the life of the object that is there, or is made now; ``settings`` None: it has to be there."""
    if settings is None:
        found = local.services.find(kind, name, None, local.me.name)
        return found.settings, found.life
    made = local.services.open(kind, name, partial(_makers[kind], local, name, settings))
    if made.settings != settings:
        raise ConfigurationError(
            f"member {local.me.name!r} has a {kind} {name!r} with other settings: {made.settings}, not {settings}"
        )
    return made.settings, made.life


def _find(local: LocalMember, caller: int, kind: str, name: str) -> tuple[Any, int] | None:
    found = local.services.get(kind, name)
    return None if found is None else (found.settings, found.life)


serve(OPEN, _open)
serve(_FIND, _find)
