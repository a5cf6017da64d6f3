"""Publishers of shards, and readers of them, that work on threads of their own until told to end, and note all they do.

Every element of a version carries its number, so a torn version is visible.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import raytorchrpc as rtr
from raytorchrpc.calls.current import process_member
from raytorchrpc.errors import Empty, NotAMember, NotFound, PeerLost, RpcTimeout
from raytorchrpc.patterns.weights.publishers import SHARDS

PUBLISHERS = ("p0", "p1", "p2")
READERS = ("r0", "r1")
#: The rows and columns of the tensor that changes with each version, and of the one that changes with every fourth.
SHAPE = (384, 512)
SLOW = 4
#: Of every operation (seconds).
TIMEOUT_S = 3.0
#: An operation answers at most this much after its timeout, on a busy machine (seconds).
LATE_S = 4.0
EXPECTED = (NotFound, PeerLost, RpcTimeout, Empty, NotAMember)


def slow_of(version: int) -> int:
    return version - version % SLOW


class Role:
    """An actor. Ray restarts it, and it goes on by itself."""

    def __init__(self, name: str, directory: str) -> None:
        self._name, self._directory = name, Path(directory)
        self._file = open(self._directory / f"{name}-{os.getpid()}.records", "a", buffering=1)  # noqa: SIM115
        self._lock = threading.Lock()
        if name in PUBLISHERS:
            threading.Thread(target=self._publish, daemon=True).start()
        else:
            store = self._store()
            for turn in (0, 1):  # both by one handle
                threading.Thread(target=self._read, args=(turn, store), daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def _store(self) -> rtr.WeightStore:
        return rtr.WeightStore("shards", publishers=PUBLISHERS, keep=2, track=True)

    def _goes_on(self) -> bool:
        return not (self._directory / "end").exists()

    def _note(self, began: float, verdict: str, **more: Any) -> None:
        with self._lock:
            record = {"name": self._name, "began": began, "ended": time.monotonic(), "verdict": verdict, **more}
            self._file.write(json.dumps(record) + "\n")

    def _try(self, operation: Callable[[], dict[str, Any]]) -> str:
        """The name of the error, if it is one that faults explain; any other is noted as wrong."""
        began = time.monotonic()
        try:
            self._note(began, "ok", **operation())
            return "ok"
        except EXPECTED as error:
            self._note(began, type(error).__name__)
            time.sleep(0.05)
            return type(error).__name__
        except BaseException as error:
            self._note(began, "wrong", what=repr(error))
            raise

    # --- publishers ----------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        store, number, last = self._store(), PUBLISHERS.index(self._name), 0
        rows = SHAPE[0] // len(PUBLISHERS)

        def publish() -> dict[str, Any]:
            nonlocal last
            version = max(last, store.version()) + 1
            for name, value in (("fast", version), ("slow", slow_of(version))):
                own[name].tensor.fill_(value)
            last = version
            store.publish(own, version, timeout=TIMEOUT_S)
            return {"version": version, "memory": _memory(), "kept": _kept()}

        own = {name: rtr.Shard(torch.empty(rows, SHAPE[1]), SHAPE, (number * rows, 0)) for name in ("fast", "slow")}
        while self._goes_on():
            if self._try(publish) == "NotFound":
                store, last = self._store(), 0
            time.sleep(0.02)

    # --- readers -------------------------------------------------------------------------------------------------

    def _read(self, turn: int, store: rtr.WeightStore) -> None:
        columns = SHAPE[1] // 2
        begin = (0, turn * columns) if self._name == READERS[0] else (turn * SHAPE[0] // 2, 0)
        shape = (SHAPE[0], columns) if self._name == READERS[0] else (SHAPE[0] // 2, SHAPE[1])
        model = {name: rtr.Shard(torch.zeros(shape), SHAPE, begin) for name in ("fast", "slow")}
        since: int | None = None

        def pull() -> dict[str, Any]:
            nonlocal since
            store.wait((since or 0) + 1, timeout=TIMEOUT_S)
            before = {name: shard.tensor.clone() for name, shard in model.items()}
            try:
                since = store.pull(model, since=since, timeout=TIMEOUT_S)
            except (NotFound, Empty):
                if not all(torch.equal(before[name], shard.tensor) for name, shard in model.items()):
                    raise AssertionError("something was written by a pull that says that nothing was") from None
                raise
            for name, value in (("fast", since), ("slow", slow_of(since))):
                found = model[name].tensor.unique().tolist()
                if found != [value]:
                    raise AssertionError(f"version {since}: {name} has {found[:5]}, not {value}")
            return {"version": since, "memory": _memory()}

        while self._goes_on():
            if self._try(pull) == "NotFound":
                store, since = self._store(), None


def _memory() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _kept() -> int:
    """How many versions this process has of all stores, beside those that are being read."""
    services = process_member().services
    return sum(len(services.get(SHARDS, name)._versions) for name in services.names(SHARDS))
