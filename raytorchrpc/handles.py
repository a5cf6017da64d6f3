"""What queues, topics and weights have in common: a handle that leads to what lives in one member, its home."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, ClassVar, TypeVar

from raytorchrpc import execution, readmission, serving
from raytorchrpc.calls import Exposed, Future
from raytorchrpc.errors import ConfigurationError, NotAMember, NotFound, PeerLost, RpcTimeout
from raytorchrpc.execution import current_scope
from raytorchrpc.member import MAX_TIMEOUT_S, LocalMember, current_local, process_member
from raytorchrpc.peers import Member, PeerRoad
from raytorchrpc.services import Later

T = TypeVar("T")
H = TypeVar("H", bound="Handle")

#: The home answers in time that nothing came; a call waits so much longer for that answer (seconds).
GRACE_S = 5.0

#: What an operation has to wait for, one after another; it is sent what came of each.
Steps = Generator["Future[Any] | Later", Any, T]
#: What makes one of a kind at its home: (member, name, settings) -> it, and whether settings are those of one it has.
Maker = Callable[[LocalMember, str, Any], Any]

_makers: dict[str, Maker] = {}
_tickets = itertools.count(1)


def new_ticket() -> int:
    """Names a request of this process."""
    return next(_tickets)


def makes(kind: str, maker: Maker) -> None:
    """Members can be homes of this kind. What the maker returns has ``settings``, besides what ``Served`` asks."""
    _makers[kind] = maker


def serve(name: str, function: Callable[..., Any]) -> None:
    """Every member serves this to the others: ``function(member, caller's rank, *args)``, see ``Exposed.service``."""
    serving.own_methods[name] = Exposed(function, True, None, False, False, False, frozen=True, service=True)


# --- waiting -------------------------------------------------------------------------------------------------


class _Waiting:
    """A Later as ``execution.wait_serving`` wants it."""

    loop_token = None

    def __init__(self, later: Later) -> None:
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


def _waited_for(waiting: Future[Any] | Later) -> Any:
    if isinstance(waiting, Future):
        try:
            return waiting.wait()
        finally:
            del waiting
    execution.wait_serving(_Waiting(waiting), MAX_TIMEOUT_S)  # whoever made it sees to it that it is settled in time
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
        seconds = min(seconds, left - min(GRACE_S, left / 4))
    return float(seconds)


def membership(timeout: float | None = None) -> Steps[tuple[LocalMember, float]]:
    """To be done before all else: the member that this process is, and the ``patience`` that is left then. In a
    restarted actor it waits until the group has taken it back.
    """
    local, since = current_local(), time.monotonic()
    if local is not None:
        return local, patience(local, timeout)
    asked = timeout + GRACE_S if isinstance(timeout, (int, float)) else None
    local = yield readmission.awaited(asked)
    return local, max(0.0, patience(local, timeout) - (time.monotonic() - since))


# --- handles -------------------------------------------------------------------------------------------------


class Handle:
    """Leads to something that lives in a member. Picklable; each process that has one goes there by itself."""

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
            home = local.me.name if home is None else local.road(home).member.name
        elif isinstance(home, Member):
            home = home.name
        elif not isinstance(home, str):
            raise ConfigurationError(
                f"{self.kind} {name!r} needs a home: this process is in no group, so say home='a member's name'"
            )
        self._home: str = home
        self._ready_in: str | None = None
        """The process of the home that is known to have it."""
        self._known: Any = settings
        self._begin()
        if local is not None and local.me.name == home:
            run(self._ready(local))

    @classmethod
    def find(cls: type[H], name: str, *, timeout: float | None = None) -> H:
        """The one of that name, wherever in the group it lives: asks every member, and blocks for the answers.

        Raises NotFound if nobody has one. ``timeout`` in seconds.
        """
        local = process_member(timeout)
        if local.services.has(cls.kind, name):
            return cls._at(name, local.me.name)
        asked: list[tuple[str, Future[bool]]] = []
        for road in local.roads:
            if road.member.rank != local.me.rank:
                try:
                    call = local.call(road.member, _HAS, (cls.kind, name), {}, timeout, retry=0)
                except PeerLost:
                    continue  # it is away, and has nothing
                asked.append((road.member.name, Future(call)))
        silent = []
        for member, future in asked:
            try:
                if future.wait():
                    return cls._at(name, member)
            except (PeerLost, RpcTimeout):
                silent.append(member)
        unheard = f"; {', '.join(silent)} did not answer" if silent else ""
        raise NotFound(f"no member of group {local.group!r} has a {cls.kind} {name!r}{unheard}")

    @classmethod
    def _at(cls: type[H], name: str, home: str) -> H:
        made = cls.__new__(cls)
        Handle.__init__(made, name, home, None)
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
        return _handle, (type(self), self._name, self._home, self._settings)

    def __repr__(self) -> str:
        return f"<raytorchrpc.{type(self).__name__} {self._name!r} in {self._home!r}>"

    # --- for those that derive from it -----------------------------------------------------------------------

    def _begin(self) -> None:
        """What a handle has besides, in every process anew."""

    def _road(self, local: LocalMember) -> PeerRoad | None:
        """To the home; None if that is this member."""
        road = local.road(self._home)
        return None if road.member.rank == local.me.rank else road

    def _ready(self, local: LocalMember) -> Steps[PeerRoad | None]:
        """To be done before anything else: makes it where it is to be made. Returns what ``_road`` does."""
        road = self._road(local)
        token = local.server.token if road is None else road.token
        if self._ready_in != token:
            args = (self.kind, self._name, self._settings)
            if self._ready_in is not None:
                args = (*args[:2], None)  # it was there: a new one of that name would not be the same
            if road is None:
                self._known = _open(local, local.me.rank, *args)
            else:
                self._known = yield from self._ask(local, OPEN, args, None)
            self._ready_in = token
        return road

    def _ask(
        self, local: LocalMember, service: str, args: tuple[Any, ...], wait_s: float | None, **how: Any
    ) -> Steps[Any]:
        """What the home answers. ``wait_s``: it may take that long before it does."""
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
        timeout = None if wait_s is None else min(MAX_TIMEOUT_S, wait_s + GRACE_S)
        try:
            return Future(local.call(self._home, service, args, {}, timeout, retry=0, **how))
        except PeerLost as lost:
            error = self._lost(lost)
        raise error

    def _lost(self, lost: PeerLost) -> PeerLost:
        home = f"it is the home of {self.kind} {self._name!r}; what was in it is gone if its process ended"
        return PeerLost(lost.peer, f"{lost.cause} ({home})", lost.may_have_run)


def _handle(cls: type[Handle], name: str, home: str, settings: Any) -> Handle:
    made = cls.__new__(cls)
    Handle.__init__(made, name, home, settings)
    return made


# --- at home -------------------------------------------------------------------------------------------------

OPEN, _HAS = "raytorchrpc.open", "raytorchrpc.has"


def _open(local: LocalMember, caller: int, kind: str, name: str, settings: Any) -> Any:
    """The settings of the one that is there, or is made now."""
    if settings is None:
        return local.services.find(kind, name, local.me.name).settings
    made = local.services.open(kind, name, partial(_makers[kind], local, name, settings))
    if made.settings != settings:
        raise ConfigurationError(
            f"member {local.me.name!r} has a {kind} {name!r} with other settings: {made.settings}, not {settings}"
        )
    return made.settings


def _has(local: LocalMember, caller: int, kind: str, name: str) -> bool:
    return local.services.has(kind, name)


serve(OPEN, _open)
serve(_HAS, _has)
