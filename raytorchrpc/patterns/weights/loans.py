"""Loans: a program's own tensors are a version of a store, for as long as the program does not change them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.scope import Limit, allow_calls, current_scope
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.patterns.handle import Handle, run
from raytorchrpc.patterns.weights.published import PublishedWeights, name_of
from raytorchrpc.patterns.weights.publishers import Publisher, end_loan
from raytorchrpc.patterns.weights.snapshots import Snapshot

_log = logging.getLogger(__name__)

#: How long the others may take to be told of the end (seconds).
_TOLD_S = 5.0


@contextmanager
def lent(
    store: Handle,
    local: LocalMember,
    weights: PublishedWeights,
    loan: Snapshot,
    publisher: Publisher | None,
    timeout: float | None,
) -> Iterator[int]:
    """Yield the version of a loan, which ends with the block; see ``WeightStore.lend``.

    ``weights``: what this member publishes. ``publisher``: this process, if others lend shards of the same version.
    """
    has_failed = True
    try:
        yield loan.version
        has_failed = False
    finally:
        _end(store, local, weights, loan, publisher, timeout, has_failed)


def _end(
    store: Handle,
    local: LocalMember,
    weights: PublishedWeights,
    loan: Snapshot,
    publisher: Publisher | None,
    timeout: float | None,
    has_failed: bool,
) -> None:
    until, problem = time.monotonic(), None
    with allow_calls():  # readers, or other publishers, may need this actor to go on
        try:
            wait_s = 0.0 if has_failed else run(store._begin(timeout))[1]
            until += wait_s
        except RayTorchRpcError as error:  # no time is left, or this process is no member any more
            problem, wait_s = error, 0.0
        try:
            if publisher is not None:
                _end_together(store, publisher, loan.version, wait_s)
        except RayTorchRpcError as error:
            problem = problem or error
        except BaseException:
            until = 0.0
            raise
        finally:
            slow = weights.end_loan(loan, max(0.0, until - time.monotonic()))
    if slow:
        names = ", ".join(sorted(name_of(local, rank) for rank in slow))
        _log.warning(
            f"took back version {loan.version} of {store.kind} {store.name!r} before {names} had pulled it; such a "
            f"pull raises RpcTimeout"
        )
    if problem is not None and not has_failed:
        raise problem


def _end_together(store: Handle, publisher: Publisher, version: int, wait_s: float) -> None:
    """Wait for the other publishers' blocks, or tell them that the loan is over if ``wait_s`` is 0: also where the call
    that this thread serves has no time left.
    """
    before = current_scope.set(current_scope.get()._replace(limit=Limit(time.monotonic() + wait_s + _TOLD_S)))
    try:
        run(end_loan(store, publisher, version, wait_s, at_once=not wait_s))
    finally:
        current_scope.reset(before)
