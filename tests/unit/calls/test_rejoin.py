"""When a restarted process closes its mailbox."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raytorchrpc.calls.rejoin import Rejoin

LONG_S = 30.0


class Mailbox:
    """Has one request, which makes the process a member, and is never emptied by a group."""

    def __init__(self, rejoin: Rejoin, request: bool) -> None:
        self._rejoin, self._request = rejoin, request
        self.looked = threading.Event()
        self.is_over_now = False

    def take(self) -> object | None:
        request, self._request = self._request, False
        return object() if request else None

    def answer(self, request: object, instance: object) -> None:
        self._rejoin.joined("a member")

    def is_over(self) -> bool:
        self.looked.set()
        return self.is_over_now


@pytest.fixture(autouse=True)
def no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytorchrpc.calls.rejoin.ray_internals.actor_instance", lambda: None)


def polling(request: bool) -> tuple[Rejoin, Mailbox]:
    rejoin = Rejoin("actor")
    mailbox: Any = Mailbox(rejoin, request)
    rejoin._thread = threading.Thread(target=rejoin._poll, args=(mailbox,), daemon=True)
    rejoin._thread.start()
    return rejoin, mailbox


def ends(rejoin: Rejoin) -> bool:
    assert rejoin._thread is not None
    rejoin._thread.join(LONG_S)
    return not rejoin._thread.is_alive()


def test_not_before_the_group_that_it_returned_to_has_the_answers() -> None:
    rejoin, mailbox = polling(request=True)
    assert mailbox.looked.wait(LONG_S)
    assert not rejoin.over
    mailbox.is_over_now = True
    assert ends(rejoin)


def test_at_once_if_another_group_took_it_in_through_ray() -> None:
    """That group does not know the mailbox, and would leave in Ray's store what it holds."""
    rejoin, _ = polling(request=False)
    rejoin.joined("a member")
    assert ends(rejoin)
