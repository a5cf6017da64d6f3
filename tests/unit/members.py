"""Members of one group that all live in this process, joined by a lane that tests can hold up. Needs no Ray."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

from raytorchrpc.calls import member
from raytorchrpc.calls.member import LocalMember, memberships, set_locals
from raytorchrpc.calls.peers import Absence, Member, PeerRoute, PeerTable, process_token
from raytorchrpc.calls.scope import Limit, Scope, current_scope
from raytorchrpc.calls.server.exposed import Exposed
from raytorchrpc.calls.server.services import Services
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import Capabilities, Message, MessageLane, PeerAddress, Pending, Serve, Spawn, TensorLane
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.socket import selector
from raytorchrpc.patterns.home import OPEN as OPEN
from raytorchrpc.patterns.home import services
from raytorchrpc.patterns.queues.services import PUT as PUT
from raytorchrpc.patterns.queues.services import PUT_BACK as PUT_BACK
from raytorchrpc.patterns.queues.services import SUBSCRIBE as SUBSCRIBE
from raytorchrpc.patterns.queues.services import TAKE as TAKE
from raytorchrpc.patterns.queues.services import WITHDRAW as WITHDRAW
from raytorchrpc.patterns.weights.published import DELTAS as DELTAS
from raytorchrpc.patterns.weights.published import LAYOUT as LAYOUT
from raytorchrpc.patterns.weights.published import LEASE as LEASE
from raytorchrpc.patterns.weights.published import PIECES as PIECES
from raytorchrpc.patterns.weights.published import TENSORS as TENSORS
from raytorchrpc.patterns.weights.published import WAIT as WAIT
from raytorchrpc.patterns.weights.publishers import LOOK as LOOK
from raytorchrpc.patterns.weights.publishers import SHARDS
from raytorchrpc.process import workers
from raytorchrpc.topology.endpoint import Endpoint
from tests.threads import in_thread as in_thread
from tests.unit import clusters

GENERATION = "generation"


class DirectLane(MessageLane):
    """Hands each request to the peer's server, on a thread of the peer's own."""

    name: ClassVar[str] = "direct"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=None, in_band_cuda=True, copies_at_once=True, rrefs=True
    )

    def __init__(self) -> None:
        self.peers: dict[str, LocalMember] = {}
        self.holds: Callable[[str], bool] = lambda method: False
        """Whether a request for this method is to wait for ``release``."""
        self.held: list[tuple[Callable[[], None], Pending]] = []
        self.when_over: Callable[[], None] = lambda: None
        """Called when a call is over, before its answer is taken."""
        self.delays: Callable[[str], bool] = lambda method: False
        """Whether an answer of this method is to wait for ``deliver_answers``."""
        self.answers: list[Callable[[], None]] = []
        self.jammed: threading.Event | None = None
        """If given, what sends stands still until it is set, as on a connection that takes no data."""
        self.broken = False
        """Every request fails, and every answer is lost, also one that was held."""
        self._under_way: set[Pending] = set()

    def open(self, serve: Serve, spawn: Spawn) -> None:
        raise AssertionError("not used")

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        raise AssertionError("not used")

    def call(
        self,
        peer: str,
        message: Message,
        timeout_s: float,
        *,
        caller_waits: bool = False,
        on_released: Callable[[], None] | None = None,
    ) -> Pending:
        def over() -> None:
            if on_released is not None:
                on_released()
            self.when_over()

        pending = Pending(over)
        if self.broken:
            raise PeerLost(peer, "the test broke the connection", may_have_run=False)
        if self.jammed is not None:
            self.jammed.wait(timeout_s)
        self._under_way.add(pending)
        deliver = partial(self._deliver, self.peers[peer], message, pending)
        if self.holds(message.header[3]):
            self.held.append((deliver, pending))
        else:
            deliver()
        return pending

    def _deliver(self, peer: LocalMember, message: Message, pending: Pending) -> None:
        def reply(answer: Message) -> None:
            if pending not in self._under_way:
                raise PeerLost("caller", "the test broke the connection")
            arrive = partial(self._arrive, pending, answer)
            if self.delays(message.header[3]):
                self.answers.append(arrive)
            else:
                arrive()

        work = peer.incoming.serve(self, message, reply)
        if work is not None:
            peer.workers.submit(work)

    def _arrive(self, pending: Pending, answer: Message) -> None:
        """Unless the connection broke meanwhile."""
        if pending in self._under_way:
            self._under_way.discard(pending)
            pending.settle(answer)

    def release(self, number: int | None = None) -> None:
        """Deliver the request held as number ``number``; None: all, in order, and hold no more."""
        if number is not None:
            self.held.pop(number)[0]()
            return
        self.holds = lambda method: False
        while self.held:
            self.held.pop(0)[0]()

    def deliver_answers(self) -> None:
        """Those that were held, and hold no more."""
        self.delays = lambda method: False
        while self.answers:
            self.answers.pop(0)()

    def lose(self, number: int, error: Exception | None = None) -> None:
        """The request held as number ``number`` never arrives, and its sender is told (None: by PeerLost)."""
        pending = self.held.pop(number)[1]
        self._under_way.discard(pending)
        pending.settle(None, error or PeerLost("peer", "the test lost the message"))

    def break_connection(self) -> None:
        self.broken, under_way = True, list(self._under_way)
        self._under_way.clear()
        for pending in under_way:
            pending.settle(None, PeerLost("peer", "the test broke the connection"))

    def disconnect(self, peer: str) -> None:
        raise AssertionError("not used")

    def close(self) -> None:
        """Nothing to do."""


def _share_no_threads() -> None:
    """The next member is to be as in a process of its own."""
    workers._clock._forget()
    workers._cleanup._forget()
    selector._selector = None


class Members:
    """``home`` (rank 0), ``a`` (1) and ``b`` (2); each has a lane to all others. ``with Members(...)`` closes them."""

    def __init__(
        self,
        config: GroupConfig,
        methods: Mapping[str, Exposed] | None = None,
        *,
        by_socket: bool = False,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """``methods``: of each member; they get None for their actor. ``by_socket``: by the socket lane instead of
        one that tests can hold up. ``beside``: the tensor lanes with it, by device type.
        """
        self._beside = dict(beside or {})
        self.members = dict[str, LocalMember]()
        for rank, name in enumerate(("home", "a", "b")):
            _share_no_threads()
            me, served = _member(name, rank), methods or {}
            self.members[name] = LocalMember("group", GENERATION, me, config, None, served, 1 << 30, services())
        self.lanes: dict[str, Any] = {name: DirectLane() for name in self.members}
        """By the member that sends on it."""
        if by_socket:
            self._open_sockets()
        for name, local in self.members.items():
            self.lanes[name].peers = self.members
            for peer in self.members.values():
                self._know(local, peer.me)

    def _open_sockets(self) -> None:
        row, addresses = registry.lane("socket"), list[PeerAddress]()
        for name, local in self.members.items():
            setup = LaneSetup(name, Credentials(b"s" * 32, local.me.rank), local.config, _unasked)
            lane = setup.make(row)
            assert isinstance(lane, MessageLane)
            self.lanes[name] = lane
            local.lanes.append(lane)
            _share_no_threads()
            addresses.append(PeerAddress(name, lane.open(partial(local.incoming.serve, lane), local.workers.submit)))
        for lane in self.lanes.values():
            lane.connect(addresses)
        for kind in self._beside.values():
            self._open_beside(registry.lane(kind))

    def _open_beside(self, row: Any) -> None:
        opened: dict[str, TensorLane] = {}
        for name, local in self.members.items():
            lane = LaneSetup(name, Credentials(b"s" * 32, local.me.rank), local.config, clusters.member).make(row)
            assert isinstance(lane, TensorLane)
            opened[name] = local.tensor_lanes[row.name] = lane
        addresses = [PeerAddress(name, lane.open()) for name, lane in opened.items()]
        for lane in opened.values():
            lane.connect(addresses)

    def _know(self, local: LocalMember, peer: Member) -> None:
        lane = self.lanes[local.me.name]
        token = process_token(GENERATION, peer.rank, peer.incarnation)
        local.peers.add_peer(PeerRoute(peer, lane, lane, self._beside, token=token, same_clock=True))

    @contextmanager
    def acting(self, name: str | None) -> Iterator[LocalMember]:
        """What is done here is done by this member; None: by a process that is no member."""
        before = memberships()
        acts: Any = None if name is None else self.members[name]
        set_locals(*([] if name is None else [acts]))
        try:
            yield acts
        finally:
            set_locals(*before)

    def mark_away(self, at: str, name: str, cause: str, *, for_good: bool = False, joins: bool = False) -> None:
        """``at`` is told that the member ``name`` is away."""
        self.members[at].peers.mark_away(self.members[name].me.rank, Absence(cause, for_good, joins=joins))

    def served(self, kind: str, name: str, member: str = "home") -> Any:
        """The queue, topic or weights of this name that live in a member."""
        return self.members[member].services.find(kind, name, None, member)

    def shards(self, member: str) -> list[Any]:
        """The shards of weights that a member publishes with others."""
        services = self.members[member].services
        return [services.get(SHARDS, name) for name in services.names(SHARDS)]

    def forget_shards(self, member: str) -> None:
        """They are gone, as with the process of the member."""
        served = self.members[member].services._served
        for key in [key for key in served if key[0] == SHARDS]:
            del served[key]

    def part(self, name: str) -> None:
        """The home is told that this member is away; the connection between them is gone."""
        self.lanes[name].break_connection()
        self.mark_away("home", name, "parted")

    def reunite(self, name: str, incarnation: int = 0) -> None:
        """It is back, as the same process or as a later one."""
        self.lanes[name].broken = False
        home, rank = self.members["home"], self.members[name].me.rank
        self.mark_away("home", name, "it has not joined yet")
        self._know(home, _member(name, rank, incarnation))
        home.peers.activate(rank)

    def close(self) -> None:
        set_locals()
        for local in self.members.values():
            local.leave()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Groups:
    """This process in groups of these names and members, each with its actor; the name is the generation."""

    member = member

    def __init__(self, **groups: Mapping[str, Any]) -> None:
        self.locals = {name: self._local(name, members) for name, members in groups.items()}
        self.use(*groups)

    def _local(self, group: str, members: Mapping[str, Any]) -> Any:
        peers, unused = PeerTable(group, Services()), Any
        for rank, (name, actor_id) in enumerate(members.items()):
            made = Member(rank, name, actor_id, "", 0, "", rank, group=group)
            peers.add_peer(PeerRoute(made, unused, unused))
        return SimpleNamespace(group=group, generation=group, peers=peers, me=peers.member(0))

    def use(self, *groups: str, clients: Sequence[str] = ()) -> None:
        """It is in these now, and may join those as a client."""
        set_locals(*(self.locals[name] for name in groups))
        member.current.change(clients=clients)

    @contextmanager
    def serving(self, group: str) -> Iterator[None]:
        """This thread serves a call of that group."""
        before = current_scope.set(Scope(group=group))
        try:
            yield
        finally:
            current_scope.reset(before)


@contextmanager
def serving(left_s: float) -> Iterator[None]:
    """This thread serves a call that has so much time left."""
    before = current_scope.set(Scope(("caller",), Limit(time.monotonic() + left_s)))
    try:
        yield
    finally:
        current_scope.reset(before)


def _unasked() -> Endpoint:
    raise AssertionError("the socket lane does not ask what its process is")


def _member(name: str, rank: int, incarnation: int = 0) -> Member:
    return Member(rank, name, None, "node", 0, name, rank + 1, incarnation)


def spied(monkeypatch: Any, path: str) -> list[tuple[Any, ...]]:
    """The arguments of each call of the function with this path, from now on."""
    module, _, name = path.rpartition(".")
    calls, function = list[tuple[Any, ...]](), getattr(importlib.import_module(module), name)

    def note(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(path, note)
    return calls
