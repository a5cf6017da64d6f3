"""What a PeerLost says of the call: whether it may have run, and whom it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc.calls.protocol import CALL, OK, RAISED, ReplyHeader, RequestHeader
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import LaneUnavailable, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Message
from raytorchrpc.tensors.codec import NOTHING, Codec
from raytorchrpc.tensors.exceptions import decode_exception
from tests.polling import wait_until
from tests.unit.callees import TOKEN, Deadlines, exposed, make_callee
from tests.unit.members import DirectLane, Members, in_thread

# --- calls to a member that is being added --------------------------------------------------------------------------


@pytest.fixture
def newcomer() -> Iterator[tuple[Members, Any, Callable[[], Any]]]:
    """The group, the peers of ``a``, and a call by it on a thread, whose result is returned later."""
    with Members(GroupConfig(), {"f": exposed(lambda actor: "its result")}) as group, group.acting("a") as local:
        yield group, local.peers, lambda: in_thread(lambda: rtr.rpc_sync("home", timeout=20).f())


def test_a_call_waits_for_the_announcement_of_its_target_while_messages_are_unread(newcomer: Any) -> None:
    _, peers, begin = newcomer
    route = peers.route("home")
    peers.remove_peer(route.member.rank)
    with pytest.raises(RayTorchRpcError, match="'home' is not in group"):
        begin()()  # nothing has arrived that could announce it
    looks = list[int]()
    peers.has_unread = lambda: not looks.append(1)
    called = begin()
    assert wait_until(lambda: bool(looks), 20)
    peers.add_peer(route)
    assert called() == "its result"


def test_a_call_waits_for_a_target_that_joins(newcomer: Any) -> None:
    group, peers, begin = newcomer
    joining = partial(group.mark_away, "a", "home", "it has not joined yet", joins=True)
    joining()
    called = begin()
    peers.activate(group.members["home"].me.rank)  # perhaps after the call has begun to wait
    assert called() == "its result"
    joining()
    called = begin()
    group.mark_away("a", "home", "its actor died", for_good=True)
    with pytest.raises(PeerLost, match="its actor died"):
        called()

    async def call_on_a_loop() -> None:
        await rtr.rpc_async("home", timeout=20).f()

    joining()
    with pytest.raises(PeerLost, match="it has not joined yet"):  # the loop goes on
        asyncio.run(call_on_a_loop())


# --- calls that may be sent again -----------------------------------------------------------------------------------


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    """``a`` calls ``f`` of ``home``, which the connection of ``a`` loses, or refuses."""
    monkeypatch.setattr("raytorchrpc.calls.peers.UNREPORTED_LOSS_S", 0.01)
    with Members(GroupConfig(), {"f": exposed(lambda actor: "its result")}) as group:
        yield group


def called(members: Members, retry: int, ran: bool, timeout: float = 20.0) -> rtr.Future[Any]:
    """A call of which the first attempt is lost, and ``ran`` or did not."""
    lane = members.lanes["a"]
    lane.holds, lane.broken = (lambda method: ran), not ran
    with members.acting("a"):
        future: rtr.Future[Any] = rtr.rpc_async("home", retry=retry, timeout=timeout).f()
    if ran:
        lane.lose(0)
    return future


@pytest.mark.parametrize("ran", [True, False])
def test_a_repeated_call_remembers_that_an_earlier_attempt_may_have_run(members: Members, ran: bool) -> None:
    members.mark_away("a", "home", "its connection closed")
    future = called(members, 1, False) if not ran else None
    if future is None:
        members.members["a"].peers.activate(0)
        future = called(members, 1, True)
    members.mark_away("a", "home", "its actor died: killed", for_good=True)
    with pytest.raises(PeerLost, match="its actor died: killed") as lost:
        future.wait()
    assert (lost.value.peer, lost.value.may_have_run) == ("home", ran)


def test_a_lost_call_is_sent_again_within_its_limit(members: Members) -> None:
    future = called(members, 2, ran=True)
    lane = members.lanes["a"]
    waiting = in_thread(lambda: future.exception(20))
    for _ in range(2):
        assert wait_until(lambda: bool(lane.held), 20)
        lane.lose(0)
    error = waiting()
    assert isinstance(error, PeerLost) and error.may_have_run and not lane.held


def test_a_lost_call_returns_once_it_can_be_sent_again(members: Members) -> None:
    future = called(members, 1, ran=True)
    members.lanes["a"].release()
    assert future.wait() == "its result"


def test_a_call_that_cannot_be_sent_again_says_why(members: Members) -> None:
    future = called(members, 1, ran=True)
    members.members["a"].leave()
    with pytest.raises(RayTorchRpcError, match=r"left the group|removed from the group"):
        future.wait()


def test_a_call_whose_peer_does_not_return_in_time_names_the_last_attempt(members: Members) -> None:
    members.mark_away("a", "home", "its node restarts")
    future = called(members, 1, ran=False, timeout=0.5)
    with pytest.raises(RpcTimeout, match=r"at the last attempt: .*its node restarts"):
        future.wait()


def test_calls_that_wait_for_a_peer_take_no_thread_from_those_that_are_served(members: Members) -> None:
    members.mark_away("a", "home", "its node restarts")
    with members.acting("a"):
        waiting = [rtr.rpc_async("home", retry=1, timeout=120).f() for _ in range(520)]
    with members.acting("b"):
        assert rtr.rpc_async("a", timeout=60).f().result() == "its result"
    assert not any(future.done() for future in waiting)


def refused(tensor_lanes: dict[str, Any]) -> BaseException:
    """What the callee answers to a call with out-of-band tensors."""
    deadlines = Deadlines()
    server = make_callee(deadlines, {"f": exposed(lambda instance: pytest.fail("it ran"))}, tensor_lanes)
    answers: list[Message] = []
    request = Message(tuple(RequestHeader(CALL, 0, TOKEN, "f", (), 10.0, None)), NOTHING, manifests=BESIDE)
    work = server.serve(DirectLane(), request, answers.append)
    assert work is not None
    work()
    deadlines.stop()
    (answer,) = answers
    assert ReplyHeader(*answer.header).kind == RAISED
    return decode_exception(Codec(), answer.body, "callee.f")


BESIDE = (("shm", None, (), None),)


def test_arguments_that_could_not_be_fetched_name_the_callee_and_did_not_run() -> None:
    def read(*_: Any) -> Any:
        raise PeerLost("caller", "the route for tensors broke")

    lost = refused({"shm": SimpleNamespace(read=read, used=lambda *_: None)})
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.may_have_run) == ("callee", False)
    assert "could not fetch the arguments: the route for tensors broke" in str(lost)


# --- results that are lost after the method ran ------------------------------------------------------------------

UNSEEN = PeerLost("b", "it belongs to another generation of the group", may_have_run=False)
WITH_TENSORS = Message((OK,), NOTHING, manifests=BESIDE)


def outcome_after(members: Members, gone: bool, failure: RayTorchRpcError) -> Any:
    """The error of a call whose result cannot be fetched after its reply."""
    local, lane = members.members["a"], members.lanes["a"]
    lane.holds = lambda method: True

    def fetch(*_: Any, **__: Any) -> Any:
        raise failure

    with members.acting("a"):
        future = rtr.rpc_async("home").f()
    if gone:
        members.mark_away("a", "home", "its actor died", for_good=True)
    local.payloads.receive = fetch  # type: ignore[method-assign]
    lane.held.pop()[1].settle(WITH_TENSORS)
    return future.exception()


@pytest.mark.parametrize("failure", [LaneUnavailable("shm", "not mapped"), UNSEEN], ids=["lane", "peer"])
def test_a_result_that_went_with_its_process_has_been_made(members: Members, failure: RayTorchRpcError) -> None:
    error = outcome_after(members, True, failure)
    assert isinstance(error, PeerLost)
    assert (error.peer, error.may_have_run) == ("b" if failure is UNSEEN else "home", True)


def test_memory_that_cannot_be_mapped_while_the_peer_lives_stays_the_lanes_fault(members: Members) -> None:
    error = outcome_after(members, False, LaneUnavailable("shm", "not mapped"))
    assert isinstance(error, LaneUnavailable) and error.reason == "not mapped"


def test_what_the_method_itself_lost_is_not_asked_for_again(members: Members) -> None:
    def fails(actor: Any) -> None:
        calls.append(actor)
        raise PeerLost("c", "the method's own call")

    calls: list[Any] = []
    members.members["home"].incoming.methods = {"g": exposed(fails)}
    with members.acting("a"), pytest.raises(PeerLost, match="the method's own call"):
        rtr.rpc_sync("home", retry=2).g()
    assert len(calls) == 1


def test_a_request_with_tensors_for_a_member_that_has_left_did_not_run() -> None:
    lost = refused({})
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.may_have_run) == ("callee", False)
