"""Runs a group's supervisor in a detached actor, so that the group outlives its driver."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from raytorchrpc._compat import ray_internals
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, NotAMember, RayTorchRpcError
from raytorchrpc.group import ray_calls
from raytorchrpc.group.changes import Change, ChangeFeed
from raytorchrpc.group.messages import GroupInfo, JoinRequest
from raytorchrpc.group.restarted import post_record
from raytorchrpc.group.supervisor import Supervisor, form
from raytorchrpc.group.tracing import BEGIN_S, COLLECT_S
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: Ray's namespace of the host actors of detached groups; each has the name of its group.
NAMESPACE = "raytorchrpc"
#: For the host actor to answer beyond the time a request takes, its start included (seconds).
_GRACE_S = 30.0
#: The same where a client waits, whose operation ends in its own time (seconds).
_CLIENT_GRACE_S = 0.5
#: For members to leave a group whose forming was interrupted, and for Ray to end a host that is killed (seconds).
_GIVE_UP_S = 5.0
#: How often the end of a host is looked for (seconds).
_NAME_S = 0.01
#: The supervisor's methods that ``Group`` calls, and how long one without ``timeout_s`` may take (seconds).
_FORWARDED = {
    **dict.fromkeys(("add", "remove", "wait_ready", "process_group", "stats"), 0.0),
    "begin_trace": BEGIN_S,
    "end_trace": COLLECT_S,
}
#: Requests for changes wait in a concurrency group of their own, with a thread for each process that listens. If more
#: listen than there are threads, their changes arrive later.
_CHANGES, _CHANGE_THREADS = "changes", 32
#: How often a thread that waits for changes checks whether they are still wanted (seconds).
_CHECK_S = 1.0


class _HostActor:
    """Runs in the detached actor."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._is_asked = threading.Event()
        """To form the group."""
        self._end_unless_asked(_GRACE_S)

    def _end_unless_asked(self, after_s: float) -> None:
        """End this actor if it is not asked to form a group until then: the driver that would end it may be dead, and
        the name has to be free again.
        """

        def end() -> None:
            if not self._is_asked.wait(after_s):
                ray.kill(ray.get_runtime_context().current_actor)

        threads.start(end, name="raytorchrpc-host-ends")

    def form(
        self, name: str, config: GroupConfig, participants: dict[str, Any], timeout_s: float, generation: str
    ) -> None:
        self._is_asked.set()
        try:
            form(name, config, participants, timeout_s, generation, self._host)
        except BaseException:
            self._is_asked.clear()
            self._end_unless_asked(_GIVE_UP_S)
            raise

    def _host(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @ray.method(concurrency_group=_CHANGES)
    def changes(self, after: int | None, wait_s: float) -> tuple[int, list[Change]]:
        return self._hosted.changes.after(after, wait_s)

    def info(self) -> GroupInfo:
        return self._hosted.info

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._hosted, method)(*args, **kwargs)

    @property
    def _hosted(self) -> Supervisor:
        if self._supervisor is None:
            raise BootstrapError("it is still forming; try again")
        return self._supervisor


