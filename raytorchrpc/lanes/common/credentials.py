"""Who a process is on its connections, and what it proves that with. Data alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Identity(NamedTuple):
    """One end of a connection. Both ends have to name both ends in the same way."""

    group: str
    generation: str
    rank: int
    """-1 for a process that is no member."""
    incarnation: int
    address: str
    """The address on which it listens, and by which it was called; unique among all processes that ever listened."""

    def encode(self) -> bytes:
        """As bytes that are the same in every process."""
        return repr(tuple(self)).encode()


@dataclass(frozen=True)
class Credentials:
    """What a process proves itself with on the connections of one lane or service."""

    secret: bytes = field(repr=False)
    rank: int = -1
    incarnation: int = 0
    group: str = ""
    generation: str = ""
    across_users: bool = False
    """Accept peers on Unix sockets that run as another user."""
    tls: bytes | None = field(default=None, repr=False)
    """For TLS on TCP, the group's private key and certificate as PEM; None: frames are authenticated, in the clear."""

    def identity(self, address: str) -> Identity:
        """This process, under that listening address."""
        return Identity(self.group, self.generation, self.rank, self.incarnation, address)

    def peer(self, instance: Instance, address: str) -> Identity:
        """Another process of the group, under its listening address."""
        return Identity(self.group, self.generation, instance.rank, instance.incarnation, address)

    @property
    def instance(self) -> Instance:
        """What this process publishes beside its listening addresses."""
        return Instance(self.rank, self.incarnation)


class Instance(NamedTuple):
    """Which process of a group an address belongs to."""

    rank: int
    incarnation: int
