"""Handles of queues, topics and weight stores: picklable references to an object that lives in one member, its home."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Generator
from typing import Any, ClassVar, TypeVar

from raytorchrpc.calls import rejoin
from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.clients import own_groups
from raytorchrpc.calls.member import (
    LocalMember,
    awaiting,
    current,
    membership,
    memberships,
    process_member,
    reaching,
    resolved,
)
from raytorchrpc.calls.options import MAX_TIMEOUT_S, CallOptions, check_longest_wait, checked_timeout
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.scope import current_scope, on_loop, refuse_on_loop, wait_serving
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, NotAMember, NotFound, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.home import DELETE, FIND, OPEN, find
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.kept_errors import again

T = TypeVar("T")
H = TypeVar("H", bound="Handle")

#: The home answers after the operation's timeout at the latest; the caller waits this much longer for it (seconds).
ANSWER_S = 0.5
#: In a method that another member called, an operation ends before that call, by this part of the time that the call
#: has left, at most ``ANSWER_S``. So its error reaches the caller.
_KEPT_PART = 0.1
#: How long an operation with timeout 0 waits for the home's answer (seconds).
_ANSWER_NOW_S = 1.0

#: What to use on an event loop.
_REMEDY = (
    "a coroutine (`aget`, `aput`, `apublish`, `apull`, `await_version`, `async for`), or `await asyncio.to_thread(...)`"
)

#: An operation as a generator: it yields what it has to wait for, and is sent the result.
Steps = Generator["Future[Any] | DeferredReply", Any, T]
#: Identify requests of this process.
request_ids = itertools.count(1)


# --- running operations --------------------------------------------------------------------------------------


class _Blocking(threading.local):
    """Whether this thread runs an operation that would block its event loop."""

    a_loop = False


_blocking = _Blocking()


def run(steps: Steps[T]) -> T:
    """Run an operation on this thread; on an event loop it raises RayTorchRpcError if it has to wait."""
    if not on_loop():
        return _run(steps)
    before, _blocking.a_loop = _blocking.a_loop, True
    try:
        return _run(steps)
    finally:
        _blocking.a_loop = before


def _run(steps: Steps[T]) -> T:
    try:
        pending = next(steps)
        while True:
            try:
                value = _wait(pending)
            except BaseException as error:
                pending = steps.throw(error)
            else:
                pending = steps.send(value)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _wait(pending: Future[Any] | DeferredReply) -> Any:
    if isinstance(pending, Future):
        return pending.wait()
    if _blocking.a_loop and not pending.done():
        try:
            refuse_on_loop("an operation that has to wait", _REMEDY)
        except RayTorchRpcError:
            pending.cancel()
            raise
    wait_serving(pending, MAX_TIMEOUT_S)  # its deadline settles it
    return pending.outcome()


async def arun(steps: Steps[T]) -> T:
    """Run an operation from a coroutine."""
    try:
        pending = next(steps)
        while True:
            try:
                if isinstance(pending, Future):
                    value = await pending
                else:
                    await asyncio.wrap_future(pending)
                    value = pending.outcome()
            except BaseException as error:
                del pending  # it may hold the exception, and thereby this frame
                pending = steps.throw(error)
            else:
                pending = steps.send(value)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def begin(
    timeout: float | None = None, home: str | None = None, group: str | None = None
) -> Steps[tuple[LocalMember, float]]:
    """Begin an operation: this process as a member or a client, and how many seconds it may wait at the home.

    A restarted actor waits here until it is a member of its group again, and a client until it has joined. ``group``:
    the name or the generation of the group that the home belongs to, if it is known.
    """
    if (local := _local(home, group)) is not None:
        return local, _wait_limit(local, timeout)
    since, asked = time.monotonic(), None if timeout is None else _answer_timeout(checked_timeout(timeout))
    if home is not None and (local := own_groups.joined(home, asked, group)) is not None:
        return local, _wait_limit(local, timeout)
    joining = None if home is None else own_groups.join(home, asked, group)
    try:
        awaited = joining or rejoin.awaited(asked)
    except NotAMember as error:
        if home is None:
            raise
        hint = "queues and the like of a detached group are for any process of the cluster after get_group(name)"
        raise NotAMember(f"{error}; {hint}") from None
    local = yield awaited
    local = resolved(local, home, group) if home is not None else process_member(group=group)
    return local, max(0.0, _wait_limit(local, timeout) - (time.monotonic() - since))


def _local(home: Any, group: str | None) -> LocalMember | None:
    """This process as a member of the group with that home (None: any); None if it is not known to be in one."""
    if (local := current.local) is not None and group in (None, local.generation, local.group):
        return local
    if home is None:
        return membership(group)
    local = reaching(home, group)
    if local is None and current.members and not rejoin.pending() and not own_groups.may_have(home, group):
        return awaiting(home, None, group)
    return local


def _used(generation: str | None, home: Any) -> str | None:
    """That generation, if this process is in that group, or may join it as a client; else None."""
    if generation is None or generation in current.members or own_groups.may_have(home, generation):
        return generation
    return None


def member_name(target: Any, argument: str, group: str | None = None) -> str:
    """The name of a member in this process's groups, or in those that it formed; without any, a name is taken as it is.

    Raises NotAMember, and ConfigurationError naming ``argument``.
    """
    if (local := _local(target, group)) is not None:
        return local.peers.route(target).member.name
    if isinstance(target, Member):
        return target.name
    if isinstance(target, str) and not target.isdecimal():
        return target
    if (name := own_groups.name_of(target, group)) is not None:
        return name
    if (joining := own_groups.join(target, None, group)) is None:
        raise ConfigurationError(f"this process is in no group, so {argument}= takes members' names, not {target!r}")
    refuse_on_loop("joining a group", f"the name of a member for {argument}=")
    client: LocalMember = joining.result()
    return client.peers.member(target).name


def _wait_limit(local: LocalMember, timeout: float | None) -> float:
    """Check ``timeout``, and shorten it if the call that this thread serves ends before."""
    seconds = local.config.rpc_timeout_s if timeout is None else checked_timeout(timeout)
    if seconds < 0:
        raise ConfigurationError(f"timeout is a number of seconds from 0 on, not {timeout!r}")
    deadline = current_scope.get().deadline
    if deadline is not None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise RpcTimeout("no time left: the deadline of the call that this method serves has passed")
        seconds = min(seconds, remaining_s - min(ANSWER_S, remaining_s * _KEPT_PART))
    return seconds


def _answer_timeout(seconds: float) -> float:
    """How long to wait for the response to an operation that may take ``seconds`` at the home."""
    return min(MAX_TIMEOUT_S, seconds + ANSWER_S if seconds > 0 else _ANSWER_NOW_S)


# --- handles -------------------------------------------------------------------------------------------------


def checked_count(name: str, value: Any) -> int:
    """Return an argument that must be a whole number of at least 1. Raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}= must be a whole number of at least 1, not {value!r}")
    return value


