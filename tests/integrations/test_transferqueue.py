"""TransferQueue with its data in units of raytorchrpc: its own tests, and what becomes of data when processes end."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError

import raytorchrpc as rtr

pytest.importorskip("transfer_queue", exc_type=ImportError)

import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

from raytorchrpc.integrations import transferqueue
from tests.polling import wait_until

# TransferQueue installs another package of the name tests, which Ray's workers would look into.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cluster")]
WAIT_S = 180.0
#: How many processes the test of random kills ends.
KILLS = int(os.environ.get("TRANSFERQUEUE_KILLS", "20"))
NUMBERS = itertools.count()


class Client:
    """A process that puts and gets. It imports nothing of raytorchrpc: the configuration brings it."""

    def __init__(self, stays: bool = False) -> None:
        import transfer_queue

        transfer_queue.init()
        self.client = transfer_queue.get_client()
        if stays:  # as if its tensors were on a GPU
            transferqueue.Participant.stays = staticmethod(lambda values: True)

    def pid(self) -> int:
        return os.getpid()

    def put(self, partition: str, data: dict[str, Any], overwrites: bool = False) -> int:
        data = {name: rows.clone() for name, rows in data.items()} if overwrites else data
        self.client.put(TensorDict(data, batch_size=len(next(iter(data.values())))), partition_id=partition)
        for rows in data.values() if overwrites else ():
            rows.zero_()
        return os.getpid()

    def put_ones(self, number: int, count: int, size: int) -> None:
        self.put(str(number), {"x": torch.full((count, size), float(number))})

    def get(self, partition: str, fields: list[str], count: int, overwrites: bool = False) -> dict[str, list[Any]]:
        """The rows by field; a task of its own gets each of them once."""
        meta = self.client.get_meta(fields, count, partition, task_name=f"train-{next(NUMBERS)}")
        assert meta.size == count, f"{partition} has {meta.size} of {count} rows"
        got = self.client.get_data(meta)
        rows = {f: [*rows.unbind()] if isinstance(rows, torch.Tensor) else rows.tolist() for f, rows in got.items()}
        if overwrites:
            rows = {field: [row.clone() for row in own] for field, own in rows.items()}
            for own in got.values():
                own.zero_()
        return rows

    def sums(self, number: int, count: int, size: int) -> int:
        """How many rows there are; each is checked."""
        rows = self.get(str(number), ["x"], count)["x"]
        assert all(row.shape == (size,) and bool((row == number).all()) for row in rows), "a row is torn"
        return len(rows)

    def clear(self, partition: str) -> None:
        self.client.clear_partition(partition)

    def lent(self) -> int:
        return len(self.client.storage_manager._here._lent)

    def shared_memory(self) -> int:
        """Bytes that this process shares with others."""
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("RssShmem:")[1].split()[0]) << 10


@contextmanager
def storage(**settings: Any) -> Iterator[Any]:
    """The client of this process, which has started a storage."""
    backend = {"storage_backend": transferqueue.NAME, transferqueue.NAME: settings}
    tq.init({"backend": backend, "controller": {"polling_mode": True}})
    try:
        yield tq.get_client()
    finally:
        tq.close()


def clients(count: int, *args: Any, **options: Any) -> list[Any]:
    actors = [ray.remote(num_cpus=0, **options)(Client).remote(*args) for _ in range(count)]
    ray.get([actor.pid.remote() for actor in actors], timeout=WAIT_S)
    return actors


def unit_pids(client: Any) -> dict[str, int]:
    """Once every unit answers: Ray may be restarting one."""
    answered(client.storage_manager.stats)
    members = rtr.get_group("_transferqueue").members
    return {member.name: member.pid for member in members if member.name in client.storage_manager.storage_unit_infos}


def pid_of(actor: Any) -> int:
    """Once the actor answers: Ray may be restarting it."""
    return answered(lambda: ray.get(actor.pid.remote(), timeout=WAIT_S))


def answered(ask: Callable[[], Any]) -> Any:
    """The answer of a process, which may come back meanwhile."""
    answers = list[Any]()

    def attempt() -> bool:
        with suppress(RayActorError, rtr.RayTorchRpcError):
            answers.append(ask())
        return bool(answers)

    assert wait_until(attempt, WAIT_S), "the process did not come back"
    return answers[0]


# --- rows, without processes -----------------------------------------------------------------------------------------


def roundtrip(rows: Any, order: list[int], cut: int = 7) -> tuple[Any, dict[str, int]]:
    """What a get of some rows returns, in this order; and what the unit keeps when all are cleared."""
    unit, block = transferqueue.Unit("unit", None, 1 << 30), transferqueue.Block.of(rows)
    for begin in range(0, len(block), cut):
        own = [*range(begin, min(begin + cut, len(block)))]
        unit.put([(own, {"x": block.cut(own[0], own[-1] + 1)})])
    placed = []
    for half in (0, 1):  # as from two units
        positions = [place for place, index in enumerate(order) if index // 5 % 2 == half]
        runs = [[order[positions[at]] for at in range(*run)] for run in transferqueue._runs(positions)]
        placed += transferqueue._placed(positions, unit.get(["x"], runs)[0]) if positions else []
    batch = transferqueue.Batch(len(order), placed)
    for (_, piece), target in zip(placed, batch.targets, strict=True):
        if target is not None:
            target.copy_(piece.values)
    unit.clear([*range(len(block))])
    return batch.result(lambda _: torch.empty(0)), unit.stats()


N = 53
ROWS = {
    "rows of one shape": torch.randn(N, 4, 5),
    "scalars": torch.randn(N),
    "empty rows": torch.randn(N, 0, 5),
    "not contiguous": torch.randn(3, N, dtype=torch.bfloat16).t(),
    "jagged": torch.nested.as_nested_tensor([torch.randn(i % 6, 3) for i in range(N)], layout=torch.jagged),
    "a list of tensors": [torch.randn(i % 6 + 1, 3) for i in range(N)],
    "several dimensions differ": [torch.randn(i % 3 + 1, i % 4 + 1) for i in range(N)],
    "text": NonTensorStack(*[f"row {i}" for i in range(N)]),
    "objects": NonTensorStack(*[{"number": i} for i in range(N)]),
    "anything": [None, 1, "x", (2, 3), 0.5] * 10 + [b"y", torch.ones(2), True],
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_come_back_as_they_were_put(kind: str) -> None:
    rows = ROWS[kind]
    wanted = [*rows] if isinstance(rows, list) else rows.tolist() if kind in ("text", "objects") else rows.unbind()
    shuffled = random.Random(1).sample(range(N), N)
    for order in ([*range(N)], shuffled, [3], [40, 41, 42, 3], [*range(20, 30)]):
        packed, kept = roundtrip(rows, order)
        got = packed.unbind() if isinstance(packed, torch.Tensor) else packed.tolist()
        for index, row in zip(order, got, strict=True):
            if isinstance(row, torch.Tensor):
                assert row.dtype == wanted[index].dtype
                assert row.shape == wanted[index].shape
                assert torch.equal(row, wanted[index])
            else:
                assert row == wanted[index]
        assert kept["samples"] == kept["bytes"] == 0


def test_a_unit_refuses_what_it_has_no_room_for() -> None:
    unit = transferqueue.Unit("unit_0", 4, 1 << 10)
    rows = transferqueue.Block.of(torch.zeros(4, 64))
    unit.put([([0, 1, 2, 3], {"x": rows})])
    with pytest.raises(ValueError, match="unit_0 has room for 4 samples"):
        unit.put([([4], {"x": rows.cut(0, 1)})])
    with pytest.raises(ValueError, match="unit_0 keeps 1024 of 1024 bytes, and 256 were put"):
        unit.put([([3], {"y": rows.cut(0, 1)})])
    assert unit.stats() == {"samples": 4, "bytes": 1024, "most_bytes": 1024}


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_process_joins_by_itself_and_what_it_put_outlives_it() -> None:
    data = {
        "x": torch.arange(100 * 50_000.0).view(100, -1),
        "length": torch.arange(100),
        "jagged": torch.nested.as_nested_tensor([torch.full((i % 5,), i) for i in range(100)], layout=torch.jagged),
        "text": NonTensorStack(*[f"row {i}" for i in range(100)]),
    }
    with storage() as client:
        producer, consumer = clients(2)
        os.kill(ray.get(producer.put.remote("first", data), timeout=WAIT_S), signal.SIGKILL)
        kept = client.storage_manager.stats()
        assert sum(unit["samples"] for unit in kept.values()) == 100
        assert sum(unit["bytes"] for unit in kept.values()) > 20_000_000
        rows = ray.get(consumer.get.remote("first", [*data], 100), timeout=WAIT_S)
        assert all(torch.equal(row, data["x"][i]) for i, row in enumerate(rows["x"]))
        assert all(torch.equal(row, torch.full((i % 5,), i)) for i, row in enumerate(rows["jagged"]))
        assert [int(row) for row in rows["length"]] == [*range(100)]
        assert rows["text"] == [f"row {i}" for i in range(100)]
        client.clear_partition("first")
        assert all(unit["bytes"] == unit["samples"] == 0 for unit in client.storage_manager.stats().values())
        pids = unit_pids(client)
    with pytest.raises(rtr.NotAMember):
        rtr.get_group("_transferqueue")
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()), 30), "a unit goes on"


def test_a_unit_that_is_killed_is_named_and_later_batches_go_on() -> None:
    with storage() as client:
        producer, consumer = clients(2)
        ray.get(producer.put_ones.remote(1, 256, 1000), timeout=WAIT_S)
        os.kill(unit_pids(client)["unit_1"], signal.SIGKILL)
        with pytest.raises(StorageKeyNotFoundError, match="unit_1 has no key"):
            ray.get(consumer.sums.remote(1, 256, 1000), timeout=WAIT_S)
        ray.get(producer.put_ones.remote(2, 256, 1000), timeout=WAIT_S)
        assert ray.get(consumer.sums.remote(2, 256, 1000), timeout=WAIT_S) == 256
        assert sum(unit["samples"] for unit in client.storage_manager.stats().values()) == 256 + 128


def test_a_unit_copies_what_would_fill_the_shared_memory_of_a_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTORCHRPC_SHM_BYTES", "64MiB")
    with storage(unit_bytes="1GiB"):
        producer, consumer = clients(2)
        for number in range(10):  # 160 MB
            ray.get(producer.put_ones.remote(number, 64, 65_536), timeout=WAIT_S)
        assert ray.get(producer.shared_memory.remote(), timeout=WAIT_S) < 80 << 20
        for number in range(10):
            assert ray.get(consumer.sums.remote(number, 64, 65_536), timeout=WAIT_S) == 64


def test_tensors_that_stay_in_their_producer_are_read_there_until_they_are_cleared(tmp_path: Path) -> None:
    with storage(total_storage_size=130) as client:
        (producer,), (consumer,) = clients(1, True), clients(1)
        rows = {"x": torch.randn(130, 7), "y": torch.arange(130)}
        ray.get(producer.put.remote("first", rows, overwrites=True), timeout=WAIT_S)
        assert ray.get(producer.lent.remote(), timeout=WAIT_S) == 6  # of two fields in three chunks
        got = ray.get(consumer.get.remote("first", ["x", "y"], 130), timeout=WAIT_S)
        assert all(torch.equal(torch.stack(got[field]), rows[field]) for field in rows)
        client.save_storage_checkpoint(str(tmp_path))
        client.clear_partition("first")
        assert wait_until(lambda: not ray.get(producer.lent.remote(), timeout=WAIT_S), 30), "it keeps what was cleared"
        client.load_storage_checkpoint(str(tmp_path))
        assert sum(unit["samples"] for unit in client.storage_manager.stats().values()) == 130
        ray.get(producer.put.remote("second", rows), timeout=WAIT_S)
        os.kill(ray.get(producer.pid.remote(), timeout=WAIT_S), signal.SIGKILL)
        with pytest.raises(rtr.PeerLost):
            ray.get(consumer.get.remote("second", ["x"], 130), timeout=WAIT_S)


def test_what_was_put_is_what_every_get_brings() -> None:
    """Whatever the producer and the consumers write to their tensors."""
    with storage() as client:
        producer, consumer = clients(2)
        rows = {"x": torch.randn(3, 1_000_000), "y": torch.arange(3), "big": torch.randn(3, 100_000)}
        ray.get(producer.put.remote("first", rows, overwrites=True), timeout=WAIT_S)
        for _ in range(2):
            got = ray.get(consumer.get.remote("first", [*rows], 3, overwrites=True), timeout=WAIT_S)
            assert all(torch.equal(torch.stack(got[field]), rows[field]) for field in rows)
        client.clear_partition("first")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"units": 3}, "has no settings"),
        ({"num_data_storage_units": 0}, "num_data_storage_units is at least 1, not 0"),
        ({"timeout": "x"}, "timeout is a number of seconds, not 'x'"),
        ({"unit_bytes": "much"}, "unit_bytes is a number of bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    try:
        with pytest.raises(rtr.ConfigurationError, match=message):
            tq.init({"backend": {"storage_backend": transferqueue.NAME, transferqueue.NAME: settings}})
    finally:
        tq.close()


# --- TransferQueue's own tests ---------------------------------------------------------------------------------------

#: With what is left out, and why.
SUITES = {
    "e2e/test_kv_interface_e2e.py": "",
    "e2e/test_e2e_lifecycle_consistency.py": "",
    "e2e/test_checkpoint_e2e.py": "",
    # They patch the ZMQ requests of SimpleStorage, or count on its way to choose a unit.
    "test_async_simple_storage_manager.py": "not (mock_operations or error_handling or routes_from_hash)",
}


@pytest.mark.parametrize("suite", SUITES)
def test_the_tests_of_transferqueue_pass(suite: str, tmp_path: Path) -> None:
    """They are part of its wheel."""
    installed = [file for file in metadata.files("TransferQueue") or () if str(file) == f"tests/{suite}"]
    if not installed:
        pytest.skip("this release of TransferQueue comes without its tests")
    text = Path(str(installed[0].locate())).read_text(encoding="utf-8")
    text = text.replace('"SimpleStorage"', f'"{transferqueue.NAME}"').replace(
        "from transfer_queue.storage import AsyncSimpleStorageManager",
        "from raytorchrpc.integrations.transferqueue import RayTorchRpcStorageManager as AsyncSimpleStorageManager",
    )
    own = tmp_path / Path(suite).name
    own.write_text(f"import raytorchrpc.integrations.transferqueue\n{text}", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SUITES[suite], own.name]
    environment = os.environ | {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "PYTHONPATH": str(Path(rtr.__file__).parents[1]),
    }
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


# --- random kills ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * KILLS)
def test_random_kills_of_units_producers_and_consumers() -> None:
    """A batch arrives whole, or an error names what is lost, in time; and the next batch goes on."""
    chance = random.Random(KILLS)
    with storage() as client:
        producers, consumers = clients(2, max_restarts=-1), clients(2, max_restarts=-1)
        lost = 0
        for number in range(1, KILLS + 1):
            count, size = chance.choice([(64, 2000), (256, 300), (128, 20_000)])
            victim = chance.choice(["unit", "producer", "consumer"])
            in_put = chance.random() < 0.5
            producer, consumer = chance.choice(producers), chance.choice(consumers)
            pids = {"producer": pid_of(producer), "consumer": pid_of(consumer)}
            pid = pids[victim] if victim in pids else chance.choice([*unit_pids(client).values()])
            put = producer.put_ones.remote(number, count, size)
            if in_put:
                ray.wait([put], timeout=chance.random() * 0.02)
                os.kill(pid, signal.SIGKILL)
            is_put = outcome(put) is None
            get = consumer.sums.remote(number, count, size)
            if not in_put:
                ray.wait([get], timeout=chance.random() * 0.02)
                os.kill(pid, signal.SIGKILL)
            error = outcome(get)
            if is_put and victim != "unit":  # what has been put is there, whoever else ends
                assert error is None or (victim == "consumer" and isinstance(error, RayActorError)), error
            lost += error is not None
            again = f"{number} again"
            until = time.monotonic() + WAIT_S
            while True:
                data = {"x": torch.full((count, size), float(number))}
                retried = outcome(producer.put.remote(again, data)) or outcome(consumer.get.remote(again, ["x"], count))
                if retried is None:
                    break
                assert time.monotonic() < until, retried
            if is_put:  # TransferQueue's controller cannot clear rows of a put that has not ended
                client.clear_partition(str(number))
            client.clear_partition(again)
        print(f"{KILLS} kills, {lost} batches did not arrive")


def outcome(ref: Any) -> BaseException | None:
    """None: it succeeded. Raises if it was torn, or takes too long."""
    try:
        ray.get(ref, timeout=WAIT_S)
    except (RayActorError, StorageKeyNotFoundError, rtr.RayTorchRpcError) as error:
        return error
    except AssertionError as error:
        if "torn" in str(error):
            raise
        return error
    return None
