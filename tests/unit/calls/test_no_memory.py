"""A process without memory to pickle or unpickle something: the caller gets a MemoryError that names the process."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest

import raytorchrpc as rtr
from tests.shortage import NO_MEMORY
from tests.unit.callees import exposed
from tests.unit.members import Members

LONG = 20.0
ERRORS = [MemoryError(), RuntimeError(NO_MEMORY), OSError(errno.ENOMEM, "no memory")]


class Large:
    """Cannot be pickled, or unpickled."""

    def __init__(self, when: str, error: Exception) -> None:
        self.when, self.error = when, error

    def __reduce__(self) -> Any:
        if self.when == "pickled":
            raise self.error
        return _no_room, (self.error,)


def _no_room(error: Exception) -> None:
    raise error


ran: list[str] = []


@pytest.fixture
def members() -> Iterator[Members]:
    ran.clear()
    methods = {"take": exposed(lambda _, it: ran.append("take")), "give": exposed(lambda _, args: Large(*args))}
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), methods) as made, made.acting("a"):
        yield made


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize(
    ("method", "when", "who"),
    [
        ("take", "pickled", "this process has no memory for the arguments of home.take"),
        ("take", "unpickled", "home has no memory for an argument of home.take, which did not run"),
        ("give", "pickled", "home has no memory for the result of home.give"),
        ("give", "unpickled", "this process has no memory for the result of home.give"),
    ],
)
def test_the_error_names_the_process(members: Members, method: str, when: str, who: str, error: Exception) -> None:
    argument: Any = (when, error) if method == "give" else Large(when, error)
    with pytest.raises(MemoryError, match=who):
        getattr(rtr.rpc_sync("home"), method)(argument)
    assert not ran


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_item_that_there_is_no_memory_for_goes_back(members: Members, error: Exception) -> None:
    queue = rtr.Queue("q", home="home")
    with pytest.raises(MemoryError, match="this process has no memory for an item for queue 'q'"):
        queue.put(Large("pickled", error))
    queue.put_many([1, Large("unpickled", error), 2])
    with pytest.raises(MemoryError, match="this process has no memory for an item"):
        queue.get_many(9)
    assert queue.stats()["items"] == 3 and queue.get() == 1
