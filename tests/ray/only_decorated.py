"""A class whose module uses no more of the package than the decorator."""

import os
from pathlib import Path

import raytorchrpc as rtr


class OnlyDecorated:
    @rtr.method
    def pid(self) -> int:
        return os.getpid()

    def die_once(self, mark: Path, target: str) -> int:
        """The process of the target; the first process of this actor dies of it."""
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)
        pid: int = rtr.rpc_sync(target, timeout=60).pid()
        return pid
