"""The membership of this process."""

from __future__ import annotations

import asyncio

from raytorchrpc.calls import rejoin
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import checked_timeout, takes_timeout
from raytorchrpc.calls.peers import Member
from raytorchrpc.errors import NotAMember
from raytorchrpc.process import fork


class _Current:
    """Holds this process's membership, and drops it in a forked child."""

    def __init__(self) -> None:
        self.local: LocalMember | None = None
        self._parents: LocalMember | None = None

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware. Freeing the parent's membership could wait for threads that the child lacks."""
        if self.local is not None:
            self._parents, self.local = self.local, None
            fork.forked_from(f"member {self._parents.me.name!r} of group {self._parents.group!r}")
        return ()


_current = _Current()


def process_member(timeout_s: float | None = None) -> LocalMember:
    """This process's membership. Raises NotAMember, with the remedy, if there is none.

    In a restarted actor, blocks until it has rejoined its group, at most ``timeout_s`` (None: the default of a call);
    then raises RpcTimeout.
    """
    local = _current.local
    if local is None:
        local = rejoin.wait(timeout_s)[0]
    return local


def current_local() -> LocalMember | None:
    """This process's membership, or None."""
    return _current.local


def member_of(generation: str) -> LocalMember:
    """This process's membership in that generation of a group. Raises NotAMember if it has left it."""
    local = _current.local
    if local is None or local.generation != generation:
        raise NotAMember(f"this process has left generation {generation} of the group")
    return local


def set_local(local: LocalMember | None) -> None:
    """Enter or leave a group."""
    _current.local = local
    if local is not None:
        fork.register(_current)
    rejoin.joined(local)


@takes_timeout
def current_member(timeout: float | None = None) -> Member:
    """This process's own ``Member``. Raises NotAMember outside a group.

    In an actor that Ray has restarted, blocks until its group has taken it back, at most ``timeout`` seconds (None:
    the group's ``rpc_timeout_s``); then raises RpcTimeout. Raises NotAMember if the group has ended meanwhile, or if
    the actor's ``__init__`` is still running. On an event loop use ``await_membership``.
    """
    return process_member(None if timeout is None else checked_timeout(timeout)).me


async def await_membership(timeout: float | None = None) -> Member:
    """Like ``current_member``, for coroutines: ``me = await rtr.await_membership(timeout=30)``."""
    checked = None if timeout is None else checked_timeout(timeout)
    local = _current.local
    if local is not None:
        return local.me
    member: Member = (await asyncio.wrap_future(rejoin.awaited(checked))).me
    return member
