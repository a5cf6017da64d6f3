"""Ray Direct Transport: the tensors of Ray's own ObjectRefs travel over a group's lanes.

``b.consume.remote(a.produce.remote())`` is written as before. If ``produce`` is decorated with
``@raytorchrpc.method(objectref=True)``, or with ``@ray.method(tensor_transport="TORCHRPC")`` after ``enable()``, its
tensors stay in ``a`` until they are fetched, and then go straight to the receiver: over the group's lanes to another
member, and over a separate connection to any other process of the job (a driver, a task, an actor in no group).
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import ray

from raytorchrpc._compat import ray_internals, requirements
from raytorchrpc.calls.options import check_longest_wait
from raytorchrpc.calls.scope import refuse_on_loop
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.process import threads
from raytorchrpc.rdt.transfer import TRANSPORT, held

__all__ = ["TRANSPORT", "enable", "enable_where_possible", "get", "held", "wait"]

logger = logging.getLogger(__name__)

#: The longest delay between an object's creation and its owner learning its tensor metadata (seconds). The metadata of
#: a failed method never arrives.
_METADATA_S = 1.0


def enable() -> None:
    """Register the transport with Ray in this process, and in the actors that it creates from now on.

    Call it before you decorate an actor's methods with ``@ray.method(tensor_transport="TORCHRPC")``.
    ``@raytorchrpc.method(objectref=True)``, joining a group, and receiving such an ObjectRef call it themselves.
    Idempotent; does not need a running Ray. Raises ConfigurationError if Ray is too old, and over Ray Client.
    """
    _check_ray()
    from raytorchrpc.rdt import transport

    transport.register()


def enable_where_possible() -> None:
    """As ``enable``, but only log if this Ray lacks the interface, or has another one."""
    try:
        enable()
    except Exception as error:  # the interface is an alpha: any release of Ray may change it
        logger.info("ObjectRefs do not use the group's lanes with this release of Ray: %r", error)


def load_where_possible() -> None:
    """Import what ``enable_where_possible`` needs."""
    with contextlib.suppress(Exception):  # logged when it is enabled
        import raytorchrpc.rdt.transport  # noqa: F401


def _check_ray() -> None:
    requirements.require("objectrefs", ray.__version__)
    if ray_internals.uses_ray_client():
        raise ConfigurationError(
            "objectref=True, raytorchrpc.rdt: Ray Client (ray://) has no tensor transports; run the program in the "
            "cluster, as a job (`ray job submit`), or define and use such actors in a Ray task or actor"
        )


async def get(refs: Any, timeout: float | None = None) -> Any:
    """Get objects without blocking the event loop: ``await raytorchrpc.rdt.get(ref)`` does what ``ray.get(ref)`` does.

    For methods of async actors. Ray's own ``await ref`` and ``ref.future()`` do not support tensor transports: they
    fail, or never return and hold up all other futures of Ray in this process for the transfer timeout.
    """
    check_longest_wait(timeout)
    return await threads.in_thread(ray.get, refs, timeout=timeout)


def wait(*refs: Any, timeout: float | None = None) -> None:
    """Block until these objects exist and this process, which owns them, has learned where their tensors are.

    Ray requires that before an ObjectRef travels inside another argument (``b.consume.remote([ref])``); ``ray.wait``
    may return a moment too early. An object whose method failed exists, too. Raises TimeoutError, and
    ConfigurationError if Ray is too old.
    """
    _check_ray()
    check_longest_wait(timeout)
    if timeout != 0:
        refuse_on_loop("raytorchrpc.rdt.wait", "`await asyncio.to_thread(raytorchrpc.rdt.wait, *refs)`")
    until = None if timeout is None else time.monotonic() + timeout
    done, missing = ray.wait(list(refs), num_returns=len(refs), timeout=timeout, fetch_local=False)
    for ref in done:
        seconds = _METADATA_S if until is None else max(0.0, min(_METADATA_S, until - time.monotonic()))
        ray_internals.wait_for_transport_metadata(ref, seconds)
    if missing:
        raise TimeoutError(f"{len(missing)} of {len(refs)} objects do not exist after {timeout:g} s")
