"""Slots of the shm lane where a peer's arena cannot be mapped, or is not the one they were in."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Part, PeerAddress
from raytorchrpc.lanes.shm.lane import ShmLane

SIZE = 1 << 20


def lane() -> ShmLane:
    made = ShmLane(16 << 20, 1)
    made.address = made.open()  # type: ignore[attr-defined]
    return made


def shapes(tensor: torch.Tensor) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(tensor.dtype, tuple(tensor.shape))]


@contextmanager
def no_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def used(sender: ShmLane) -> int:
    sender._arena.crowded()
    return sender.in_use()


@pytest.mark.parametrize("how", ["fetch", "discard"])
def test_what_could_not_be_mapped_is_given_back_later(how: str) -> None:
    sender, receiver = lane(), lane()
    try:
        receiver.connect([PeerAddress("s", sender.address)])  # type: ignore[attr-defined]
        tensor = torch.arange(SIZE // 8)
        lost = sender.export([tensor], "r", {})
        with no_descriptors():
            if how == "discard":
                receiver.discard("s", lost.descriptor)
            else:
                with pytest.raises(LaneUnavailable, match="cannot map"):
                    receiver.fetch("s", lost.descriptor, shapes(tensor))
        assert used(sender) == SIZE
        following = sender.export([tensor], "r", {})
        (arrived,) = receiver.fetch("s", following.descriptor, shapes(tensor))
        assert torch.equal(arrived, tensor)
        assert used(sender) == SIZE
        del arrived
        assert used(sender) == 0
    finally:
        receiver.close()
        sender.close()


def test_what_came_from_one_that_was_not_known_yet_is_given_back_once_it_is() -> None:
    """The receiver stood still while the sender's process came, and has not been told."""
    sender, receiver = lane(), lane()
    try:
        tensor = torch.arange(SIZE // 8)
        fetched, dropped = (sender.export([tensor], "r", {}) for _ in range(2))
        with pytest.raises(PeerLost, match="'s'") as lost:
            receiver.fetch("s", fetched.descriptor, shapes(tensor))
        assert lost.value.may_have_run
        receiver.discard("s", dropped.descriptor)
        assert used(sender) == 2 * SIZE
        receiver.connect([PeerAddress("s", sender.address)])  # type: ignore[attr-defined]
        assert used(sender) == 0
    finally:
        receiver.close()
        sender.close()


def test_what_an_earlier_process_sent_is_not_looked_for_in_the_next_ones_memory() -> None:
    earlier, later, receiver = lane(), lane(), lane()
    try:
        receiver.connect([PeerAddress("s", earlier.address)])  # type: ignore[attr-defined]
        old, new = torch.zeros(SIZE // 8), torch.ones(SIZE // 8)
        stale = [earlier.export([old], "r", {}) for _ in range(2)]
        receiver.disconnect("s")
        receiver.connect([PeerAddress("s", later.address)])  # type: ignore[attr-defined]
        fresh = [later.export([new], "r", {}) for _ in range(2)]
        with pytest.raises(PeerLost, match="its process ended"):
            receiver.fetch("s", stale[0].descriptor, shapes(old))
        receiver.discard("s", stale[1].descriptor)
        assert used(later) == 2 * new.nbytes, "their slots have the same numbers"
        for export in fresh:
            (arrived,) = receiver.fetch("s", export.descriptor, shapes(new))
            assert torch.equal(arrived, new)
            del arrived
        assert used(later) == 0
    finally:
        for one in (receiver, earlier, later):
            one.close()


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("how", ["fetch", "scatter_into"])
def test_what_a_process_sent_before_it_ended_is_lost_with_it(lent: bool, how: str) -> None:
    """The receiver was told of it, and had not mapped it yet."""
    sender, receiver = lane(), lane()
    try:
        receiver.connect([PeerAddress("s", sender.address)])  # type: ignore[attr-defined]
        flat = sender.lend(1024) if lent else torch.zeros(1024, dtype=torch.uint8)
        assert flat is not None
        descriptor = sender.export([flat], "r", {}).descriptor
        sender.close()
        with pytest.raises(PeerLost, match="lost member 's': its process ended, or left the group") as lost:
            if how == "fetch":
                receiver.fetch("s", descriptor, shapes(flat))
            else:
                receiver.scatter_into("s", descriptor, [1024], [[Part(0, torch.zeros(4))]])
        assert lost.value.peer == "s"
        receiver.discard("s", descriptor)
    finally:
        receiver.close()
        sender.close()


def test_parts_that_the_caller_copies_keep_their_memory_until_then() -> None:
    sender, receiver = lane(), lane()
    try:
        receiver.connect([PeerAddress("s", sender.address)])  # type: ignore[attr-defined]
        descriptor = sender.export([torch.full((SIZE,), 7, dtype=torch.uint8)], "r", {}).descriptor
        strided = torch.zeros(2000, dtype=torch.uint8)[::2]
        left = receiver.scatter_into("s", descriptor, [SIZE], [[Part(0, strided)]])
        assert used(sender) == SIZE
        ((target, source),) = left
        target.copy_(source)
        assert bool((strided == 7).all())
        del left, source
        assert used(sender) == 0
    finally:
        receiver.close()
        sender.close()
