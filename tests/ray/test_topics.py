"""Publish and subscribe between actors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.ray.test_tensor_lanes import MIB

LARGE = MIB  # elements of float32


@pytest.fixture(scope="module")
def actors(peers: list[Any]) -> dict[str, Any]:
    return dict(zip(("home", "a", "b"), peers, strict=True))


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        yield group


def subscribe(topic: rtr.Topic, *args: Any, **settings: Any) -> None:
    insides.saved.subscription = topic.subscribe(*args, **settings)


def subscription() -> rtr.Subscription:
    """This actor's."""
    found: rtr.Subscription = insides.saved.subscription
    return found


def rest() -> list[Any]:
    return list(subscription())


@pytest.mark.parametrize("publisher", ["home", "a"])
def test_everybody_gets_what_comes_later_privately(actors: dict[str, Any], request: Any, publisher: str) -> None:
    topic = rtr.Topic(request.node.name, home="home")
    in_actor(actors[publisher], topic.publish, "nobody hears this")
    for name in ("home", "b"):
        in_actor(actors[name], subscribe, topic)

    def publish() -> None:
        tensor = torch.ones(LARGE)
        topic.publish({"tensor": tensor, "tag": 1})
        tensor.zero_()

    in_actor(actors[publisher], publish)
    in_actor(actors["a"], subscribe, topic)
    in_actor(actors[publisher], topic.publish_many, [2, 3])
    in_actor(actors[publisher], topic.close)

    def check() -> None:
        first, *others = subscription().items(batch=2)
        assert bool((first["tensor"] == 1).all()) and others == [2, 3]
        first["tensor"].fill_(5.0)
        with pytest.raises(rtr.Closed):
            subscription().get()

    for name in ("home", "b"):
        in_actor(actors[name], check)
    assert in_actor(actors["a"], rest) == [2, 3]
    with pytest.raises(rtr.Closed):
        in_actor(actors[publisher], topic.publish, 4)


def test_what_cannot_work_is_refused(actors: dict[str, Any], request: Any) -> None:
    topic = rtr.Topic(request.node.name, home="home")

    def act() -> None:
        with pytest.raises(rtr.ConfigurationError, match="policy= must be one of block, drop_oldest, latest"):
            topic.subscribe("sometimes")  # type: ignore[arg-type]
        with pytest.raises(rtr.ConfigurationError, match="maxsize= must be a whole number"):
            topic.subscribe(maxsize=0)
        with topic.subscribe() as subscribed, pytest.raises(TypeError, match="send the Topic"):
            pickle.dumps(subscribed)
        with pytest.raises(rtr.Closed, match="cancelled"):
            subscribed.get()

    in_actor(actors["a"], act)
