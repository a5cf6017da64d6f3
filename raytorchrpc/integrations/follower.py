"""Keeps the model of an engine at the versions of a store, whatever restarts: all adapters bring weights by this."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress, become_member, follow_group
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _TwoLives(rtr.RayTorchRpcError):
    """The home was restarted between the pulls of two processes of an engine."""


#: An update that fails with one of these is repeated until its deadline.
_LOST = rtr.PeerLost, rtr.RpcTimeout, _TwoLives
#: The pause before an update is repeated once more, and the longest (seconds).
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
#: For members to say whether they have the store: one of them may be suspended (seconds).
_FIND_S = 3.0


def may_be_torn(error: Exception, progress: Progress) -> bool:
    """Whether a model may have tensors of two versions after this error. What a pull refuses, it has not written."""
    return progress.has_written or not isinstance(error, (rtr.ConfigurationError, rtr.NotFound, rtr.Empty))


def alone(own: Any) -> list[Any]:
    """``gather`` of an engine that runs in one process."""
    return [own]


class Follower:
    """The model of one process of an engine, and the store whose versions it takes, through restarts of both.

    It finds the store by its name. A version of the home's next life is never taken for the one that had its number
    before. An update that fails midway is repeated, with the newest version, until its deadline. If none succeeds, the
    model has tensors of two versions: ``ensure`` brings the newest before it is used, or raises.

    All processes of an engine make the same calls, and have the same outcome. Not thread-safe.
    """

    def __init__(
        self,
        engine: str,
        store: str,
        write: Callable[[rtr.WeightStore, int, Progress], None],
        *,
        group: str | None = None,
        timeout: float = 60.0,
        gather: Callable[[Any], list[Any]] = alone,
    ) -> None:
        """Describe it; blocks for nothing.

        Args:
            engine: what errors call it.
            store: the name of the ``WeightStore``, in whichever member it is.
            write: (store, version, progress): brings a version into this process's part of the model. Raises
                ConfigurationError, NotFound or Empty with ``progress.has_written`` unset if nothing was written.
            group: see ``become_member``.
            timeout: seconds for an update that does not say otherwise.
            gather: (value) -> the values of all processes of the engine, in the same order in each of them.
        """
        self._engine, self._name, self._write, self._group = engine, store, write, group
        self._timeout, self._gather = timeout, gather
        self._store: rtr.WeightStore | None = None
        self._may_have_moved = False
        self._seconds_left = 0.0
        """The least that a process had at the last step that all of them made."""
        self.is_torn = False
        """Whether the model may have tensors of two versions."""
        self.held: tuple[int, int] | None = None
        """The instance of the store, and the version, that the model has; 0: as it was loaded. None: not known."""

    def store(self, progress: Progress) -> rtr.WeightStore:
        """The store as it is now, whichever member of which group has it. Blocks.

        Raises NotFound if no member has it, as while its home is restarted.
        """
        become_member(self._group, progress.left())
        if self._store is None or self._may_have_moved:
            follow_group(self._group, progress.left())
            there = rtr.WeightStore.find(self._name, timeout=min(progress.left(), _FIND_S))
            if self._store is None or there.instance != self._store.instance:
                self._store = there
            self._may_have_moved = False
        return self._store

    def update(self, version: int | None = None, timeout: float | None = None, *, least: int = 1) -> int:
        """Bring a version into the model; returns its number. Blocks.

        A model that has tensors of two versions, or gets them in this call, takes the newest version instead.

        Args:
            version: None: the newest.
            timeout: seconds.
            least: which version to wait for before the newest is brought. 0: if there is none, it stays as it is.

        Raises:
            ConfigurationError, NotFound, Empty, PeerLost, RpcTimeout: the model is as it was.
            RayTorchRpcError: the model may have tensors of two versions.
        """
        progress, gone = Progress(self._timeout if timeout is None else timeout), (0, 0)
        failure: Exception | None = None
        for attempt in itertools.count():
            instance = chosen = 0
            try:
                wanted = None if self.is_torn else version
                needed = max(least, int(self.is_torn))  # a loan whose end has broken this off leaves no version
                choices = self.together(partial(self._choose, wanted, needed, gone, progress), progress)
                instance, chosen = choices[0]
                held = self.together(partial(self._bring, chosen, progress), progress)
                if len(set(held)) > 1:
                    raise _TwoLives(f"the home of store {self._name!r} was restarted during the update")
                self.held, self.is_torn = held[0], False
                return chosen
            except Exception as error:
                self._may_have_moved = True
                if not isinstance(error, rtr.RpcTimeout) or failure is None:  # else the deadline says less
                    failure = error
                # The store may be about to be made, or the version that is asked for was looked for in an earlier one.
                may_come = not chosen or wanted is None or self.is_torn or not attempt
                if not self._seconds_left or not isinstance(failure, (*_LOST, *([rtr.NotFound] if may_come else []))):
                    if not self.is_torn:
                        raise failure from None
                    brought = f"version {chosen}" if chosen else "the newest version"
                    raise rtr.RayTorchRpcError(
                        f"the update of {self._engine}'s model to {brought} failed midway, so it may have tensors of "
                        f"two versions: update it again before it generates ({type(failure).__name__}: {failure})"
                    ) from failure
                logger.warning("%s repeats its update from store %r: %s", self._engine, self._name, failure)
                if chosen and isinstance(error, rtr.NotFound):
                    gone = instance, chosen
            threads.pause(min(progress.left(), _PAUSE_S * attempt, _LONGEST_PAUSE_S))
        raise AssertionError

    def ensure(self) -> None:
        """Bring the newest version, unless the model has one. To be called before the model is used; see ``update``.

        A model stays as it was loaded as long as the store has no version.
        """
        if self.held is None:
            self.update(least=int(self.is_torn))

    def _choose(self, wanted: int | None, least: int, gone: tuple[int, int], progress: Progress) -> tuple[int, int]:
        """The instance of the store, and the version ``wanted``, or the newest, once there is one from ``least`` on and
        newer than ``gone``.
        """
        store = self.store(progress)
        if wanted is None:
            wanted = store.wait(gone[1] + 1 if store.instance == gone[0] else least, progress.left())
        return store.instance or 0, wanted

    def _bring(self, version: int, progress: Progress) -> tuple[int, int]:
        store = self.store(progress)
        if not version:
            return 0, 0
        before = self.held, self.is_torn
        progress.held = self.held[1] if self.held is not None and self.held[0] == store.instance else None
        self.held, self.is_torn = None, True
        try:
            self._write(store, version, progress)
        except Exception as error:
            if not may_be_torn(error, progress):
                self.held, self.is_torn = before
            raise
        return store.instance or 0, version

    def together(self, step: Callable[[], T], progress: Progress) -> list[T]:
        """Make a step in all processes of the engine; returns its results, or raises the same in all of them."""
        result, failure = None, None
        try:
            result = step()
        except rtr.RayTorchRpcError as error:
            failure = error
        except Exception as error:  # which may not travel
            failure = rtr.RayTorchRpcError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        outcomes = self._gather((result, failure, self.is_torn, progress.left()))
        self._seconds_left = min(seconds for *_, seconds in outcomes)
        failures = [error for _, error, _, _ in outcomes if error is not None]
        if not failures:
            return [result for result, *_ in outcomes]
        if any(is_torn for _, _, is_torn, _ in outcomes):
            self.held, self.is_torn = None, True
        raise min(failures, key=lambda error: isinstance(error, (*_LOST, rtr.NotFound)))
