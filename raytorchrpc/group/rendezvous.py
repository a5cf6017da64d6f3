"""The key-value store of a process group: how its members exchange addresses and ids (a ``torch.distributed.Store``).

One member, the home (torch's rank 0), holds the keys. The others send it requests over the group's own connections, so
only members can read or change a key, and nothing listens for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from raytorchrpc.errors import ProcessGroupLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.waits import ReplyLock, Waits
from raytorchrpc.process.workers import Deadlines

#: The shortest time given to a request that waits for no key (seconds): a store's timeout may be a poll's.
_REQUEST_S = 5.0
#: Most published values in one reply: a member of a large group publishes several KB.
_AT_ONCE = 64


class _Wait(NamedTuple):
    keys: Sequence[str]
    outcome: Callable[[], Any]
    """Makes the reply once they are set."""


class KeyTable:
    """The keys of one process group, in its home. Thread-safe, never blocks.

    After ``close`` every operation, and every pending wait, raises ProcessGroupLost with the cause.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._lock = ReplyLock()
        self._values: Any = HashStore()
        self._published: dict[str, list[str]] = {}
        """Keys whose value never changes, in the order in which they came, by what they begin with; see ``_family``."""
        self._waits: Waits[_Wait] = Waits(deadlines, self._lock)
        self._cause: str | None = None
        """Why it was closed."""

    def operate(self, seconds: float, operation: str, *args: Any) -> Any:
        """Run ``publish``, ``wait``, ``fetch``, ``give_up``, or what torch's own stores call so; see ``_PLAIN``.

        ``publish`` sets keys whose value never changes. ``fetch`` waits for a key, and also returns what was published
        beside it. It and ``wait`` may return a DeferredReply, which is settled after ``seconds`` at the latest. Raises
        ProcessGroupLost after ``close``, and ValueError.
        """
        if operation == "give_up":
            return self.close(*args)
        with self._lock:
            if self._cause is not None:
                raise _ended(self._cause)
            result = self._apply(seconds, operation, *args)
            if operation in _WRITES:
                self._waits.settle(lambda wait: self._values.check(wait.keys), value_of=lambda wait: wait.outcome())
        return result

    def close(self, cause: str) -> None:
        """Drop the keys and end all waits. Idempotent."""
        with self._lock:
            self._cause = self._cause or cause
            self._waits.settle(error=_ended(cause))
            self._values = HashStore()

    def _apply(self, seconds: float, *request: Any) -> Any:
        """Run an operation, under the lock."""
        values = self._values
        match request:
            case "publish", keys, published:
                for key in keys:
                    self._published.setdefault(_family(key), []).append(key)
                return values.multi_set(keys, published)
            case "wait", keys, read:
                return self._once(seconds, keys, lambda: values.multi_get(keys) if read else None)
            case "fetch", key, received:
                return self._once(seconds, [key], lambda: (values.get(key), self._beside(key, received)))
            case operation, *args if operation in _PLAIN:
                return getattr(values, operation)(*args)
        raise ValueError(f"a store has no operation {request[0]!r} of {len(request) - 1} arguments")

    def _once(self, seconds: float, keys: Sequence[str], outcome: Callable[[], Any]) -> Any:
        if self._values.check(keys):
            return outcome()

        def give_up() -> tuple[None, RpcTimeout]:
            missing = ", ".join(key for key in keys if not self._values.check([key]))
            return None, RpcTimeout(f"nobody has set {missing} within {seconds:.3g} s")

        return self._waits.add(_Wait(keys, outcome), time.monotonic() + seconds, give_up)

    def _beside(self, key: str, received: int) -> list[tuple[str, bytes]]:
        """What was published in the key's family, without so many that were received before."""
        more = self._published.get(_family(key), [])[received : received + _AT_ONCE]
        return [(each, self._values.get(each) if self._values.check([each]) else b"") for each in more]


def _ended(cause: str) -> ProcessGroupLost:
    return ProcessGroupLost(f"the process group has ended: {cause}")


def _family(key: str) -> str:
    """The keys of all ranks for one purpose differ in their last part."""
    return key.rpartition("/")[0]


