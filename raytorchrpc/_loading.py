"""Signs of life of an actor's process while it imports this package and torch, for the groups that wait for it.

Importing torch takes seconds, and minutes where many processes share few cores. The package imports this module first,
and calls ``finish`` last. A process that loads for more than a second posts how many modules it has loaded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

from raytorchrpc._compat import ray_internals
from raytorchrpc.process import threads

_KEYS = "loading/"
#: How often a process posts (seconds).
_POST_S = 1.0

_done = threading.Event()


def _post(actor_id: str) -> None:
    posted = False
    try:
        while not _done.wait(_POST_S) and "raytorchrpc" in sys.modules:  # it is taken out if its import fails
            ray_internals.store(_KEYS + actor_id, str(len(sys.modules)).encode())
            posted = True
    finally:
        if posted:
            ray_internals.store(_KEYS + actor_id, None)


def begin() -> None:
    """Start to post, if this process holds an actor or creates one, and torch is not loaded yet."""
    if "torch" in sys.modules or "ray" not in sys.modules:
        return
    import ray

    actor_id = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    if actor_id is not None:
        threads.start(_post, actor_id, name="raytorchrpc-loading")


def finish() -> None:
    _done.set()


def loaded_modules(actor_ids: Iterable[str]) -> dict[str, int]:
    """How many modules the processes of these actors have loaded, of those that load now."""
    loading = {key.removeprefix(_KEYS) for key in ray_internals.stored_keys(_KEYS)}
    values = {actor_id: ray_internals.stored(_KEYS + actor_id) for actor_id in loading.intersection(actor_ids)}
    return {actor_id: int(value) for actor_id, value in values.items() if value is not None}


begin()
