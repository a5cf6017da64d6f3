"""What a member derives from the description of its group: the settings of its agent and its lanes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from raytorchrpc.lanes.torchrpc.agent import AgentSpec
from raytorchrpc.membership.messages import GroupInfo, JoinSpec


class Settings(NamedTuple):
    """See ``settings_of``."""

    agent: AgentSpec
    device_maps: Mapping[str, Mapping[int, int]]
    """By peer name: local GPU -> GPU there."""
    tcp_host: str | None
    """Address to listen on for peers in other network namespaces; None if there are none."""
    by_tcp: frozenset[str]
    """Those peers, by name."""
    lanes: tuple[str, ...]
    """The lanes that some route of this member uses."""


def settings_of(spec: JoinSpec, info: GroupInfo) -> Settings:
    """The settings of the member that ``spec`` is for. Pure."""
    plan, config, me = info.plan, info.config, spec.member
    agent, maps = plan.kind(me.name).agent, plan.gpu_maps(me.name)
    rpc_names = {member.name: member.rpc_name for member in info.members} if maps else {}
    by_tcp = frozenset(plan.far_from(me.name))
    agent_spec = AgentSpec(
        name=me.rpc_name,
        worker_id=me.worker_id,
        interface=agent.interface,
        address=agent.address,
        transports=agent.transports,
        channels=agent.channels,
        threads=config.torchrpc_threads,
        timeout_s=config.rpc_timeout_s,
        device_maps={rpc_names[peer]: pairs for peer, pairs in maps.items()},
        devices=plan.gpus_of(me.name),
        # torchrpc connects from whichever address leads to the peer.
        admitted=(*plan.addresses(), *config.torchrpc_from),
        at_once=config.torchrpc == "at once",
    )
    tcp_host = agent.address if by_tcp or spec.supervised_by_tcp else None
    return Settings(agent_spec, maps, tcp_host, by_tcp, plan.lanes_of(me.name))
