"""How a group watches its members, what it finds out about lost ones, and how it takes restarted ones back."""

from __future__ import annotations

import os
import queue
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, PendingCallsLimitExceeded, RayTaskError

from raytorchrpc._compat import ray_internals
from raytorchrpc._compat.ray_internals import ActorState
from raytorchrpc.calls import protocol
from raytorchrpc.errors import BootstrapError, RayTorchRpcError
from raytorchrpc.group import restarts
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.restarted import Process
from raytorchrpc.group.restarts import RestartedActors
from raytorchrpc.lanes.base import Message, Reply
from raytorchrpc.lanes.common import connections as lane_connections
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.socket.lane import SocketLane
from raytorchrpc.process.this_process import reserve_descriptors
from raytorchrpc.tensors.codec import NOTHING, Codec
from tests.polling import wait_until
from tests.programs import run_program

# --- processes of restarted actors ----------------------------------------------------------------------------------


class Handle:
    """Of an actor whose module does not import raytorchrpc."""

    def __init__(self) -> None:
        self._actor_id = SimpleNamespace(hex=lambda: "abc")
        self.__ray_call__ = SimpleNamespace(options=self._options)
        self.asked: list[Future[Any]] = []
        self.is_full = False

    def _options(self, max_task_retries: int) -> Any:
        assert max_task_retries == 0, "Ray may not run it in the actor's next process"
        return SimpleNamespace(remote=self._remote)

    def _remote(self, function: Any) -> Any:
        if self.is_full:
            raise PendingCallsLimitExceeded
        self.asked.append(Future())
        return SimpleNamespace(future=lambda: self.asked[-1])


class Actor:
    """A restarted actor: its processes, and its group, which polls whether the present one listens."""

    def __init__(self, lanes: list[SocketLane]) -> None:
        self.handle, self.pid, self.now, self._lanes = Handle(), 7, 1000.0, lanes
        credentials = Credentials(b"s" * 32, group="g", generation="1")
        roster: Any = SimpleNamespace(name="g", tls=None, credentials=credentials)
        self.restarts = RestartedActors(roster, lambda request: None)
        self.listening: SocketLane | None = None
        self.is_silent = False
        """As a process that is suspended."""

    @property
    def process(self) -> Process:
        return Process("1", "abc", self.pid, "node")

    def listen(self) -> None:
        lane = SocketLane("restarted", self.restarts._credentials, tcp_host=None, by_tcp=frozenset())
        self._lanes.append(lane)
        alive = Message((protocol.OK,), NOTHING)
        self.process.post(lane.open(lambda _, reply: None if self.is_silent else lambda: reply(alive), lambda _: None))

    def poll(self) -> bool:
        return self.restarts.is_listening(self.handle, ActorState("ALIVE", self.pid, "node", ""))

    def polls(self, seconds: float = 1.0) -> bool:
        """Whether it is found to listen in that time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.poll():
                return True
            time.sleep(0.01)
        return False


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Ray's key-value store."""
    made: dict[str, bytes] = {}

    def store(key: str, value: bytes | None) -> None:
        made.update({} if value is None else {key: value})
        if value is None:
            made.pop(key, None)

    monkeypatch.setattr(ray_internals, "store", store)
    monkeypatch.setattr(ray_internals, "stored", made.get)
    return made


@pytest.fixture
def actor(values: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    lanes: list[SocketLane] = []
    made = Actor(lanes)
    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: made.now))
    yield made
    made.restarts.end(session_lasts=True)
    for lane in lanes:
        lane.close()


def test_a_process_is_asked_again_if_ray_has_lost_the_request(actor: Actor) -> None:
    handle = actor.handle
    handle.is_full = True
    actor.poll()
    handle.is_full = False
    for lost in range(3):
        assert not actor.poll()
        assert not actor.poll()
        assert len(handle.asked) == lost + 1, "it is asked once as long as Ray has not lost that"
        handle.asked[-1].set_exception(ActorUnavailableError("the actor is restarting", b"0" * 16))


@pytest.mark.parametrize("error", [None, RayTaskError("begin", "no such module", ImportError("raytorchrpc"))])
def test_a_process_that_was_asked_and_does_not_listen_is_asked_again_later(
    actor: Actor, error: Exception | None
) -> None:
    actor.poll()
    if error is None:
        actor.handle.asked[0].set_result(None)
    else:
        actor.handle.asked[0].set_exception(error)
    actor.poll()
    assert len(actor.handle.asked) == 1
    actor.now += 10
    actor.poll()
    actor.poll()
    assert len(actor.handle.asked) == 2


def test_a_process_listens_once_it_answers_before_each_attempt(actor: Actor, values: dict[str, bytes]) -> None:
    actor.listen()
    for _ in range(2):
        assert not actor.poll(), "it may be suspended by now"
        assert actor.polls(PATIENCE_S)
    assert not actor.handle.asked
    before = set(values)
    actor.pid = 8
    assert not actor.polls(), "it is another process"
    actor.listen()
    assert actor.polls(PATIENCE_S)
    assert not before & set(values), "what the earlier process posted is removed"


