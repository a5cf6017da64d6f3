"""Regions between actors: over each lane for CPU tensors, and while owners and readers are killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor, needs_nixl
from tests.polling import wait_until
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn, pid_of

ROWS, WIDTH, LAYERS, LONG = 64, 5_000, 3, 60.0


class Owner(Peer):
    @rtr.method
    def written(self, reader: str) -> tuple[rtr.Lease, int]:
        """Write some rows, each of one value, once nobody reads them."""
        region, chance = insides.saved.region, random.Random()
        rows = chance.sample(range(ROWS), 20)
        if not region.wait(rows, timeout=LONG):
            raise RuntimeError("a lease does not end")
        value = chance.randrange(1 << 40)
        for layer in insides.saved.layers:
            layer[rows] = value
        return region.lease(rows, timeout=LONG, reader=reader), value


def expose() -> None:
    rtr.current_member(timeout=LONG)
    insides.saved.layers = [torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) + layer for layer in range(LAYERS)]
    insides.saved.region = rtr.Region("cache", insides.saved.layers)


def read_scattered() -> None:
    rows, at = torch.randperm(ROWS)[:30], torch.randperm(ROWS)[:30]
    into = [torch.zeros(ROWS, WIDTH, dtype=torch.int64) for _ in range(LAYERS)]
    for _ in range(2):
        rtr.read("owner", "cache", rows=rows, at=at, into=into).wait(LONG)
        for layer, tensor in enumerate(into):
            assert torch.equal(tensor[at], (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) + layer)[rows])


BY_NIXL = pytest.param(("socket", "nixl"), marks=needs_nixl)


@pytest.mark.parametrize("lanes", [("socket", "shm"), BY_NIXL, ("socket",), ("torchrpc",)], ids="-".join)
def test_rows_arrive_over_each_lane(spawn: Spawn, lanes: tuple[str, ...]) -> None:
    owner, reader = spawn(Owner), spawn(Peer)
    with rtr.init_group({"owner": owner, "reader": reader}, config=rtr.GroupConfig(lanes=lanes)):
        in_actor(owner, expose)
        in_actor(reader, read_scattered)
        given, value = in_actor(owner, lambda: insides.actor().written("reader"))
        assert in_actor(reader, read_leased, given) == value


def read_leased(given: rtr.Lease) -> int:
    into = [torch.zeros(len(given.rows), WIDTH, dtype=torch.int64) for _ in range(LAYERS)]
    rtr.read("owner", "cache", into=into, lease=given).wait(LONG)
    (value,) = {int(value) for layer in into for value in layer.unique()}
    return value


def read_on(owners: list[str], record: Path) -> None:
    """Read under leases for as long as this process lives, and record how each read ends."""

    def read() -> None:
        chance = random.Random()
        while not insides.saved.stops:
            owner, outcome = chance.choice(owners), "right"
            began = time.monotonic()
            try:
                given, value = rtr.rpc_sync(owner, timeout=LONG).written(me)
                into = [torch.zeros(20, WIDTH, dtype=torch.int64) for _ in range(LAYERS)]
                rtr.read(owner, "cache", into=into, lease=given, timeout=LONG).wait()
                if any(not bool((layer == value).all()) for layer in into):
                    outcome = "wrong"
            except (rtr.PeerLost, rtr.NotFound, rtr.RemoteError, AttributeError) as error:  # a new process without it
                outcome = type(error).__name__
            except rtr.RayTorchRpcError as error:
                outcome = f"unexpected {type(error).__name__} {error}"
            took = time.monotonic() - began
            with record.open("a") as file:
                file.write(f"{outcome}\n" if took < LONG / 2 else f"late: {outcome} {took:.0f}\n")
            if outcome != "right":
                time.sleep(0.05)

    me = rtr.current_member(timeout=LONG).name
    insides.saved.stops = False
    insides.saved.thread = threading.Thread(target=read, daemon=True)
    insides.saved.thread.start()


def stop() -> None:
    insides.saved.stops = True
    insides.saved.thread.join(LONG)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_owners_and_readers_that_are_killed(spawn: Spawn, tmp_path: Path) -> None:
    """Each read is right or says why not, within its time; and who comes back is read, and reads, again."""
    chance, record = random.Random(0), tmp_path / "record"
    owners = {name: spawn(Owner, max_restarts=-1) for name in ("first", "second")}
    readers = {name: spawn(Peer, max_restarts=-1) for name in ("third", "fourth")}

    def begin(name: str) -> None:
        actor = {**owners, **readers}[name]
        in_actor(actor, *((expose,) if name in owners else (read_on, [*owners], record)))

    def rights() -> int:
        return Counter(record.read_text().splitlines())["right"] if record.exists() else 0

    with rtr.init_group({**owners, **readers}):
        for name in (*owners, *readers):
            begin(name)
        for _ in range(200):
            before = rights()
            assert wait_until(lambda before=before: rights() > before + 4, LONG), record.read_text()[-2000:]
            name = chance.choice([*owners, *readers])
            actor = {**owners, **readers}[name]
            pid = pid_of(actor)
            time.sleep(chance.random() * 0.05)
            with suppress(ProcessLookupError):
                os.kill(pid or 0, signal.SIGKILL)
            assert wait_until(lambda actor=actor, pid=pid: pid_of(actor) not in (None, pid), LONG)
            begin(name)
        before = rights()
        assert wait_until(lambda: rights() > before + 10, LONG)
        for reader in readers.values():
            in_actor(reader, stop)
    ends = Counter(record.read_text().splitlines())
    allowed = {"right", "PeerLost", "NotFound", "RemoteError", "AttributeError"}
    assert set(ends) <= allowed, ends
