"""The start of a torchrpc agent, without Ray: what it takes over, and who may use it meanwhile."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.rpc as rpc

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import BootstrapError, LaneUnavailable
from raytorchrpc.lanes.torchrpc.agent import AgentPeer, AgentSpec, process_agent
from tests.conformance.peers import Process

SPEC = AgentSpec("rtr:a", 1, "lo", "127.0.0.1", ("uv",), ("basic", "mpt_uv"), 4, 60.0, {}, ())
PEER = AgentPeer("rtr:b", 2, "uv://127.0.0.1:1", {})


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.kill()


def test_listeners_of_other_threads_are_left_alone(process: Process) -> None:
    assert process.run(start_beside_a_server) == ["accepted", "accepted"]


def start_beside_a_server() -> list[str]:
    poll, wake = select.epoll(), socket.socketpair()
    poll.register(wake[0], select.EPOLLIN)
    servers: list[socket.socket] = []
    start = torch_internals.start_agent

    def start_agent(*args: Any, **settings: Any) -> Any:
        servers.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        poll.register(servers[0], select.EPOLLIN)  # as an event loop does; the other is for a thread
        return start(*args, **settings)

    torch_internals.start_agent = start_agent
    agent = process_agent()
    agent.prepare(SPEC)
    agent.start()
    assert len(agent._doors) > 1, "channels listen too"
    seen = []
    for server in servers:
        server.settimeout(5)
        with socket.create_connection(server.getsockname(), timeout=5):
            server.accept()[0].close()
            seen.append("accepted")
    return seen


def test_another_thread_uses_the_agent_only_when_it_knows_its_peers(process: Process) -> None:
    assert process.run(use_while_it_starts) == "rtr:b"


def use_while_it_starts() -> str:
    agent = process_agent()
    agent.prepare(SPEC)
    agent.add_peers([PEER])
    add = torch_internals.add_peer

    def add_peer(*args: Any, **settings: Any) -> None:
        time.sleep(0.5)
        add(*args, **settings)

    torch_internals.add_peer = add_peer
    threading.Thread(target=agent.start).start()
    while not torch_internals.agent_is_set():
        time.sleep(0.001)
    return rpc.get_worker_info("rtr:b").name


def test_a_peer_is_not_forgotten_while_a_request_is_sent(process: Process) -> None:
    """torch looks up the receiver in a table from which it erases others without a lock: a crash, at times."""
    assert process.run(return_while_sending) == [2, 3]


def return_while_sending() -> list[int]:
    """The worker ids by which torch knows a peer that is removed and returns: while a request is sent, and after it."""
    agent = process_agent()
    agent.prepare(SPEC._replace(at_once=True))
    agent.add_peers([PEER])
    returning = threading.Thread(target=agent.add_peers, args=([PEER._replace(worker_id=3)],))
    with agent.sending:
        returning.start()
        returning.join(0.2)
        seen = [rpc.get_worker_info("rtr:b").id]
    returning.join(20)
    return [*seen, rpc.get_worker_info("rtr:b").id]


def test_groups_share_it_if_they_fit(process: Process) -> None:
    refused, peers = process.run(serve_two_groups)
    assert (
        refused
        == "this process's agent serves another group; this needs other devices, transports or another interface"
    )
    assert peers == ([True, True], [True, False], [False, False])


def serve_two_groups() -> tuple[str, Any]:
    """Why a third one is refused; and whether the agent has each peer as one group after the other ends."""
    agent, both, other = process_agent(), PEER, AgentPeer("rtr:c", 3, "uv://127.0.0.1:2", {})
    agent.prepare(SPEC, "first")
    agent.prepare(SPEC._replace(worker_id=7, admitted=("10.0.0.1",)), "second")
    with pytest.raises(LaneUnavailable) as refused:
        agent.prepare(SPEC._replace(channels=("basic",)), "third")
    agent.add_peers([both], "first")
    agent.start()
    agent.add_peers([both, other], "second")

    def there() -> list[bool]:
        return [agent._find(peer.name) is not None for peer in (both, other)]

    seen = [there()]
    agent.remove_peer(both.name, "first")
    agent.rest("first")
    agent.remove_peer(other.name, "second")
    seen.append(there())
    agent.remove_peer(both.name, "second")
    agent.rest("second")
    assert agent.is_running and agent.identity is not None and agent.identity.worker_id == 1
    return refused.value.reason, (*seen, there())


def test_none_starts_after_the_end_of_a_group(process: Process) -> None:
    """As for a member that connected just before the end."""
    assert process.run(start_after_the_end) == (True, False)


def start_after_the_end() -> tuple[bool, bool]:
    """Whether that was refused, and whether an agent runs."""
    agent = process_agent()
    agent.prepare(SPEC)
    agent.rest()
    with pytest.raises(BootstrapError, match="it is in no group"):
        agent.start()
    return True, agent.is_running


def test_a_start_that_fails_leaves_no_thread_and_no_open_listener(process: Process) -> None:
    assert process.run(fail_to_start) == (0, False)


def fail_to_start() -> tuple[int, bool]:
    """Threads of the guard, and whether a stranger can connect."""

    def start_agent(*args: Any, **settings: Any) -> Any:
        raise RuntimeError("not today")

    torch_internals.start_agent = start_agent
    agent = process_agent()
    with pytest.raises(BootstrapError, match="not today"):
        agent.prepare(SPEC._replace(at_once=True))
    guards = sum(thread.name == "raytorchrpc-guard" for thread in threading.enumerate())
    assert agent._front is not None
    with socket.socket() as stranger:
        stranger.settimeout(0.2)
        return guards, stranger.connect_ex(agent._front.getsockname()) == 0
