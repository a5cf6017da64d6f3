"""The template of a raylet's workers: a process that has imported torch, Ray and raytorchrpc, and forks.

The imports of a worker cost about two seconds of CPU time, and the tests start hundreds of workers (see
``warm_workers``). A fork imports its actor's class itself. It is without raytorchrpc until it imports it, and has a
raytorchrpc that nothing has used.
"""

from __future__ import annotations

import gc
import marshal
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

_STREAMS = (0, 1, 2)
#: What workers import, except raytorchrpc: see ``_Hidden``.
_IMPORTED = (
    "pydantic.dataclasses",
    "pydantic.plugin._loader",
    "pydantic.type_adapter",
    "pydantic.v1.fields",
    "pynng",
    "pytest",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray._private.arrow_serialization",
    "ray._private.async_compat",
    "ray._private.node",
    "ray._private.runtime_env.setup_hook",
    "ray.actor",
    "torch.distributed.rpc",
)
#: Ray imports it in each worker, where it is installed.
_ARROW = "pyarrow.json"


class _Hidden(MetaPathFinder, Loader):
    """Takes a package that is loaded out of ``sys.modules``; its first import brings it back as it is."""

    def __init__(self, package: str) -> None:
        self._package = package
        names = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
        self._modules = {name: sys.modules.pop(name) for name in names}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._package:
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(name, path)
        if found is None or found.origin != self._modules[name].__file__:
            return None  # the actor's program has another one
        return spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        sys.modules.update(self._modules)
        self._spec = self._modules[self._package].__spec__
        return self._modules[self._package]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        module._has_begun = False
        module._begin()  # as the package does when it is imported


def ray_script() -> str:
    """The path of Ray's worker script."""
    ray = find_spec("ray")
    assert ray is not None and ray.origin is not None
    return str(Path(ray.origin).parent / "_private" / "workers" / "default_worker.py")


def _main() -> None:
    script = ray_script()
    _serve(socket.socket(fileno=int(sys.argv[1])))  # returns in the forks
    sys.argv[0] = script
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def _serve(listener: socket.socket) -> None:
    """Fork for every request until the raylet exits; return in each fork, set up as the request says."""
    raylet_ended = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    # Threads do not survive a fork.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    more = filter(None, os.environ.get("WARM_WORKERS_IMPORT", "").split(","))
    for module in (*_IMPORTED, *more):
        with suppress(ModuleNotFoundError):  # another Ray has it elsewhere
            import_module(module)
    if find_spec("pyarrow") is not None:
        import_module(_ARROW)
    sys.path[0] = str(Path(__file__).parents[2])
    import_module("raytorchrpc")._begin()
    import_module("raytorchrpc.group.join").preload()
    _Hidden("raytorchrpc")
    gc.freeze()  # so that no collection in a fork touches, and thereby copies, the pages of these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while raylet_ended not in select.select([listener, raylet_ended], [], [])[0]:
        sock, _ = listener.accept()
        length, streams, _, _ = socket.recv_fds(sock, 4, len(_STREAMS))
        with sock.makefile("rb") as stream:
            arguments, environment, directory, leads_group = marshal.loads(stream.read(int.from_bytes(length, "big")))
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if leads_group:
                os.setpgid(0, 0)
            for number, fd in zip(_STREAMS, streams, strict=True):
                os.dup2(fd, number)
            _close(listener, sock, raylet_ended, *streams)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(directory)
            sys.argv[1:] = arguments
            return
        _close(sock, *streams)
    os._exit(0)


def _close(*open_ones: socket.socket | int) -> None:
    for one in open_ones:
        if isinstance(one, int):
            os.close(one)
        else:
            one.close()


if __name__ == "__main__":
    _main()
