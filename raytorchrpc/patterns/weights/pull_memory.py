"""What pulls leave for later ones: the versions that a process has, and the plans for a store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from weakref import WeakKeyDictionary

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.patterns.weights.publishers import Committed
from raytorchrpc.patterns.weights.pull_plan import PullPlan, SourceCopies
from raytorchrpc.patterns.weights.slices import KnownLayout, Options
from raytorchrpc.process.locks import Lock

#: How many plans a memory has, of the last pulls of different models, or with different options.
_MOST_PLANS = 4
#: For how many stores a member remembers plans, the last ones.
_MOST_STORES = 32
#: How many pulled versions a process remembers, the last ones.
_REMEMBERED = 1024


class PulledVersions:
    """The versions that this process has pulled, by the instance of their store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._versions: OrderedDict[tuple[int, int, tuple[str, ...], Hashable], None] = OrderedDict()
        self.failures = 0  # how many pulls have failed and may have left a model with tensors of several versions

    def add(self, instance_id: int, version: int, options: Options, failures: int) -> None:
        """Note a pull. No effect if another has failed since there were ``failures``: it may have torn this model."""
        pulled = instance_id, version, options.only, options.form
        with self._lock:
            if failures != self.failures:
                return
            self._versions[pulled] = None
            self._versions.move_to_end(pulled)
            if len(self._versions) > _REMEMBERED:
                self._versions.popitem(last=False)

    def has(self, instance_id: int, version: int, options: Options) -> bool:
        """Whether a model of this process may have this version in this form, or these tensors of it."""
        with self._lock:
            return any((instance_id, version, only, options.form) in self._versions for only in ((), options.only))

    def forget(self, instance_id: int) -> None:
        """Forget a store's versions: a pull has failed and may have left a model with tensors of several versions."""
        with self._lock:
            self.failures += 1
            for pulled in [pulled for pulled in self._versions if pulled[0] == instance_id]:
                del self._versions[pulled]


class PullMemory:
    """What the pulls from one store leave for the next ones, by whichever copy of its handle."""

    def __init__(self) -> None:
        self.plans: tuple[PullPlan, ...] = ()  # the one of the last pull first
        self.committed: Committed | None = None  # what the last pull has found at the coordinator

    def expected(self, options: Options, distances: tuple[int, ...]) -> list[SourceCopies] | None:
        """See ``PullPlan.expected``; of the plan that was used last."""
        plans = (plan.expected(options, distances) for plan in self.plans)
        return next((sources for sources in plans if sources is not None), None)

    def layouts(self, count: int) -> list[KnownLayout | None]:
        """The layouts of so many sources, as a pull before found them."""
        known = (plan.layouts for plan in self.plans if len(plan.layouts) == count)
        return [*next(known, ())] or [None] * count

    def remember(self, plan: PullPlan) -> None:
        """Note that a plan was used; forgets the one that was used before all others."""
        self.plans = (plan, *[known for known in self.plans if known is not plan][: _MOST_PLANS - 1])


_memories: WeakKeyDictionary[LocalMember, OrderedDict[Hashable, PullMemory]] = WeakKeyDictionary()
_lock = Lock()


def memory_of(local: LocalMember, store: Hashable) -> PullMemory:
    """This member's memory for a store. A handle that comes as an argument of each call would forget its own."""
    with _lock:
        memories = _memories.setdefault(local, OrderedDict())
        memory = memories.setdefault(store, PullMemory())
        memories.move_to_end(store)
        if len(memories) > _MOST_STORES:
            memories.popitem(last=False)
        return memory