class DetachedHost:
    """Has those of the supervisor's methods that ``Group`` calls, and forwards them to the detached actor."""

    def __init__(self, name: str, actor: Any) -> None:
        """Raises BootstrapError if the group is still forming."""
        self._name, self._actor, self._session_lasts = name, actor, ray_internals.session_check()
        self._info: GroupInfo = _answer(self._name, actor.info.remote(), 0.0)
        self._feed = ChangeFeed(name, self._fetch_changes, lambda _: self._session_lasts())

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in _FORWARDED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {method!r}")
        return partial(self._do, method)

    def _do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._check_running()
        patience_s = kwargs.get("timeout_s", _FORWARDED[method])
        return _answer(self._name, self._actor.do.remote(method, *args, **kwargs), patience_s)

    def admit_client(self, request: JoinRequest) -> None:
        self._check_running()
        _answer(self._name, self._actor.do.remote("admit_client", request), request.timeout_s, _CLIENT_GRACE_S)

    def _check_running(self) -> None:
        if self._actor is None:
            raise BootstrapError(f"group {self._name!r} was shut down")

    @property
    def info(self) -> GroupInfo:
        """The group as it is now, or was when the actor last answered."""
        if self._actor is not None:
            try:
                self._info = _answer(self._name, self._actor.info.remote(), 0.0)
            except BootstrapError as error:
                logger.debug("group %r: %s", self._name, error)  # use the last known one
        return self._info

    @property
    def last_info(self) -> GroupInfo:
        """The group as it was when the actor last answered. Does not block."""
        return self._info

    def has_ended(self) -> bool:
        """Whether the actor is dead: no actor, or another one, hosts a group of this name."""
        actor = self._actor
        return actor is None or _has_ended(self._name, actor)

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``listener`` with every change, on a thread; returns a function that ends it. Raises BootstrapError."""
        self._check_running()
        return self._feed.listen(listener)

    def _fetch_changes(self, after: int | None, wait_s: float) -> tuple[int, list[Change]] | None:
        if after is None:
            return _answer(self._name, self._actor.changes.remote(None, 0.0), 0.0)  # type: ignore[no-any-return]
        until = time.monotonic() + wait_s + _GRACE_S
        try:
            self._check_running()
            asked: Future[tuple[int, list[Change]]] = self._actor.changes.remote(after, wait_s).future()
            while self._feed.is_wanted():
                if wait([asked], _CHECK_S).done:
                    return asked.result()
                if time.monotonic() > until:
                    logger.warning("the host of group %r has not answered in time, and is asked again", self._name)
                    break
        except Exception as error:
            if self._feed.is_wanted():
                why = _silent(self._name, error) if isinstance(error, RayActorError) else error
                logger.log(_level(error), "group %r: no more changes are reported: %s", self._name, why)
            return None
        return after, []

    def end(self, timeout_s: float) -> None:
        actor = self._actor
        self._feed.stop()
        if actor is not None and self._session_lasts():
            try:
                _answer(self._name, actor.do.remote("end", timeout_s), timeout_s)
            except (BootstrapError, RayError) as error:
                text = "group %r: its end could not be announced to all members: %s"
                logger.log(_level(error.__cause__), text, self._name, error)
            _end(self._name, actor)
        self._actor = None  # last: an end that is interrupted (Ctrl-C) can be begun again


def form_detached(
    name: str,
    config: GroupConfig,
    participants: Mapping[str, Any],
    timeout_s: float,
    generation: str,
    register: Callable[[DetachedHost], object],
) -> DetachedHost:
    """Start a detached actor that forms the group and supervises it. Leaves nothing behind if it fails.

    ``register``: see ``supervisor.form``. Raises BootstrapError, ConfigurationError.
    """
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_concurrency": 16}
    remote: Any = ray.remote(concurrency_groups={_CHANGES: _CHANGE_THREADS})  # type: ignore[call-overload]
    actor, forming, made = remote(_HostActor), None, None
    try:
        try:
            made = actor.options(**options).remote()
        except ValueError as error:
            raise BootstrapError(
                f"a detached group {name!r} exists in this cluster: get_group({name!r}) finds it"
            ) from error
        forming = made.form.remote(name, config, dict(participants), timeout_s, generation)
        _answer(name, forming, ray_calls.LONGEST * timeout_s)
        host = DetachedHost(name, made)
        register(host)
        return host
    except BaseException as error:
        if made is not None:
            _end(name, made)
        if forming is not None and not isinstance(error, RayTorchRpcError):  # else it has undone everything itself
            post_record(generation, None)
            until = time.monotonic() + _GIVE_UP_S
            ray_calls.have_leave(name, generation, participants, until, for_good=True)
        raise


def find_detached(name: str) -> DetachedHost | None:
    """The host of the detached group of that name in this cluster, or None.

    Raises NotAMember, with the reason, if there is one that cannot be used: it is still forming, or does not answer.
    """
    if not ray.is_initialized() or not isinstance(name, str):
        return None
    try:
        return DetachedHost(name, ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        return None
    except BootstrapError as error:
        if isinstance(error.__cause__, ActorDiedError):  # it has just ended
            return None
        raise NotAMember(f"the detached group {name!r} cannot be used now: {error}") from error


def detached_names() -> list[str]:
    if not ray.is_initialized():
        return []
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def _answer(name: str, reference: Any, patience_s: float, grace_s: float = _GRACE_S) -> Any:
    try:
        return ray.get(reference, timeout=patience_s + grace_s)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except (RayActorError, GetTimeoutError) as error:
        raise _silent(name, error) from error


def _level(error: BaseException | None) -> int:
    """How to log that the host has ended: another process may have shut the group down, as it should."""
    return logging.INFO if ray_internals.was_killed(error) else logging.WARNING


def _silent(name: str, error: Exception) -> BootstrapError:
    if isinstance(error, ActorDiedError):
        return BootstrapError(
            f"group {name!r} has ended: it was shut down, or the actor that hosts it has died; init_group can form "
            f"another group of its members"
        )
    return BootstrapError(
        f"the host actor of group {name!r} does not answer ({error}); its members keep running, and init_group can "
        f"form another group of them once that actor is dead"
    )


def _end(name: str, actor: Any) -> None:
    """Kill a host. Returns when no process finds it any more, and another detached group can have its name."""
    try:
        ray.kill(actor)  # takes effect later
        until = time.monotonic() + _GIVE_UP_S
        while not _has_ended(name, actor) and time.monotonic() < until:
            threads.pause(_NAME_S)
    except Exception as error:
        logger.debug("a host actor could not be killed: %s", error)


def _has_ended(name: str, actor: Any) -> bool:
    try:
        host = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return True
    return ray_internals.actor_id_of(host) != ray_internals.actor_id_of(actor)
