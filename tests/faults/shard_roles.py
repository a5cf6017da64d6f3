"""Publishers of shards, and readers of them, that work on threads of their own until told to end, and note all they do.

Every element of a version carries its number, so a torn version is visible. Each reader has three threads: one pulls
what is there, again and again; one waits for a newer version before; one pulls what every publisher has.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import raytorchrpc as rtr
from raytorchrpc.calls.member import process_member
from raytorchrpc.errors import Empty, NotAMember, NotFound, PeerLost, RpcTimeout
from raytorchrpc.patterns.weights.publishers import SHARDS

PUBLISHERS = ("p0", "p1", "p2")
READERS = ("r0", "r1")
#: The rows and columns of the tensor that changes with each version, and of the one that changes with every fourth.
SHAPE = (384, 512)
SLOW = 4
#: The shape of the one that every publisher has whole.
SMALL = (64, 512)
#: Of every operation (seconds).
TIMEOUT_S = 3.0
#: An operation answers at most this much after its timeout, on a busy machine (seconds).
LATE_S = 4.0
EXPECTED = (NotFound, PeerLost, RpcTimeout, Empty, NotAMember)
#: The publishers' tensors: those in shards, and one that each has whole.
SHARDED, COPIED = ("fast", "slow"), "copy"
#: What a reader's thread does: pull the last whole version, wait for a newer one before, pull what all publishers have.
KINDS = LAST, NEWER, COPIES = "last", "newer", "copies"
#: The pause between two operations of a thread (seconds).
PAUSE_S = 0.02


def slow_of(version: int) -> int:
    return version - version % SLOW


class Role:
    """An actor. Ray restarts it, and it goes on by itself."""

    def __init__(self, name: str, directory: str) -> None:
        self._name, self._directory = name, Path(directory)
        self._file = open(self._directory / f"{name}-{os.getpid()}.records", "a", buffering=1)  # noqa: SIM115
        self._lock = threading.Lock()
        self._note(time.monotonic(), "started")
        if name in PUBLISHERS:
            threading.Thread(target=self._publish, daemon=True).start()
        else:
            store = self._store()
            for turn, kind in enumerate((LAST, NEWER)):  # both by one handle
                threading.Thread(target=self._read, args=(turn, kind, store), daemon=True).start()
            threading.Thread(target=self._read, args=(0, COPIES, self._store()), daemon=True).start()
        threading.Thread(target=self._await_membership, daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def _store(self) -> rtr.WeightStore:
        return rtr.WeightStore("shards", publishers=PUBLISHERS, keep=2, track=True)

    def _goes_on(self) -> bool:
        return not (self._directory / "end").exists()

    def _await_membership(self) -> None:
        while self._goes_on():
            with suppress(NotAMember, RpcTimeout):
                process_member()
                self._note(time.monotonic(), "member")
                return

    def _note(self, began: float, verdict: str, **more: Any) -> None:
        with self._lock:
            record = {"name": self._name, "began": began, "ended": time.monotonic(), "verdict": verdict, **more}
            self._file.write(json.dumps(record) + "\n")

    def _try(self, kind: str, operation: Callable[[], dict[str, Any]], known: Callable[[], dict[str, Any]]) -> str:
        """The name of the error, if it is one that faults explain; any other is noted as wrong.

        ``known``: what to note of an operation that failed.
        """
        began = time.monotonic()
        try:
            self._note(began, "ok", kind=kind, **operation())
            return "ok"
        except EXPECTED as error:
            self._note(began, type(error).__name__, kind=kind, **known(), why=str(error)[:200])
            return type(error).__name__
        except BaseException as error:
            self._note(began, "wrong", what=repr(error))
            raise
        finally:
            time.sleep(PAUSE_S)

    # --- publishers ----------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        store, number, last = self._store(), PUBLISHERS.index(self._name), 0
        rows = SHAPE[0] // len(PUBLISHERS)

        def publish() -> dict[str, Any]:
            nonlocal last
            version = max(last, store.version()) + 1
            for name, value in (("fast", version), ("slow", slow_of(version)), (COPIED, version)):
                getattr(own[name], "tensor", own[name]).fill_(value)
            last = version
            store.publish(own, version, timeout=TIMEOUT_S)
            return {"memory": _memory(), "kept": _kept(), **known()}

        def known() -> dict[str, Any]:
            return {"version": last, "store": store._instance_id}

        own: dict[str, Any] = {
            name: rtr.Shard(torch.empty(rows, SHAPE[1]), SHAPE, (number * rows, 0)) for name in SHARDED
        }
        own[COPIED] = torch.empty(SMALL)
        while self._goes_on():
            if self._try("publish", publish, known) == "NotFound":
                store, last = self._store(), 0

    # --- readers -------------------------------------------------------------------------------------------------

    def _read(self, turn: int, kind: str, store: rtr.WeightStore) -> None:
        model, since = self._model(turn), None
        wanted = {COPIED: model[COPIED]} if kind == COPIES else model

        def pull() -> dict[str, Any]:
            nonlocal since
            had = since or 0
            if kind == NEWER:
                store.wait(had + 1, timeout=TIMEOUT_S)
            before = {name: _tensor(held).clone() for name, held in wanted.items()}
            try:
                only = COPIED if kind == COPIES else None
                since = store.pull(model, since=since, only=only, timeout=TIMEOUT_S)
            except (NotFound, Empty):
                if not all(torch.equal(before[name], _tensor(held)) for name, held in wanted.items()):
                    raise AssertionError("something was written by a pull that says that nothing was") from None
                raise
            for name, held in wanted.items():
                found, value = _tensor(held).unique().tolist(), slow_of(since) if name == "slow" else since
                if found != [value]:
                    raise AssertionError(f"version {since}: {name} has {found[:5]}, not {value}")
            return {"version": since, "store": store._instance_id, "is_new": since > had, "memory": _memory()}

        while self._goes_on():
            if self._try(kind, pull, dict) == "NotFound":
                store, since = self._store(), None

    def _model(self, turn: int) -> dict[str, Any]:
        columns = SHAPE[1] // 2
        begin = (0, turn * columns) if self._name == READERS[0] else (turn * SHAPE[0] // 2, 0)
        shape = (SHAPE[0], columns) if self._name == READERS[0] else (SHAPE[0] // 2, SHAPE[1])
        model: dict[str, Any] = {name: rtr.Shard(torch.zeros(shape), SHAPE, begin) for name in SHARDED}
        model[COPIED] = torch.zeros(SMALL)
        return model


def _tensor(held: Any) -> torch.Tensor:
    return held.tensor if isinstance(held, rtr.Shard) else held


def _memory() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _kept() -> int:
    """How many versions this process has of all stores, beside those that are being read."""
    services = process_member().services
    return sum(len(services.get(SHARDS, name)._versions) for name in services.names(SHARDS))
