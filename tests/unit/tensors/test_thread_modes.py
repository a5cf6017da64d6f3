"""Modes of torch that belong to a thread: user code runs in those of the user's thread, and leaves none behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from raytorchrpc.tensors import thread_modes
from tests.unit.members import in_thread

Modes = tuple[Any, ...]


def modes() -> Modes:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.ones(1).device.type,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


entered: list[Any] = []
DEFAULTS: Modes = (True, False, "cpu", False, torch.bfloat16)


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    thread_modes.note()
    assert modes() == DEFAULTS


def leave_grad_off() -> None:
    torch.set_grad_enabled(False)


def leave_inference() -> None:
    entered.append(torch.inference_mode())  # its end would leave it
    entered[-1].__enter__()


def leave_device() -> None:
    torch.set_default_device("meta")


def leave_entered_device() -> None:
    torch.device("meta").__enter__()


def leave_autocast() -> None:
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)


LEAVE = [leave_grad_off, leave_inference, leave_device, leave_entered_device, leave_autocast]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("raises", [False, True])
def test_user_code_leaves_no_mode_on_a_thread(leave: Callable[[], None], raises: bool) -> None:
    def user() -> Modes:
        leave()
        assert modes() != DEFAULTS
        if raises:
            raise KeyError("on purpose")
        return modes()

    def work() -> list[Modes]:
        seen = []
        for _ in range(3):
            with suppress(KeyError):
                thread_modes.run(user)
            seen.append(modes())
        return [*seen, thread_modes.run(modes)]

    assert in_thread(work)() == [DEFAULTS] * 4


@pytest.mark.parametrize("leave", LEAVE)
def test_user_code_runs_in_the_modes_of_the_users_thread(leave: Callable[[], None]) -> None:
    def users_thread() -> Modes:
        leave()
        thread_modes.note()
        return modes()

    expected = in_thread(users_thread)()
    assert expected != DEFAULTS
    assert in_thread(lambda: [thread_modes.run(modes), modes(), thread_modes.run(modes)])() == [
        expected,
        DEFAULTS,
        expected,
    ]
