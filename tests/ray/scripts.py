"""A driver as a program of its own: its end, and what it leaves behind."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from tests.programs import Program
from tests.ray.commands import ROOT, Command

PRELUDE = """
import atexit, faulthandler, gc, os, queue, signal, sys, threading, time
import ray
import raytorchrpc as rtr
from tests.ray.actors import Peer
from tests.ray.local_ray import lighten
from tests.ray.returning import Returning

faulthandler.dump_traceback_later(240, exit=True)

def start(address=os.environ["CLUSTER"] or "local", light=True):
    if light:
        lighten()
    ray.init(
        address=address, include_dashboard=False, log_to_driver=False, configure_logging=False,
        **(dict(num_cpus=4, object_store_memory=100 << 20) if address == "local" else {}),
    )

def actors(count=2, cls=Peer, **options):
    made = ray.remote(cls).options(num_cpus=0, **options)
    return [made.remote() for _ in range(count)]

def ours():
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("raytorchrpc")]
    return [name for name in threads if not name.startswith("raytorchrpc-copy")]

def settle(check, seconds=30):
    "Poll: the kernel and Ray offer nothing to wait on."
    until = time.monotonic() + seconds
    while not check() and time.monotonic() < until:
        time.sleep(0.05)
    return check()
"""


class Script(Command):
    """Python code that runs in a process of its own, after PRELUDE."""

    def __init__(self, code: str, address: str = "") -> None:
        super().__init__("script")
        self._code, self._address = PRELUDE + textwrap.dedent(code), address

    def start(self, *options: str, folder: Path = ROOT) -> Program:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "COMMAND_TEST_MARK": self.mark,
            "CLUSTER": self._address,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        return self.begin("-c", self._code, *options, folder=folder, env=env)
