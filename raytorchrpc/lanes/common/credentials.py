"""The identity of a process on its connections, and the credentials that prove it. Data alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Identity(NamedTuple):
    """One end of a connection. Both ends must describe both ends in the same way."""

    group: str
    generation: str
    rank: int
    """-1 for a process that is not a member."""
    incarnation: int
    address: str
    """The address on which it listens, unique among all processes that ever listened."""

    def encode(self) -> bytes:
        """Encode as bytes that are the same in every process."""
        return repr(tuple(self)).encode()


@dataclass(frozen=True)
class Credentials:
    """Authenticates a process on the connections of one lane or service."""

    secret: bytes = field(repr=False)
    rank: int = -1
    incarnation: int = 0
    group: str = ""
    generation: str = ""
    across_users: bool = False
    """Accept peers of other users on Unix sockets."""
    tls: bytes | None = field(default=None, repr=False)
    """Private key and certificate of the group as PEM, for TLS on TCP; None: frames are only authenticated."""

    def peer(self, instance: Instance, address: str) -> Identity:
        """Return the identity of a process of the group, under its listening address."""
        return Identity(self.group, self.generation, instance.rank, instance.incarnation, address)

    @property
    def instance(self) -> Instance:
        """What this process publishes with its listening addresses."""
        return Instance(self.rank, self.incarnation)


class Instance(NamedTuple):
    """The process of a group that an address belongs to."""

    rank: int
    incarnation: int