_WRITES = frozenset({"multi_set", "publish", "append", "add", "compare_set"})
#: Done by torch's store for one process.
_PLAIN = _WRITES - {"publish"} | {"delete_key", "check", "num_keys"}


class MemberStore(Store):
    """A member's end of a process group's store. torch's C++ threads call it too: torch takes the interpreter lock.

    Raises torch's own errors: ``DistStoreError`` when time ran out, ``DistNetworkError`` when the home cannot be
    reached or the process group has ended. C++ finds the methods of this object only while it lives.
    """

    def __init__(
        self, send: Callable[[float, str, tuple[Any, ...]], Any], look_at: Callable[[bytes], bool] = lambda _: False
    ) -> None:
        """``send(seconds, operation, arguments)``: has the home run ``KeyTable.operate``; blocks for the result.
        ``look_at``: called with each value before others can read it, returns whether it will never change; what it
        raises keeps the value back.
        """
        super().__init__()
        self._send, self._look_at = send, look_at
        self.shortest_wait_s = 0.0
        """For keys. While a process group forms, gloo gives them no longer than a collective."""
        # Of n members, each waits for the n values that gloo publishes, then gets them, one by one. So each reply
        # brings all that were published by then: else the home would serve 2 n^2 requests.
        self._published: dict[str, bytes] = {}
        """Those that were not read yet."""
        self._received: Counter[str] = Counter()
        """How many, by family."""

    def _awaited(self, keys: Sequence[str], timeout: timedelta | None, read: bool) -> Any:
        seconds = max(self.shortest_wait_s, self._timeout_s() if timeout is None else timeout.total_seconds())
        if len(keys) > 1:
            return self._request("wait", list(keys), read, seconds=seconds)
        (key,) = keys
        if key not in self._published:
            family, received = _family(key), self._received[_family(key)]
            value, more = self._request("fetch", key, received, seconds=seconds)
            self._received[family] = max(received + len(more), self._received[family])  # other threads fetch too
            self._published.update(more)
            if read:
                self._published.pop(key, None)
            return [value]
        return [self._published.pop(key)] if read else None

    def _request(self, operation: str, *args: Any, seconds: float | None = None) -> Any:
        try:
            return self._send(max(_REQUEST_S, self._timeout_s()) if seconds is None else seconds, operation, args)
        except RpcTimeout as error:
            raise dist.DistStoreError(f"the process group's store: {error}") from error
        except RayTorchRpcError as error:
            raise dist.DistNetworkError(f"the process group's store: {error}") from error

    def _timeout_s(self) -> float:
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        return timeout.total_seconds()

    def give_up(self, cause: str) -> None:
        """End the process group for all its members, before it has formed."""
        self._request("give_up", cause)

    # --- what torch calls, as its own stores have it ----------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """A key's value. Blocks until it is set, at most the store's timeout."""
        value: bytes = self._awaited([key], None, True)[0]
        return value

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at 0; returns what it is then."""
        number: int = self._request("add", key, value)
        return number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or has none and none is expected; returns what it has then."""
        value: bytes = self._request("compare_set", key, _bytes(expected_value), _bytes(desired_value))
        return value

    def append(self, key: str, value: str | bytes) -> None:
        self._look_at(_bytes(value))
        self._request("append", key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self._awaited(keys, None, True)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        sent = [*map(_bytes, values)]
        lasting = [self._look_at(value) for value in sent]
        self._request("publish" if all(lasting) else "multi_set", list(keys), sent)

    def check(self, keys: Sequence[str]) -> bool:
        present: bool = self._request("check", list(keys))
        return present

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all these keys are set. Raises DistStoreError after ``timeout``; None: the store's."""
        self._awaited(keys, timeout, False)

    def delete_key(self, key: str) -> bool:
        was_set: bool = self._request("delete_key", key)
        return was_set

    def num_keys(self) -> int:
        number: int = self._request("num_keys")
        return number

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> MemberStore:
        return self  # all threads may use it

    # C++ looks for these two by their names there.
    deleteKey, getNumKeys = delete_key, num_keys


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
