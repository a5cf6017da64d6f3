"""``runtime_env()``: what a process that was started with it finds, and what a group says of one that was not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.insides import in_actor
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
from tests.unit.test_runtime_env import OURS, nothing_is_set

TORCHRPC = rtr.GroupConfig(lanes=("socket", "torchrpc"))
SIZE = 64 << 20


__all__ = ["nothing_is_set"]


@pytest.fixture
def madvise() -> None:
    """Skips where the kernel gives huge pages to nobody, or to everybody whether asked for or not."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = enabled.read_text().strip() if enabled.exists() else "missing"
    if "[madvise]" not in mode:
        pytest.skip(f"{enabled} is {mode}: the variable makes no difference here")


@pytest.fixture(scope="module")
def started_with(spawn_for_module: Spawn) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in OURS:
            patch.delenv(name, raising=False)
        return spawn_for_module(Peer, runtime_env=rtr.runtime_env())


def first_environment() -> dict[str, str]:
    """As it was when this process's program began, before any import."""
    pairs = Path("/proc/self/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def in_huge_pages(size: int) -> int:
    """Bytes of a new CPU tensor of that size that lie in huge pages, as the kernel tells."""
    tensor = torch.ones(size, dtype=torch.uint8)
    begin, end, found = tensor.data_ptr(), tensor.data_ptr() + size, 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) < end and begin < int(area[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


def test_an_actor_has_the_variables_from_its_start(started_with: Any) -> None:
    environment = in_actor(started_with, first_environment)
    assert {name: environment.get(name) for name in OURS} == OURS


def test_torch_heeds_it(madvise: None, started_with: Any, peers: list[Any]) -> None:
    assert in_actor(peers[0], in_huge_pages, SIZE) == 0
    assert in_actor(started_with, in_huge_pages, SIZE) > 0  # as many as the machine has


def test_a_group_says_who_should_have_been_started_with_it(madvise: None, started_with: Any, peers: list[Any]) -> None:
    actors = {"with": started_with, "without": peers[0]}
    with rtr.init_group(actors, config=TORCHRPC) as group:
        notes = [line for line in group.explain("with", "without").splitlines() if "  note: " in line]
    assert len(notes) == 1
    assert "reach without " in notes[0] and "runtime_env=raytorchrpc.runtime_env()" in notes[0]
