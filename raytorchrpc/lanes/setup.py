"""What a lane's factory is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import MessageLane, TensorLane
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.process.this_process import default_capacity
from raytorchrpc.topology.endpoint import Endpoint


@dataclass(frozen=True)
class LaneSetup:
    """What ``make(setup)`` may need to make the lane of one member."""

    member: str
    """The member's name."""
    credentials: Credentials
    """Proves to peers that the process is this member: the group's secret, the member's rank and incarnation."""
    config: GroupConfig
    endpoint: Callable[[], Endpoint]
    """Describes this process. Blocks for a few milliseconds."""
    tcp_host: str | None = None
    """Address to listen on for peers in other network namespaces; None if there are none."""
    by_tcp: frozenset[str] = frozenset()
    """Names of those peers."""
    interface: str | None = None
    """Network interface that holds this node's address; None if unknown."""
    devices: tuple[int, ...] = ()
    """CUDA indices in this process that tensors are sent from or arrive on."""
    device_maps: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """By peer: this process's GPU -> the peer's, for arguments."""

    @property
    def capacity(self) -> int:
        """Most memory for CPU tensors in flight, in bytes: ``GroupConfig.shm_bytes``, or its default."""
        return self.config.shm_bytes or default_capacity()

    def make(self, row: registry.Lane) -> MessageLane | TensorLane:
        """Make a lane as its row says, not open yet. Raises ConfigurationError if its factory makes something else."""
        lane = registry.resolve(row, row.make)(self)
        expected = TensorLane if row.out_of_band else MessageLane
        if not isinstance(lane, expected) or lane.name != row.name:
            raise ConfigurationError(f"{row.make} returned {lane!r}; expected a {expected.__name__} named {row.name!r}")
        return lane

    def control_lane(self, name: str) -> MessageLane:
        """Make a message lane by which the same lane of two members makes requests, authenticated like this member.

        ``name``: the lane that uses, opens and closes it.
        """
        lane = replace(self, member=f"{self.member}-{name}").make(registry.lane(registry.CONTROL))
        assert isinstance(lane, MessageLane)
        return lane
