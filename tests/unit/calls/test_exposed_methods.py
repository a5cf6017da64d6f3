"""Which methods of an actor its group may call."""

from __future__ import annotations

from typing import Any

import pytest

import raytorchrpc as rtr
from tests.unit.callees import methods_of


class ClassLevel:
    """An attribute that runs code when it is looked up on the class, as ORMs and registries have them."""

    def __get__(self, instance: Any, cls: type) -> int:
        if instance is None:
            raise RuntimeError("only for instances")
        return 1


class Actor:
    attribute = ClassLevel()

    @rtr.method
    def offered(self) -> None: ...

    @rtr.method(retry=2)
    def repeated(self) -> None: ...

    def own(self) -> None: ...


def test_decorated_methods_are_exposed_and_no_code_of_the_class_runs() -> None:
    found = methods_of(Actor())
    assert {name: note.retry for name, note in found.items()} == {"offered": 0, "repeated": 2}
    assert methods_of(None) == {}, "a driver exposes nothing"


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_only_methods_of_the_actor_can_be_decorated(kind: Any) -> None:
    with pytest.raises(rtr.ConfigurationError, match="leave that out, so that it is a method of the actor"):
        rtr.method(kind(lambda: None))


class Local:
    """Used as a plain object, outside an actor."""

    @rtr.method
    def answered(self) -> Any:
        heard = [(yield "first")]
        try:
            yield heard
        except ValueError as error:
            yield f"caught {error}"


def test_a_generator_without_a_turn_takes_what_is_sent_and_thrown() -> None:
    generator = Local().answered()
    assert next(generator) == "first"
    assert generator.send(5) == [5]
    assert generator.throw(ValueError("it")) == "caught it"


class Ungrouped:
    @rtr.method(max_concurrency=2)
    def load(self) -> None: ...


def test_only_a_concurrency_group_has_a_width_to_declare() -> None:
    with pytest.raises(rtr.ConfigurationError, match=r"Ungrouped.load declares max_concurrency=2 .* groups"):
        methods_of(Ungrouped())
    for wrong in (0, True, 1.5):
        with pytest.raises(rtr.ConfigurationError, match="max_concurrency= must be a whole number of at least 1"):
            rtr.method(max_concurrency=wrong)(lambda self: None)  # type: ignore[arg-type]
