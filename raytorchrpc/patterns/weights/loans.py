"""Loans: a program's own tensors are a version of a store, for as long as the program does not change them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.scope import allow_calls
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.patterns.handle import Handle, begin, run
from raytorchrpc.patterns.weights.published import PublishedWeights, name_of
from raytorchrpc.patterns.weights.publishers import Publisher, end_loan
from raytorchrpc.patterns.weights.snapshots import Snapshot

_log = logging.getLogger(__name__)


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
            _, wait_s = run(begin(0.0 if has_failed else timeout))
            if publisher is not None:
                run(end_loan(store, publisher, loan.version, wait_s, has_failed))
            until += wait_s
        except RayTorchRpcError as error:
            problem = error
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