def test_a_process_that_does_not_answer_is_tried_again(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_ANSWER_S", 0.5)
    actor.is_silent = True
    actor.listen()
    assert not actor.polls()
    actor.is_silent = False
    assert actor.polls(PATIENCE_S)


def test_one_that_is_silent_holds_up_the_others_for_a_moment() -> None:
    roster: Any = SimpleNamespace(name="g", tls=None, credentials=Credentials(b"s" * 32, group="g", generation="1"))
    actors = RestartedActors(roster, lambda request: None)
    lanes = {name: SocketLane(name, actors._credentials, tcp_host=None, by_tcp=frozenset()) for name in "abc"}
    answer = Message((protocol.OK,), Codec(cloudpickle.CloudPickler).encode("here"))
    asked = threading.Barrier(2)

    def answer_together(reply: Reply) -> None:
        """A moment is for the next answer, not for the connection."""
        asked.wait(PATIENCE_S)
        reply(answer)

    for name, lane in lanes.items():
        silent = name == "b"
        serve = lambda _, reply, silent=silent: None if silent else partial(answer_together, reply)  # noqa: E731
        actors.find(name, lane.open(serve, lambda _: None))
    handles = {name: SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda name=name: name)) for name in lanes}
    began = time.monotonic()
    results, failures = actors.call_all(handles, print, dict.fromkeys(lanes, ()), began + 30)
    assert results == {"a": "here", "c": "here"} and time.monotonic() - began < 25
    assert isinstance(failures["b"], BootstrapError) and "no answer in time" in str(failures["b"])
    actors.end(session_lasts=False)
    for lane in lanes.values():
        lane.close()


# --- watching many --------------------------------------------------------------------------------------------------

MEMBERS = 300
PATIENCE_S = 20.0


class Watched:
    """A supervisor's connections to members, which all listen at one place."""

    def __init__(self, members: int) -> None:
        self.watches: list[Reply] = []
        self.listener = SocketLane("members", Credentials(b"s" * 32), tcp_host=None, by_tcp=frozenset())
        address = self.listener.open(self._serve, lambda work: work())
        self.names = [f"m{number}" for number in range(members)]
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.connections = ControlConnections(Credentials(b"s" * 32))
        for name in self.names:
            self.connections.set_address(name, "token", address, by_tcp=False)

    def _serve(self, message: Message, reply: Reply) -> None:
        if message.header[0] == protocol.WATCH:
            self.watches.append(reply)
        else:
            reply(Message((protocol.OK,), NOTHING))

    def watch(self) -> list[str]:
        """Watch all; returns those that could not be reached."""
        failed = list[str]()

        def watch(name: str) -> None:
            try:
                self.connections.watch(name, PATIENCE_S)(lambda cause: self.ended.put(name))
            except RayTorchRpcError:
                failed.append(name)

        for thread in self.connections.dial(partial(watch, name) for name in self.names):
            thread.join(PATIENCE_S)
        return failed

    def close(self) -> None:
        self.connections.close()
        self.listener.close()


@contextmanager
def watched(members: int = MEMBERS) -> Iterator[Watched]:
    made = Watched(members)
    try:
        yield made
    finally:
        made.close()


def test_watching_many_members_takes_no_time_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where connections are swept all the time; each loss is still reported at once."""
    monkeypatch.setattr(lane_connections, "SWEEP_S", 0.25)
    with watched() as group:
        assert group.watch() == []
        assert wait_until(lambda: len(group.watches) == MEMBERS, PATIENCE_S)
        shares = []
        for _ in range(4):
            began, spent = time.monotonic(), time.process_time()
            with pytest.raises(queue.Empty):
                group.ended.get(timeout=0.3)
            shares.append((time.process_time() - spent) / (time.monotonic() - began))
        assert min(shares) < 0.05, "other threads of the process may have worked meanwhile"
        group.listener.close()
        assert {group.ended.get(timeout=PATIENCE_S) for _ in group.names} == {*group.names}


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """How many this process has open; it may open 100 more, unless it raises its limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, limits[1]))
    yield used
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_group_gets_the_descriptors_that_it_needs(few_descriptors: int) -> None:
    """Those that cannot be watched would count as lost."""
    with watched() as group:
        reserve_descriptors(2 * MEMBERS, "both ends")
        assert group.watch() == []


def test_a_group_that_is_too_large_for_the_limit_on_open_files_is_refused() -> None:
    """In a process of its own, which cannot raise its limit again."""
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from raytorchrpc.process.this_process import reserve_descriptors
reserve_descriptors(20, "watching 20 members")
reserve_descriptors(1000, "watching 1000 members")
"""
    ended = run_program("-c", program)
    assert ended.returncode == 1
    assert "ConfigurationError: watching 1000 members takes 1000 file descriptors" in ended.stderr
    assert "may have 200: raise its limit on open files (ulimit -n" in ended.stderr
