"""What a group finds out about lost members, and how it takes restarted ones back."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, PendingCallsLimitExceeded, RayTaskError

from raytorchrpc._compat import ray_internals
from raytorchrpc._compat.ray_internals import ActorState
from raytorchrpc.calls.rejoin import REQUESTS, Mailbox, Process, packed
from raytorchrpc.errors import BootstrapError
from raytorchrpc.group import failure_detector, ray_calls
from raytorchrpc.group.failure_detector import FailureDetector, Findings
from raytorchrpc.group.ray_calls import RestartedActors
from raytorchrpc.group.roster import GroupState, Phase
from raytorchrpc.group.supervisor import Supervisor

# --- what Ray says of them ------------------------------------------------------------------------------------------


class Ray:
    """What Ray says of the actor of member ``a``, whose lost process has pid 1."""

    def __init__(self) -> None:
        self.state, self.pid, self.listens = "ALIVE", 1, False
        record = SimpleNamespace(handle="a", probe=SimpleNamespace(pid=1, node_id="node"))
        roster: Any = SimpleNamespace(records={"a": record})
        self.group = GroupState(roster, None, {})  # type: ignore[arg-type]
        self.group.lose("a", "connection broke")
        restarts: Any = SimpleNamespace(is_listening=lambda *_: self.listens)
        nothing: Any = None
        self._detector = FailureDetector(self.group, nothing, restarts, nothing, nothing)
        self._detector._dial = lambda *_: None  # type: ignore[method-assign]

    def poll(self, state: str, pid: int = 1, listens: bool = False) -> Findings:
        self.state, self.pid, self.listens = state, pid, listens
        self.group.lost["a"].next_poll = time.monotonic()
        return self._detector.poll()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    states = SimpleNamespace(
        actor_state=lambda _: SimpleNamespace(state=made.state, pid=made.pid, node_id="node", cause=""),
        actor_id_of=lambda handle: handle,
    )
    monkeypatch.setattr(failure_detector, "ray_internals", states)
    return made


@pytest.mark.parametrize("before", [Phase.SUSPECTED, Phase.AWAY])
@pytest.mark.parametrize("there", [("RESTARTING", 1, False), ("ALIVE", 2, False), ("ALIVE", 2, True)])
def test_the_end_of_a_process_is_reported_before_the_next_is_admitted(
    ray: Ray, before: Phase, there: tuple[str, int, bool]
) -> None:
    lost = ray.group.lost["a"]
    lost.phase = before
    assert ray.poll("ALIVE") == Findings([], [], []) and lost.phase is before, "it may come back as it was"
    assert ray.poll(*there) == Findings(ended=["a"], dead=[], restarted=[])
    lost.phase = Phase.ENDED  # announced
    assert ray.poll("RESTARTING") == Findings([], [], [])
    assert ray.poll("ALIVE", 2, listens=True) == Findings([], [], restarted=["a"])
    assert ray.poll("ALIVE", 3) == Findings([], [], []) and lost.phase is Phase.ENDED
    assert ray.poll("DEAD") == Findings([], dead=["a"], restarted=[])


# --- readmission ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failed", "still_there"), [(("a",), ["b"]), ((), []), (("a", "driver"), ["b"])])
def test_members_that_could_return_do_not_wait_for_those_that_could_not(
    failed: tuple[str, ...], still_there: list[str]
) -> None:
    records = {name: SimpleNamespace(handle=name) for name in "ab"}
    roster: Any = SimpleNamespace(name="g", records=records)
    state = GroupState(roster, None, {})  # type: ignore[arg-type]
    for name in "ab":
        state.lose(name, "its process ended")
        state.lost[name].phase = Phase.RESTARTED

    def admit(*_: Any) -> None:
        raise BootstrapError("no answer", members=failed)

    restarts = SimpleNamespace(call_all=None)
    supervisor: Any = SimpleNamespace(_state=state, roster=roster, _restarts=restarts, _admit=admit)
    Supervisor._readmit(supervisor, ["a", "b"])
    assert [name for name, lost in state.lost.items() if lost.phase is Phase.RESTARTED] == still_there


# --- mailboxes ------------------------------------------------------------------------------------------------------


THERE = ActorState("ALIVE", 7, "node", "")


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


class Store:
    """Ray's key-value store. ``answer`` is what the actor's process does when it polls its mailbox."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.now = 1000.0

    def store(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value

    def announce(self, pid: int) -> None:
        Mailbox(Process("abc", pid, "node")).announce()

    def answer(self, pid: int) -> None:
        mailbox = Mailbox(Process("abc", pid, "node"))
        request = mailbox.take()
        assert request is not None
        mailbox.answer(request, None)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(ray_internals, "store", made.store)
    monkeypatch.setattr(ray_internals, "stored", made.values.get)
    monkeypatch.setattr(ray_calls, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def restarts(store: Store) -> RestartedActors:
    return RestartedActors("generation")


def test_a_process_is_asked_again_if_ray_has_lost_the_request(restarts: RestartedActors) -> None:
    handle = Handle()
    handle.is_full = True
    restarts.is_listening(handle, THERE)
    handle.is_full = False
    for lost in range(3):
        assert not restarts.is_listening(handle, THERE)
        assert not restarts.is_listening(handle, THERE)
        assert len(handle.asked) == lost + 1, "it is asked once as long as Ray has not lost that"
        handle.asked[-1].set_exception(ActorUnavailableError("the actor is restarting", b"0" * 16))


@pytest.mark.parametrize("error", [None, RayTaskError("begin", "no such module", ImportError("raytorchrpc"))])
def test_a_process_that_was_asked_and_does_not_poll_is_asked_again_later(
    restarts: RestartedActors, store: Store, error: Exception | None
) -> None:
    handle = Handle()
    restarts.is_listening(handle, THERE)
    if error is None:
        handle.asked[0].set_result(None)
    else:
        handle.asked[0].set_exception(error)
    restarts.is_listening(handle, THERE)
    assert len(handle.asked) == 1
    store.now += 10
    restarts.is_listening(handle, THERE)
    restarts.is_listening(handle, THERE)
    assert len(handle.asked) == 2


def test_a_process_listens_once_it_answers_before_each_attempt(restarts: RestartedActors, store: Store) -> None:
    handle = Handle()
    store.announce(7)
    for _ in range(2):
        assert not restarts.is_listening(handle, THERE), "it may be suspended by now"
        assert not restarts.is_listening(handle, THERE)
        store.answer(7)
        assert restarts.is_listening(handle, THERE)
    restarts.is_listening(handle, THERE)
    Mailbox(Process("abc", 7, "node")).close()
    store.announce(7)  # it opens its mailbox again, where the request has to be posted again
    restarts.is_listening(handle, THERE)
    store.answer(7)
    assert restarts.is_listening(handle, THERE)
    later = ActorState("ALIVE", 8, "node", "")
    assert not restarts.is_listening(handle, later)
    store.announce(8)
    assert not restarts.is_listening(handle, later)
    store.answer(8)
    assert restarts.is_listening(handle, later)
    assert not any("/7@" in key for key in store.values), "what the earlier process posted is removed"


def test_a_request_that_is_posted_while_another_is_taken_is_not_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process("abc", 7, "node")
    mailbox, key = Mailbox(process), process.key(REQUESTS)

    def post(number: str) -> None:
        store.store(key, packed((number, print, ())))

    def read_before_the_next_is_posted(key: str) -> bytes | None:
        text = store.values.get(key)
        post("second")
        return text

    post("first")
    with monkeypatch.context() as patch:
        patch.setattr(ray_internals, "stored", read_before_the_next_is_posted)
        first = mailbox.take()
    second = mailbox.take()
    assert first is not None and second is not None
    assert (first.number, second.number) == ("first", "second")
    assert mailbox.take() is None
