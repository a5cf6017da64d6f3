"""Who looks after a group: the process that formed it, or a small detached actor, so that it outlives its driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raytorchrpc.calls.counters import GroupStats
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError
from raytorchrpc.group.chrome_trace import GroupTrace
from raytorchrpc.group.events import Change
from raytorchrpc.group.host import form
from raytorchrpc.group.participants import current_session
from raytorchrpc.group.status import LOOK_S, GroupStatus, posted
from raytorchrpc.group.supervisor import Supervisor
from raytorchrpc.group.tracing import BEGIN_S, COLLECT_S
from raytorchrpc.membership.messages import GroupInfo
from raytorchrpc.membership.process_group import ProcessGroupInfo

logger = logging.getLogger(__name__)

#: Ray's namespace of the actors that look after detached groups; each has the name of its group.
NAMESPACE = "raytorchrpc"
#: For the keeper to answer beyond what was asked of it, its start included (seconds).
_GRACE_S = 30.0


class _HostActor:
    """Runs in the detached actor."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None

    def form(self, name: str, config: GroupConfig, participants: dict[str, Any], timeout_s: float) -> None:
        self._supervisor = form(name, config, participants, timeout_s)

    def info(self) -> GroupInfo:
        return self._kept.info

    def do(self, what: str, *args: Any) -> Any:
        return getattr(self._kept, what)(*args)

    @property
    def _kept(self) -> Supervisor:
        if self._supervisor is None:
            raise BootstrapError("the group is still forming")
        return self._supervisor


class DetachedHost:
    """A Keeper in a detached actor."""

    def __init__(self, name: str, actor: Any) -> None:
        """Raises BootstrapError if the group there is not formed."""
        self._name, self._actor, self._session = name, actor, current_session()
        self._info: GroupInfo = _answer(self._name, actor.info.remote(), 0.0)

    @property
    def info(self) -> GroupInfo:
        if self._actor is not None:
            try:
                self._info = _answer(self._name, self._actor.info.remote(), 0.0)
            except BootstrapError as error:
                logger.debug("group %r: %s", self._name, error)  # the last that was heard of it has to do
        return self._info

    def add(self, actors: Any, timeout_s: float) -> tuple[str, ...]:
        names: tuple[str, ...] = self._do("add", timeout_s, actors, timeout_s)
        return names

    def remove(self, names: Sequence[str], timeout_s: float) -> None:
        self._do("remove", timeout_s, names, timeout_s)

    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        away: dict[str, str] = self._do("wait_ready", timeout_s, timeout_s)
        return away

    def process_group(
        self, backend: str, timeout_s: float, collective_s: float, names: Sequence[str] | None
    ) -> ProcessGroupInfo:
        info: ProcessGroupInfo = self._do("process_group", timeout_s, backend, timeout_s, collective_s, names)
        return info

    def stats(self, timeout_s: float) -> GroupStats:
        rows: GroupStats = self._do("stats", timeout_s, timeout_s)
        return rows

    def look(self, timeout_s: float) -> GroupStatus:
        seen: GroupStatus = self._do("look", timeout_s, timeout_s)
        return seen

    def begin_trace(self, capacity: int) -> None:
        self._do("begin_trace", BEGIN_S, capacity)

    def end_trace(self) -> GroupTrace:
        trace: GroupTrace = self._do("end_trace", COLLECT_S)
        return trace

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        raise ConfigurationError(
            f"group {self._name!r} is looked after by a detached actor, where no callback can be called; ask "
            f"Group.members or wait_ready() from time to time"
        )

    def end(self, timeout_s: float) -> None:
        actor = self._actor
        if actor is not None and current_session() == self._session:
            try:
                _answer(self._name, actor.do.remote("end", timeout_s), timeout_s)
            except (BootstrapError, RayError) as error:
                logger.warning("group %r: not everybody could be told that it is over: %s", self._name, error)
            _end(actor)
        self._actor = None  # last: an end that is interrupted (Ctrl-C) can be begun again

    def _do(self, what: str, patience_s: float, *args: Any) -> Any:
        if self._actor is None:
            raise BootstrapError(f"group {self._name!r} was shut down")
        return _answer(self._name, self._actor.do.remote(what, *args), patience_s)


def form_detached(name: str, config: GroupConfig, participants: Mapping[str, Any], timeout_s: float) -> DetachedHost:
    """Have a new detached actor form the group and look after it. Raises BootstrapError, ConfigurationError."""
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_concurrency": 16}
    keeper: Any = ray.remote(_HostActor)
    try:
        actor = keeper.options(**options).remote()
    except ValueError as error:
        raise BootstrapError(
            f"a detached group {name!r} exists in this cluster: get_group({name!r}) finds it"
        ) from error
    try:
        _answer(name, actor.form.remote(name, config, dict(participants), timeout_s), timeout_s)
        return DetachedHost(name, actor)
    except BaseException:
        _end(actor)
        raise


def find_detached(name: str) -> DetachedHost | None:
    """The keeper of the detached group of that name in this cluster, if there is one."""
    if not ray.is_initialized():
        return None
    try:
        return DetachedHost(name, ray.get_actor(name, namespace=NAMESPACE))
    except (ValueError, BootstrapError):
        return None


def cluster_status(name: str | None = None) -> list[GroupStatus]:
    """A look at every group of the cluster, or at those of that name, which this process can see: detached ones, and
    those that post their looks. One that does not answer is left out. Blocks a few seconds at most.
    """
    named = ray.util.list_named_actors(all_namespaces=True)
    keepers = [each["name"] for each in named if each["namespace"] == NAMESPACE and name in (None, each["name"])]
    found: dict[str, GroupStatus] = {}
    for each in keepers:
        try:
            actor = ray.get_actor(each, namespace=NAMESPACE)
            # It may be forming its group, or ending; nobody is to wait for that.
            one: GroupStatus = ray.get(actor.do.remote("look", LOOK_S), timeout=2 * LOOK_S)
        except (RayError, ValueError, BootstrapError, TimeoutError) as error:
            logger.debug("detached group %r: %s", each, error)
            continue
        found[one.generation] = one
    for one in posted():
        if name in (None, one.group):
            found.setdefault(one.generation, one)
    return sorted(found.values(), key=lambda look: (look.group, look.generation))


def _answer(name: str, reference: Any, patience_s: float) -> Any:
    try:
        return ray.get(reference, timeout=patience_s + _GRACE_S)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except (RayActorError, GetTimeoutError) as error:
        raise BootstrapError(
            f"the actor that looks after group {name!r} does not answer ({error}); its members go on, and init_group "
            f"can take them into another group once that actor is dead"
        ) from error


def _end(actor: Any) -> None:
    try:
        ray.kill(actor)
    except Exception as error:
        logger.debug("a detached keeper could not be ended: %s", error)
