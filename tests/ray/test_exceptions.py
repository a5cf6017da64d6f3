"""What a caller gets where classes, or their pickling, stand in the way of what a method took, returned or raised."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests.ray.actors import Peer

Spawn = Callable[..., Any]

MODULE = "installed_at_the_callee"
SOURCE = """
class OwnError(Exception):
    pass

class Value:
    pass
"""


@pytest.fixture(scope="module")
def pair(spawn_for_module: Spawn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The second alone can import the module."""
    a, b = spawn_for_module(Peer), spawn_for_module(Peer)
    path: Path = tmp_path_factory.mktemp("at-the-callee")
    (path / f"{MODULE}.py").write_text(SOURCE)
    ray.get(b.run.remote(lambda: sys.path.append(str(path))))
    with rtr.init_group({"a": a, "b": b}):
        yield a, b


def raise_own() -> None:
    import installed_at_the_callee as there  # type: ignore[import-not-found, unused-ignore]

    raise there.OwnError("on purpose")


def own_value() -> Any:
    import installed_at_the_callee as there

    return there.Value()


class Exits:
    """Cannot be unpickled in the process of the member of that name: its code asks the process to exit."""

    def __init__(self, kind: type[BaseException], member: str) -> None:
        self.kind, self.member = kind, member

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with suppress(rtr.NotAMember):  # Ray unpickles it in other processes too
            if rtr.current_member().name == self.member:
                raise self.kind("asked to exit")


class ExitsAsError(Exits, Exception):
    def __reduce__(self) -> Any:
        return ExitsAsError.__new__, (ExitsAsError,), vars(self)


def raise_one_that_exits(kind: type[BaseException], member: str) -> None:
    raise ExitsAsError(kind, member)


def outcome(method: str, *args: Any) -> tuple[str, str, str]:
    """What ``b`` answers to the member that runs this: the class, the text, and the remote traceback."""
    try:
        value = getattr(rtr.rpc_sync("b", timeout=30), method)(*args)
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "traceback_text", "")
    return "", repr(value), ""


def test_an_error_of_a_class_that_only_the_callee_has_is_a_remote_error(pair: tuple[Any, Any]) -> None:
    kind, text, remote = ray.get(pair[0].run.remote(outcome, "give", raise_own))
    assert kind == "RemoteError"
    assert "on b.give" in text and f"No module named '{MODULE}'" in text
    assert "in raise_own" in remote and "OwnError: on purpose" in remote


def test_a_result_of_a_class_that_only_the_callee_has_names_the_method(pair: tuple[Any, Any]) -> None:
    kind, text, _ = ray.get(pair[0].run.remote(outcome, "give", own_value))
    assert kind == "SerializationError"
    assert "the result of b.give cannot be unpickled here" in text and f"No module named '{MODULE}'" in text


@pytest.mark.parametrize("kind", [SystemExit, BaseException])
def test_an_error_whose_unpickling_exits_ends_no_caller(pair: tuple[Any, Any], kind: type[BaseException]) -> None:
    def raise_it() -> None:
        raise_one_that_exits(kind, "a")

    name, _, remote = ray.get(pair[0].run.remote(outcome, "give", raise_it))
    assert name == "RemoteError"
    assert "in raise_one_that_exits" in remote
    assert ray.get(pair[0].run.remote(outcome, "double", 4))[1] == "8"


@pytest.mark.parametrize(
    ("what", "kind"),
    [*product(["result", "argument"], [SystemExit, BaseException]), ("argument", KeyboardInterrupt)],
)
def test_a_value_whose_unpickling_exits_names_the_method(
    pair: tuple[Any, Any], what: str, kind: type[BaseException]
) -> None:
    method, value, said = {
        "result": ("give", lambda: Exits(kind, "a"), "the result of b.give cannot be unpickled here"),
        "argument": ("keep", Exits(kind, "b"), "an argument of b.keep cannot be unpickled there"),
    }[what]
    name, text, _ = ray.get(pair[0].run.remote(outcome, method, value))
    assert name == "SerializationError" and said in text and "asked to exit" in text
    assert ray.get(pair[0].run.remote(outcome, "double", 4))[1] == "8"
