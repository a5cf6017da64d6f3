"""Ray Direct Transport: the tensors of Ray's own ObjectRefs take a group's lanes.

``b.consume.remote(a.produce.remote())`` stays as it is. If ``produce`` is decorated with
``@raytorchrpc.method(objectref=True)``, or with ``@ray.method(tensor_transport="TORCHRPC")`` after ``enable()``, its
tensors stay in ``a`` until somebody gets them, and then go straight there: between members of a group by its lanes,
and to any other process of the job (a driver, a task, an actor in no group) by a connection of their own.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from raytorchrpc._compat import ray_internals
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: The name to write in ``@ray.method(tensor_transport=...)`` and ``ray.put(..., _tensor_transport=...)``.
TRANSPORT = "TORCHRPC"

#: Ray tells an owner where tensors are at most so much later (seconds) than that the object exists; where the method
#: failed, never.
_SETTLING_S = 1.0


def enable() -> None:
    """Make the transport known to Ray in this process, and in the actors that are made here from now on.

    To be called before the class of an actor is decorated with ``@ray.method(tensor_transport="TORCHRPC")``.
    ``@raytorchrpc.method(objectref=True)``, joining a group, and receiving such an ObjectRef do it by themselves.
    Idempotent; needs no running Ray.
    """
    from raytorchrpc.rdt import transport

    transport.register()


def enable_where_possible() -> None:
    """As ``enable``, but a Ray without this interface is only noted in the log."""
    try:
        enable()
    except Exception as error:  # the interface is an alpha of Ray's: its next release may have moved anything
        logger.info("ObjectRefs do not take the group's lanes with this release of Ray: %r", error)


async def get(refs: Any, timeout: float | None = None) -> Any:
    """``await raytorchrpc.rdt.get(ref)`` is ``ray.get(ref)`` for the methods of an async actor: its loop goes on.

    Ray's own ``await ref`` does not know tensor transports: for an ObjectRef of any, it fails or never returns.
    """
    import ray

    return await threads.in_thread(ray.get, refs, timeout=timeout)


def wait(*refs: Any, timeout: float | None = None) -> None:
    """Block until these objects exist, and this process, which owns them, knows where their tensors are.

    Ray asks for that before an ObjectRef goes inside another argument (``b.consume.remote([ref])``); ``ray.wait``
    may return a moment too early. Raises TimeoutError. Objects whose method failed exist too.
    """
    import ray

    until = None if timeout is None else time.monotonic() + timeout
    done, missing = ray.wait(list(refs), num_returns=len(refs), timeout=timeout, fetch_local=False)
    for ref in done:
        left = _SETTLING_S if until is None else max(0.0, min(_SETTLING_S, until - time.monotonic()))
        ray_internals.wait_for_transport_metadata(ref, left)
    if missing:
        raise TimeoutError(f"{len(missing)} of {len(refs)} objects do not exist after {timeout:g} s")


def held() -> int:
    """How many objects this process keeps the tensors of: those whose ObjectRefs are alive, and pulls under way."""
    from raytorchrpc.rdt import source

    return source.held()