class Handle:
    """Refers to an object that lives in a member, its home. Picklable.

    When a handle is first used it binds to one instance of the object: to the existing one, or to one that is created
    then. Every request names that instance. Once the instance has ended, each operation raises NotFound, even if a new
    object of the same name exists.
    """

    kind: ClassVar[str]
    _group: str | None
    """The group's name, if it was given."""
    _generation: str | None
    """Of the group, if it is known: this process may use several with a member of that name."""

    def __init__(
        self, name: str, home: Any, settings: Any, group: str | None = None, generation: str | None = None
    ) -> None:
        """Create the object if this process is its home, else when the handle is first used.

        ``generation``: of the group that has the home, if that is known.
        """
        given: Any = name
        if not isinstance(given, str) or not given:
            raise ConfigurationError(f"a {self.kind} needs a name, not {name!r}")
        where = _used(generation, home) or group
        local = _local(home, where)
        if local is None and home is None:
            with contextlib.suppress(NotAMember):
                local = process_member(group=group)
        if local is None and home is None:
            raise ConfigurationError(
                f"{self.kind} {name!r} needs a home: this process is in no group, so pass home='a member's name'"
            )
        home = local.me.name if local is not None and home is None else member_name(home, "home", where)
        self._set_state(name, home, settings, None)
        self._group, self._generation = group, generation if local is None else local.generation
        if local is not None and local.me.name == home:
            run(self._bind(local))

    def _set_state(self, name: str, home: str, settings: Any, instance_id: int | None) -> None:
        """Set the attributes, in each process anew. ``instance_id`` None: bind when first used."""
        self._name, self._home, self._settings, self._instance_id = name, home, settings, instance_id
        self._group = self._generation = None
        self._bind_lock = Lock()

    @classmethod
    def find(cls: type[H], name: str, *, timeout: float | None = None, group: str | None = None) -> H:
        """Return a handle of the object of this name, whichever member is its home.

        Asks every member of the group, or without ``group`` of all groups that this process uses, and blocks until they
        have answered, at most ``timeout`` seconds. Raises NotFound if no member has the object.
        """
        check_longest_wait(timeout)
        refuse_on_loop(f"{cls.__name__}.find", f"`await asyncio.to_thread(raytorchrpc.{cls.__name__}.find, {name!r})`")
        since, searched = time.monotonic(), memberships(group)
        unjoined: list[Exception] = []
        if not searched:
            searched, unjoined = own_groups.everywhere(timeout, group)
            searched = searched or [process_member(timeout, group)]
        silent: list[str] = []
        for local in searched:
            remaining_s = None if timeout is None else max(0.0, timeout - (time.monotonic() - since))
            if (handle := cls._find_in(local, name, remaining_s, silent)) is not None:
                return handle
        if unjoined:  # one of those groups may have it
            raise again(unjoined[0])
        groups = " or ".join(repr(local.group) for local in searched)
        unheard = f"; {', '.join(silent)} did not answer" if silent else ""
        raise NotFound(f"no member of group {groups} has a {cls.kind} {name!r}{unheard}")

    @classmethod
    def _find_in(cls: type[H], local: LocalMember, name: str, timeout: float | None, silent: list[str]) -> H | None:
        """Find the object in one group. Adds members that did not answer to ``silent``."""
        if (entry := find(local, local.me.rank, cls.kind, name)) is not None:
            return cls._restore(name, local.me.name, *entry, local.generation)
        asked: list[tuple[str, Future[tuple[Any, int] | None]]] = []
        for member in local.peers.members:
            if member.rank != local.me.rank:
                with contextlib.suppress(PeerLost):  # a member that is away has no objects
                    call = local.outgoing.call(member, FIND, (cls.kind, name), {}, CallOptions(timeout, retry=0))
                    asked.append((member.name, Future(call)))
        for name_there, future in asked:
            try:
                if (entry := future.wait()) is not None:
                    return cls._restore(name, name_there, *entry, local.generation)
            except (PeerLost, RpcTimeout):
                silent.append(name_there)
        return None

    @classmethod
    def _restore(
        cls: type[H],
        name: str,
        home: str,
        settings: Any,
        instance_id: int | None,
        generation: str | None = None,
        group: str | None = None,
    ) -> H:
        handle = cls.__new__(cls)
        if instance_id is None:
            Handle.__init__(handle, name, home, settings, group, generation)
        else:
            handle._set_state(name, home, settings, instance_id)
            handle._group, handle._generation = group, generation
        return handle

    @property
    def name(self) -> str:
        """The object's name."""
        return self._name

    @property
    def home(self) -> str:
        """The name of the member where the object lives."""
        return self._home

    @property
    def instance(self) -> int | None:
        """Identifies the object among all that had its name; None until the handle is first used."""
        return self._instance_id

    def delete(self) -> None:
        """End the object and free its memory, with all that it holds. Blocks for an answer of the home.

        What waits for it, and handles that were used, raise NotFound. The name is free: a handle that was not used yet
        makes a new object.
        """
        run(self._delete())

    def _delete(self) -> Steps[None]:
        local, _ = yield from self._begin()
        yield from self._bind(local)
        yield from self._request(local, DELETE, self._address)

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._name, self._home, self._settings, self._instance_id, self._generation, self._group
        return type(self)._restore, state

    def __repr__(self) -> str:
        return f"<raytorchrpc.{type(self).__name__} {self._name!r} in {self._home!r}>"

    # --- for subclasses ------------------------------------------------------------------------------------------

    def _begin(self, timeout: float | None = None) -> Steps[tuple[LocalMember, float]]:
        return begin(timeout, self._home, _used(self._generation, self._home) or self._group)

    def _membership(self) -> LocalMember:
        """This process as a member of the group. Raises NotAMember."""
        return process_member(group=_used(self._generation, self._home) or self._group)

    @property
    def _lives_with(self) -> tuple[str, ...]:
        """The names of the members with which the object ends."""
        return (self._home,)

    @property
    def _label(self) -> str:
        """What error messages call it."""
        return f"{self.kind} {self._name!r}"

    @property
    def _address(self) -> tuple[str, str, int | None]:
        """The first arguments of requests to the object; complete after ``_bind``."""
        return self.kind, self._name, self._instance_id

    def _object(self, local: LocalMember) -> Any:
        """At the home, return the object itself. Raises NotFound."""
        return local.services.find(*self._address, local.me.name)

    def _is_home(self, local: LocalMember) -> bool:
        return local.peers.route(self._home).member.rank == local.me.rank

    def _bind(self, local: LocalMember, wait_s: float | None = None) -> Steps[bool]:
        """Bind to the object, which is created if there is none; whether this is its home. Operations begin with it."""
        if self._instance_id is None:
            args = (self.kind, self._name, self._settings)
            instance_id = yield from self._request(local, OPEN, args, wait_s)
            with self._bind_lock:
                if self._instance_id is None:  # another thread may have bound it meanwhile
                    self._instance_id, self._generation = instance_id, local.generation
        return self._is_home(local)

    def _request(
        self, local: LocalMember, service: str, args: tuple[Any, ...], wait_s: float | None = None
    ) -> Steps[Any]:
        """Run a service at the home, where it may wait for ``wait_s`` (None: as a call). The home sends no message."""
        if self._is_home(local):
            answer = local.incoming.services[service].function(local, local.me.rank, *args)
            return (yield answer) if isinstance(answer, DeferredReply) else answer
        return (yield from self._response(self._send(local, service, args, wait_s)))

    def _response(self, sent: Future[Any]) -> Steps[Any]:
        """Wait for the response to a request."""
        try:
            return (yield sent)
        except PeerLost as lost:
            raise self._home_lost(lost) from None
        except RpcTimeout as late:
            raise RpcTimeout(f"{late} (it is the home of {self._label})") from None

    def _send(
        self, local: LocalMember, service: str, args: tuple[Any, ...], wait_s: float | None, **options: Any
    ) -> Future[Any]:
        """Send a request to the home, which is another member."""
        if _blocking.a_loop:
            refuse_on_loop(f"{self._label}: waiting for its home {self._home!r}", _REMEDY)
        timeout = None if wait_s is None else _answer_timeout(wait_s)
        try:
            return Future(local.outgoing.call(self._home, service, args, {}, CallOptions(timeout, retry=0, **options)))
        except PeerLost as lost:
            raise self._home_lost(lost) from None

    def _home_lost(self, lost: PeerLost) -> PeerLost:
        home = f"it is the home of {self._label}, whose contents are gone if its process ended"
        return PeerLost(lost.peer, f"{lost.cause} ({home})", lost.may_have_run)
