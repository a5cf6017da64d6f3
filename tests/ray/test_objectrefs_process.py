"""ObjectRefs by the group's lanes where Ray itself is set up otherwise, in a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.releases import needs

pytestmark = needs("objectrefs")
ROOT = Path(__file__).parents[2]

PATIENCE = """
import os, signal
import ray
import raytorchrpc as rtr
from tests.polling import suspend
from tests.ray.ref_actors import RefPeer

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
a, b, c = (RefPeer.options(num_cpus=0).remote() for _ in range(3))
with rtr.init_group({"a": a, "b": b, "c": c}):
    pids = ray.get([actor.pid.remote() for actor in (a, b)])
    refs = [a.ones.remote(100_000) for _ in range(3)]
    rtr.rdt.wait(*refs)
    suspend(pids[0])
    failed = b.total.remote(refs[0])
    for get in (lambda: ray.get(failed), lambda: ray.get(refs[1])):
        try:
            get()
        except rtr.TransferFailed as error:
            print(type(error).__name__, "did not arrive from member 'a' of group 'default': " in str(error))
    print(ray.get(b.total.remote(c.ones.remote(100_000))))
    os.kill(pids[0], signal.SIGCONT)
    print(ray.get(b.total.remote(refs[2])), ray.get(b.total.remote(a.ones.remote(5))))
    print([actor_pid == ray.get(actor.pid.remote()) for actor, actor_pid in zip((a, b), pids)])
ray.shutdown()
"""


@pytest.mark.slow
def test_a_hung_transfer_ends_before_ray_ends_it_and_no_actor_dies() -> None:
    """In a Ray of its own, whose patience is six seconds."""
    ran = subprocess.run(
        [sys.executable, "-c", PATIENCE],
        env={
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "RAY_rdt_fetch_fail_timeout_milliseconds": "6000",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "RayTaskError(TransferFailed) True",
        "TransferFailed True",
        "100000.0",
        "100000.0 5.0",
        "[True, True]",
    ]
