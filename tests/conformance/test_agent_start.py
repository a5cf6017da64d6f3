"""The start of a torchrpc agent, without Ray: what it takes over, and who may use it meanwhile."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed.rpc as rpc

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import BootstrapError, LaneUnavailable
from raytorchrpc.lanes.torchrpc.agent import AgentPeer, AgentSpec, process_agent
from tests.conformance.peers import in_process

SPEC = AgentSpec("rtr:a", 1, "lo", "127.0.0.1", ("uv",), ("basic", "mpt_uv"), 4, 60.0, {}, ())
PEER = AgentPeer("rtr:b", 2, "uv://127.0.0.1:1", {})


@in_process
def test_listeners_of_other_threads_are_left_alone() -> None:
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
    assert len(servers) == 2
    for server in servers:
        server.settimeout(5)
        with socket.create_connection(server.getsockname(), timeout=5):
            server.accept()[0].close()


@in_process
def test_another_thread_uses_the_agent_only_when_it_knows_its_peers() -> None:
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
    assert rpc.get_worker_info("rtr:b").name == "rtr:b"


@in_process
def test_a_peer_is_not_forgotten_while_a_request_is_sent() -> None:
    """torch looks up the receiver in a table from which it erases others without a lock: a crash, at times."""
    agent = process_agent()
    agent.prepare(SPEC._replace(at_once=True))
    agent.add_peers([PEER])
    returning = threading.Thread(target=agent.add_peers, args=([PEER._replace(worker_id=3)],))
    with agent.sending:
        returning.start()
        returning.join(0.2)
        assert rpc.get_worker_info("rtr:b").id == 2
    returning.join(20)
    assert rpc.get_worker_info("rtr:b").id == 3


@in_process
def test_groups_share_it_if_they_fit() -> None:
    """And it has each peer until all groups with that one have ended."""
    agent, both, other = process_agent(), PEER, AgentPeer("rtr:c", 3, "uv://127.0.0.1:2", {})
    agent.prepare(SPEC, "first")
    agent.prepare(SPEC._replace(worker_id=7, admitted=("10.0.0.1",)), "second")
    with pytest.raises(LaneUnavailable) as refused:
        agent.prepare(SPEC._replace(channels=("basic",)), "third")
    assert refused.value.reason == (
        "this process's agent serves another group; this needs other devices, transports or another interface"
    )
    agent.add_peers([both], "first")
    agent.start()
    agent.add_peers([both, other], "second")

    def has() -> list[bool]:
        return [agent._find(peer.name) is not None for peer in (both, other)]

    assert has() == [True, True]
    agent.remove_peer(both.name, "first")
    agent.rest("first")
    agent.remove_peer(other.name, "second")
    assert has() == [True, False]
    agent.remove_peer(both.name, "second")
    agent.rest("second")
    assert agent.is_running and agent.identity is not None and agent.identity.worker_id == 1
    assert has() == [False, False]


@in_process
def test_none_starts_after_the_end_of_a_group() -> None:
    """As for a member that connected just before the end."""
    agent = process_agent()
    agent.prepare(SPEC)
    agent.rest()
    with pytest.raises(BootstrapError, match="it is in no group"):
        agent.start()
    assert not agent.is_running


@in_process
def test_a_start_that_fails_leaves_no_thread_and_no_open_listener() -> None:
    def start_agent(*args: Any, **settings: Any) -> Any:
        raise RuntimeError("not today")

    torch_internals.start_agent = start_agent
    agent = process_agent()
    with pytest.raises(BootstrapError, match="not today"):
        agent.prepare(SPEC._replace(at_once=True))
    assert not [thread for thread in threading.enumerate() if thread.name == "raytorchrpc-guard"]
    assert agent._front is not None
    with socket.socket() as stranger:
        stranger.settimeout(0.2)
        assert stranger.connect_ex(agent._front.getsockname()), "a stranger can connect"
