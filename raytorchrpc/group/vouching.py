"""Members vouch for each other's connections to torchrpc and gloo, which authenticate nobody; see ``process.guard``.

Who accepts a connection asks the members on the host that it comes from, over the group's own authenticated
connections. A member knows the connections of its process from the kernel, those that torch opened by itself included.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from raytorchrpc.calls import protocol
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.protocol import ControlHeader
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.lanes.torchrpc.lane import TorchRpcLane
from raytorchrpc.process import tcp
from raytorchrpc.process.fan_out import Outcome, Requests
from raytorchrpc.process.guard import Connection, made_here

#: How long members may take to answer (seconds). First the one that has probably made a connection, then the others.
_ANSWER_S = 10.0
#: A member that has not answered is not asked again before it has, at most for this long (seconds). Otherwise
#: strangers' connections, about which it is asked, would hold up members' connections.
_LEFT_OUT_S = 30.0
#: Longest time until this process knows the other members: a faster one may connect before that (seconds).
_FORMS_S = 60.0


def vouched(
    local: LocalMember, slow: dict[str, float], connections: Mapping[Connection, str | None]
) -> Iterator[Connection]:
    """Yield those that this process or another member made, each as soon as that is known.

    ``slow``: by name, until when a member is left out that has not answered (``time.monotonic``). Is changed.
    ``connections``: with the name of the member that has probably made each. Connections from
    ``GroupConfig.torchrpc_from`` count as members': addresses are translated there, so no member knows its own by what
    is seen here.
    """
    unknown = set(connections)
    translated = tcp.networks(local.config.torchrpc_from)
    here = {each for each in unknown if any(ipaddress.ip_address(each.here[0]) in network for network in translated)}
    here.update(made_here(unknown))
    yield from here
    unknown -= here
    if unknown:
        local.peers.wait_for_route(local.me.rank, _FORMS_S)  # it comes after the others
        # Otherwise each of n members would ask all others about n connections.
        yield from _confirmed(local, slow, unknown, _guesses(local, unknown, connections))
    yield from _confirmed(local, slow, unknown, _whom_to_ask(local, unknown))


def _confirmed(
    local: LocalMember,
    slow: dict[str, float],
    unknown: set[Connection],
    questions: Iterable[tuple[PeerRoute, list[Connection]]],
) -> Iterator[Connection]:
    """Ask these members; yield the connections that they made, and take them out of ``unknown``."""
    about = {route.member.name: (route, some) for route, some in questions}
    asked: dict[str, Pending] = {}

    def begin(name: str, answered: Callable[[Outcome], object]) -> None:
        asked[name] = _ask(local, *about[name])
        asked[name].add_done_callback(partial(answered, asked[name].take))

    requests = Requests((name for name in about if time.monotonic() >= slow.get(name, 0.0)), begin)
    until = time.monotonic() + _ANSWER_S
    while unknown and requests.unanswered:
        if (answer := requests.next(until)) is None:
            for name in requests.unanswered:
                slow[name] = time.monotonic() + _LEFT_OUT_S
                asked[name].add_done_callback(partial(slow.pop, name, None))
            return
        try:
            message = answer[1]()
        except RayTorchRpcError:  # it is lost
            continue
        if message.header[0] == protocol.OK:
            theirs = unknown.intersection(Connection(*each) for each in local.codec.decode(*message.body))
            yield from theirs
            unknown -= theirs


def _guesses(
    local: LocalMember, unknown: Collection[Connection], connections: Mapping[Connection, str | None]
) -> Iterator[tuple[PeerRoute, list[Connection]]]:
    about: dict[str, list[Connection]] = {}
    for connection in unknown:
        if (name := connections[connection]) not in (None, local.me.name):
            about.setdefault(name, []).append(connection)
    for name, some in about.items():
        with contextlib.suppress(RayTorchRpcError):  # it was removed just now
            yield local.peers.route(name), some


def _whom_to_ask(local: LocalMember, connections: set[Connection]) -> Iterator[tuple[PeerRoute, list[Connection]]]:
    """The members on the hosts that the connections come from; all of them about a host where none listens."""
    hosts: Mapping[str, str] = next((lane.hosts for lane in local.lanes if isinstance(lane, TorchRpcLane)), {})
    known = set(hosts.values())
    for member in local.peers.members:
        if member.rank != local.me.rank:
            host = hosts.get(member.name)
            about = [each for each in connections if each.here[0] == host or each.here[0] not in known]
            if about:
                with contextlib.suppress(RayTorchRpcError):  # it was removed just now
                    yield local.peers.route(member), about


def _ask(local: LocalMember, route: PeerRoute, about: list[Connection]) -> Pending:
    lane = next(lane for lane in local.lanes if lane.name == registry.CONTROL)
    header = ControlHeader(protocol.ASK, local.me.rank, route.token)
    body = local.codec.encode((own, ([tuple(each) for each in about],)), own=True)
    return lane.call(route.member.name, Message(tuple(header), body), _ANSWER_S)


def own(local: LocalMember, connections: Sequence[tuple[tuple[str, int], tuple[str, int]]]) -> list[Connection]:
    """In a member that is asked: those that its process made."""
    return made_here([Connection(*each) for each in connections])
