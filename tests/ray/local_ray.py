"""A Ray for tests on this machine: its workers start warm, and it runs no service that no test asks.

``python -m tests.ray.local_ray -m MODULE OPTIONS``, or a file in place of ``-m MODULE``: runs a program that starts a
Ray of its own, which is such a one.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What torch imports with the first DTensor or optimizer: about a second of CPU time in each worker that makes one.
_DTENSORS = "torch._dynamo,torch.distributed.fsdp,torch.distributed.tensor"
#: For Ray's workers: each cluster of this machine gets one of so many parts.
_PORTS, _CLUSTERS = range(10_000, 30_000), 40


@functools.cache
def lighten() -> None:
    """Apply this to every cluster that this process starts from now on.

    Workers start as forks (see ``warm_workers``). Without a log monitor, an autoscaler and a dashboard, which cost more
    CPU time than Ray itself. Workers listen below the ports that the kernel gives out, as under ``ray start``: where a
    worker of one cluster has ended, nobody's torchrpc listens before Ray's other processes have noticed.
    """
    from ray._private import services
    from ray._private.parameter import RayParams

    original = RayParams.update_if_absent

    def update_if_absent(params: Any, **defaults: Any) -> None:
        if "worker_path" in defaults:
            defaults["worker_path"] = str(Path(__file__).with_name("warm_workers.py"))
            params.include_log_monitor, params.no_monitor = False, True
            params.min_worker_port = _PORTS.start + os.getpid() % _CLUSTERS * len(_PORTS) // _CLUSTERS
            params.max_worker_port = params.min_worker_port + len(_PORTS) // _CLUSTERS - 1
        original(params, **defaults)

    RayParams.update_if_absent = update_if_absent
    services.start_api_server = lambda *_, **__: ("", None)


@contextmanager
def local_ray() -> Iterator[None]:
    """Eight CPUs and two GPUs, which are numbers here: nothing checks that they exist."""
    import ray

    lighten()
    given = os.environ.setdefault("WARM_WORKERS_IMPORT", _DTENSORS)
    start = functools.partial(
        ray.init,
        address="local",  # whatever cluster this machine has already
        num_cpus=8,
        num_gpus=2,
        object_store_memory=200 * 1024**2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=False,
        # Ray kills workers when the machine runs short of memory, whoever uses it: here only the faults are to kill.
        _system_config={"memory_monitor_refresh_ms": 0},
    )
    try:
        start()
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        start()  # Ray gives its processes 30 s, and a busy machine may take longer
    if given == _DTENSORS:
        del os.environ["WARM_WORKERS_IMPORT"]  # not for the Ray of a program that a test starts
    try:
        yield
    finally:
        ray.shutdown()


def _main() -> None:
    lighten()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
