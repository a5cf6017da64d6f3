"""Docstrings of public names: their examples, run between two actors and the driver, and what they describe."""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from torch.distributed.device_mesh import init_device_mesh

import raytorchrpc as rtr
from tests.ray.conftest import Spawn


def is_error(name: str) -> bool:
    found = getattr(rtr, name)
    return inspect.isclass(found) and issubclass(found, Exception)


#: ``rdt`` is a module; the page of errors says what raises each of them.
NAMES = sorted(name for name in rtr.__all__ if name != "rdt" and not is_error(name))
#: Users do not construct these themselves.
MADE_ELSEWHERE = {"Future", "Group", "Lease", "Read", "Stream", "Subscription"}


class Worker:
    @rtr.method
    def double(self, x: Any) -> Any:
        return x * 2

    @rtr.method
    def count(self, n: int) -> Iterator[int]:
        yield from range(n)


@pytest.fixture(scope="module")
def used(spawn_for_module: Spawn) -> Iterator[dict[str, Any]]:
    """What the examples use without saying where it comes from."""
    learner, collector, first, second = (spawn_for_module(Worker) for _ in range(4))
    modules = {"asyncio": asyncio, "init_device_mesh": init_device_mesh, "ray": ray, "rtr": rtr, "torch": torch}
    with rtr.init_group({"learner": learner, "collector": collector}, include_driver=True):
        yield {**modules, "learner": learner, "first": first, "second": second}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_shows_what_it_says(used: dict[str, Any], name: str) -> None:
    text = inspect.getdoc(getattr(rtr, name)) or ""
    example = doctest.DocTestParser().get_doctest(text, dict(used), name, None, None)
    assert example.examples, f"{name} has no example"
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert result.failed == 0, "".join(said)


def functions() -> Iterator[tuple[str, Any]]:
    """The public functions, constructors and methods, by the name that users write."""
    for name in NAMES:
        found = getattr(rtr, name)
        if not inspect.isclass(found):
            yield name, found
            continue
        if name not in MADE_ELSEWHERE:
            yield name, found
        for each in dir(found):
            method = inspect.getattr_static(found, each)
            method = getattr(method, "__func__", method)
            if not each.startswith("_") and inspect.isfunction(method):
                yield f"{name}.{each}", method


def fields_described(found: Any) -> str:
    """The docstrings of a class's attributes stand below them in its source."""
    if not inspect.isclass(found):
        return ""
    body = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0].body  # type: ignore[attr-defined]
    pairs = itertools.pairwise(body)
    return " ".join(ast.unparse(each) for pair in pairs if isinstance(pair[1], ast.Expr) for each in pair)


def described(name: str, found: Any) -> str:
    """Where the parameters of a function may be described: there, in its class, and where these refer to."""
    owner, _, own = name.rpartition(".")
    if found is rtr.method:  # what it decorates is no parameter for users
        return f"function {inspect.getdoc(found)}"
    texts = [inspect.getdoc(found) or "", fields_described(found)]
    if inspect.isclass(found):
        texts.append(inspect.getdoc(found.__init__) or "")
    if owner:
        texts.append(inspect.getdoc(getattr(rtr, owner)) or "")
        if own.startswith("a"):  # for coroutines
            texts.append(inspect.getdoc(getattr(getattr(rtr, owner), own[1:], None)) or "")
    for other in re.findall(r"``(\w+)``", texts[0].partition("\n")[0]):  # "Like ``rpc_sync``, ..."
        texts.append(inspect.getdoc(getattr(getattr(rtr, owner, rtr), other, None)) or "")
    return " ".join(texts)


@pytest.mark.parametrize(("name", "found"), [pytest.param(*each, id=each[0]) for each in functions()])
def test_each_parameter_is_described(name: str, found: Any) -> None:
    parameters = inspect.signature(found).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    public = {each.name for each in parameters if each.kind not in kinds and not each.name.startswith("_")}
    text = described(name, found)
    missing = {each for each in public - {"self", "cls"} if not re.search(rf"\b{each}s?\b", text)}
    assert not missing, f"the docstring of {name} does not say what these are"
