"""vLLM generates with the weights that a trainer publishes; both are real, on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.integrations.vllm_actors import (
    INT8,
    AdapterTrainer,
    AsyncEngine,
    Engine,
    Int8Trainer,
    Server,
    ShardedTrainer,
    Trainer,
    die_in_next_update,
    dtype_and_sum,
    fail_midway,
    fail_to_wait,
    pid_of,
    save_config,
)
from tests.polling import suspend
from tests.unit.members import Members

ROOT = Path(__file__).parents[2]
#: No call lasts longer, unless it says so.
get = partial(ray.get, timeout=120)


@contextmanager
def group_of(path: str, name: str = "default", kind: Any = Trainer, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A trainer that has published its weights, and an engine that knows the store."""
    trainer = ray.remote(kind).options(num_cpus=0).remote(path)
    engine = ray.remote(Engine).options(num_cpus=0).remote(path, **options)
    try:
        get(engine.start_s.remote(), timeout=200)
        with rtr.init_group({"trainer": trainer, "engine": engine}, name=name):
            get(trainer.open.remote())
            get(trainer.step.remote())
            yield trainer, engine
    finally:
        ray.kill(engine)
        ray.kill(trainer)


def agree(trainer: Any, engine: Any) -> bool:
    """Whether both generate the same tokens."""
    ours, its = get([trainer.greedy.remote(), engine.greedy.remote()])
    return bool(ours == its)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes the configuration of a small model; returns its path."""
    return lambda **options: save_config(tmp_path_factory.mktemp("llama"), **options)


@pytest.fixture(scope="module")
def pair(cluster: None, llama: Callable[..., str]) -> Iterator[tuple[Any, Any]]:
    """A trainer, and an engine whose worker is in its actor."""
    with group_of(llama(), "pair") as found:
        yield found


@pytest.mark.parametrize(
    ("into", "how"),
    [("auto", "by layer.*process"), ("layers", "by layer.*process"), ("load_weights", "by load_weights")],
)
def test_each_way_gives_the_published_model(pair: tuple[Any, Any], into: str, how: str) -> None:
    """On a CPU, vLLM packs linear layers, so they are brought layer by layer."""
    trainer, engine = pair
    get(trainer.open.remote(f"by {into}"))
    get(trainer.step.remote())
    get(engine.connect.remote(f"by {into}", into=into))
    assert agree(trainer, engine), "it has the newest version before its first step"
    for _ in range(2):
        version = get(trainer.step.remote())
        get(engine.update.remote(version))
        assert agree(trainer, engine)
    assert re.search(how, get(engine.how.remote()))
    assert {row.pulled for row in rtr.get_group("pair").stats().weights if row.store == f"by {into}"} >= {version}
    assert get(engine.weight_version.remote()) == str(version)


def test_the_first_version_may_come_after_the_engine(pair: tuple[Any, Any]) -> None:
    trainer, engine = pair
    get(trainer.open.remote("later"))
    get(engine.connect.remote("later"))
    assert get(engine.how.remote()) == "None"
    get(trainer.step.remote())
    get(engine.update.remote())
    assert agree(trainer, engine)


def test_a_model_of_other_names_is_refused_and_the_engine_goes_on(pair: tuple[Any, Any]) -> None:
    trainer, engine = pair
    for store, wrong, text in (
        (
            "renamed",
            {"rename": "policy."},
            "LlamaForCausalLM cannot load the weights of 'renamed'.*Hugging Face",
        ),
        ("lacking", {"without": "model.norm.weight"}, r"'lacking' do not fill 'model.norm.weight' of vLLM's Llama"),
    ):
        get(trainer.open.remote(store))
        get(trainer.publish.remote(**wrong))
        with pytest.raises(rtr.ConfigurationError, match=text):
            get(engine.connect.remote(store))
        get(trainer.step.remote())
        get(engine.connect.remote(store))
        get(engine.update.remote())
        assert agree(trainer, engine)


def test_wrong_settings_are_refused(pair: tuple[Any, Any]) -> None:
    trainer, engine = pair
    get(trainer.open.remote("settings"))
    get(trainer.step.remote())
    with pytest.raises(rtr.ConfigurationError, match="into='fast' has to be one of 'auto', 'parameters'"):
        get(engine.connect.remote("settings", into="fast"))
    with pytest.raises(rtr.ConfigurationError, match=r"'parameters' is impossible for 'model.*Unquantized"):
        get(engine.connect.remote("settings", into="parameters"))
    with pytest.raises(rtr.NotFound, match="no such store"):
        get(engine.connect.remote("no such store"))


def test_an_update_that_fails_midway_is_repeated(pair: tuple[Any, Any]) -> None:
    trainer, engine = pair
    get(trainer.open.remote("midway"))
    get(trainer.step.remote())
    get(engine.connect.remote("midway", group_bytes=1))  # each layer alone
    get(engine.update.remote(1))
    assert agree(trainer, engine)
    get(engine.run.remote(fail_midway))
    version = get(trainer.step.remote())
    get(engine.update.remote(version))
    assert agree(trainer, engine)
    get(engine.run.remote(fail_midway, True))
    version = get(trainer.step.remote())
    with pytest.raises(rtr.RayTorchRpcError, match=r"failed midway.*two versions.*update it again.*ZeroDivisionError"):
        get(engine.update.remote(version))
    assert agree(trainer, engine), "the engine repeats it before its next step"
    with pytest.raises(rtr.NotFound, match="version 99"):
        get(engine.update.remote(99))
    assert agree(trainer, engine), "the model stays as it is if the version is not there"


def test_bfloat16_of_a_float32_trainer(llama: Callable[..., str], cluster: None) -> None:
    with group_of(llama(), dtype="bfloat16") as (trainer, engine):
        get(engine.connect.remote())
        get(engine.update.remote(get(trainer.step.remote())))
        name = "model.embed_tokens.weight"
        dtype, total = get(engine.run.remote(dtype_and_sum, name))
        assert (dtype, total) == ("torch.bfloat16", get(trainer.total.remote(name, "bfloat16")))


def test_parameters_that_kernels_read_are_written_in_place(llama: Callable[..., str], cluster: None) -> None:
    """As on GPUs, where vLLM leaves unquantised layers as they were loaded. Tied embeddings are one tensor."""
    with group_of(llama(tie_word_embeddings=True), keep_layout=True) as (trainer, engine):
        get(engine.connect.remote(into="parameters"))
        for _ in range(2):
            get(engine.update.remote(get(trainer.step.remote())))
            assert agree(trainer, engine)
        assert re.fullmatch(r"in its parameters \(.* MB\)", get(engine.how.remote()))


def test_a_quantised_model_takes_the_tensors_of_its_checkpoint(llama: Callable[..., str], cluster: None) -> None:
    """As vLLM loads them from a file; those of the model before it was quantised are refused."""
    path = llama(quantization_config=INT8)
    trainer = ray.remote(Int8Trainer).options(num_cpus=0).remote(path)
    get(trainer.save.remote(path))
    # On processors with AMX, vLLM's kernel takes no float32.
    engine = ray.remote(Engine).options(num_cpus=0).remote(path, load_format="auto", dtype="bfloat16")
    try:
        loaded = get(engine.greedy.remote(), timeout=200)
        with rtr.init_group({"trainer": trainer, "engine": engine}, name="int8"):
            get(trainer.open.remote("int8", keep=4))
            saved = get(trainer.publish_int8.remote())
            get(trainer.change.remote())
            changed = get(trainer.publish_int8.remote())
            get(engine.connect.remote("int8"))
            for version, is_saved in ((changed, False), (saved, True), (changed, False)):
                get(engine.update.remote(version))
                assert (get(engine.greedy.remote()) == loaded) is is_saved
            assert re.search("layer by layer.*process", get(engine.how.remote()))
            get(trainer.open.remote("whole"))
            get(trainer.publish.remote())
            with pytest.raises(rtr.ConfigurationError, match=r"is quantised: publish the tensors of its quantised"):
                get(engine.connect.remote("whole"))
    finally:
        ray.kill(engine)
        ray.kill(trainer)


def test_embeddings_that_are_tied_are_packed_again(llama: Callable[..., str], cluster: None) -> None:
    """vLLM packs the tied matrix for the output layer, which has no tensor of its own in the checkpoint."""
    with group_of(llama(tie_word_embeddings=True)) as (trainer, engine):
        for into in ("layers", "load_weights"):
            get(engine.connect.remote(into=into))
            get(engine.update.remote(get(trainer.step.remote())))
            assert agree(trainer, engine), into


def test_two_engines_of_which_one_is_stopped(llama: Callable[..., str], pair: tuple[Any, Any]) -> None:
    """The trainer and the other engine go on; the stopped one is up to date after one update."""
    trainer, engine = pair
    other = ray.remote(Engine).options(num_cpus=0).remote(llama())
    try:
        rtr.get_group("pair").add({"other": other})
        get(trainer.open.remote("two"))
        get(trainer.step.remote())
        get([each.connect.remote("two") for each in (engine, other)])
        pid = get(other.run.remote(pid_of))
        suspend(pid)
        try:
            for _ in range(3):
                get(engine.update.remote(get(trainer.step.remote())), timeout=60)
                assert agree(trainer, engine)
        finally:
            os.kill(pid, signal.SIGCONT)
        get(other.update.remote())
        assert agree(trainer, other)
    finally:
        rtr.get_group("pair").remove(["other"])
        ray.kill(other)


@pytest.mark.parametrize("shards", [True, False])
def test_a_trainer_of_two_processes_with_fsdp(
    llama: Callable[..., str], cluster: None, tmp_path: Path, shards: bool
) -> None:
    """vLLM's own client and factory drive it. Each process publishes its shards; a state_dict comes from rank 0."""
    path = llama()
    trainers = [
        ray.remote(ShardedTrainer).options(num_cpus=0).remote(path, rank, str(tmp_path / "rendezvous"))
        for rank in range(2)
    ]
    engine = ray.remote(Engine).options(num_cpus=0).remote(path)
    try:
        with rtr.init_group({"t0": trainers[0], "t1": trainers[1], "engine": engine}, name="sharded") as group:
            get([trainer.connect.remote([engine], shards, store="sharded") for trainer in trainers], timeout=120)
            for _ in range(2):
                get([trainer.step.remote() for trainer in trainers], timeout=120)
                assert agree(trainers[0], engine)
            assert get(engine.weight_version.remote()) == "3"
            publishers = {row.member for row in group.stats().weights if row.published}
            assert publishers == ({"t0", "t1"} if shards else {"t0"})
    finally:
        for actor in (*trainers, engine):
            ray.kill(actor)


# --- workers in processes of their own ------------------------------------------------------------------------------


def test_a_worker_in_a_child_process_joins_the_group(llama: Callable[..., str], cluster: None) -> None:
    """vLLM's default. If the worker dies in an update, the engine says so, and a new one is updated."""
    path = llama()
    with group_of(path, in_process=False) as (trainer, engine):
        get(engine.connect.remote())
        get(engine.update.remote(get(trainer.step.remote())))
        assert agree(trainer, engine)
        assert [member.name for member in rtr.get_group().members if member.name.startswith("engine.")]
        get(engine.run.remote(die_in_next_update))
        with pytest.raises(ray.exceptions.RayTaskError, match=r"failed|Engine"):
            get(engine.update.remote(get(trainer.step.remote())), timeout=60)
        rtr.get_group().remove(["engine"])
        ray.kill(engine)
        other = ray.remote(Engine).options(num_cpus=0).remote(path, in_process=False)
        try:
            get(other.start_s.remote(), timeout=200)
            rtr.get_group().add({"other": other})
            get(other.connect.remote())
            get(other.update.remote())
            assert agree(trainer, other)
        finally:
            ray.kill(other)


def test_each_rank_of_a_tensor_parallel_engine_pulls_its_half(llama: Callable[..., str], cluster: None) -> None:
    """Under vLLM's own executor: the ranks are grandchildren of the actor."""
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with group_of(llama(), in_process=False, **parallel) as (trainer, engine):
        get(engine.connect.remote())
        for _ in range(2):
            version = get(trainer.step.remote())
            get(engine.update.remote(), timeout=100)  # without a version: both ranks choose the same
            assert agree(trainer, engine)
        ranks = [row for row in rtr.get_group().stats().weights if row.member.startswith("engine.")]
        assert [rank.pulled for rank in ranks] == [version, version]
        whole = get(trainer.nbytes.remote())
        for rank in ranks:
            assert whole <= rank.bytes_in < whole * 1.02, "two updates by halves; norms are on both ranks"
        get(engine.run.remote(fail_to_wait, 0))
        with pytest.raises(ray.exceptions.RayTaskError, match="the test says so"):
            get(engine.update.remote(), timeout=60)  # no rank waits for the other
        with suppress(ray.exceptions.RayTaskError):  # vLLM reads the second rank's answer to the failed call only now
            get(engine.run.remote(fail_to_wait, None), timeout=60)
        get(trainer.step.remote())
        get(engine.update.remote(), timeout=60)
        assert agree(trainer, engine)


def test_adapters_are_staged_at_every_rank_and_revisions_live_together(
    llama: Callable[..., str], cluster: None
) -> None:
    """Nothing of the base model moves, and no two versions have one name, also after the trainer was restarted."""
    options = {"tensor_parallel_size": 2, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with group_of(llama(), kind=AdapterTrainer, in_process=False, **options) as (trainer, engine):
        get(engine.connect.remote())
        assert agree(trainer, engine)
        expected, adapters = [], []
        for seed in (1, 2):
            expected.append(get(trainer.publish_adapter.remote(seed))[1])
            adapters.append(get(engine.stage.remote()))
            assert 0 < adapters[-1].lora_int_id < 1 << 31, "as on a GPU, where it is an int32"
        base = get(trainer.greedy.remote())
        assert [get(engine.greedy.remote(adapter=adapter)) for adapter in adapters] == expected
        assert base not in expected and expected[0] != expected[1]
        assert agree(trainer, engine), "without an adapter, it is the base"
        rows = [row for row in rtr.get_group().stats().weights if row.store == "adapter" and row.bytes_in]
        assert len(rows) == 2 and all(row.bytes_in < 0.1 * get(trainer.nbytes.remote()) for row in rows)
        with pytest.raises(ray.exceptions.RayTaskError, match=r"version 9 .* is not there"):
            get(engine.stage.remote(9))
        with suppress(ray.exceptions.RayTaskError):  # vLLM reads the second rank's answer to the failed call only now
            get(engine.stage.remote())
        get(trainer.forget_adapters.remote())
        tokens = get(trainer.publish_adapter.remote(3))[1]
        third = get(engine.stage.remote())
        assert get(engine.greedy.remote(adapter=third)) == tokens
        assert get(engine.greedy.remote(adapter=adapters[1])) == expected[1], "this rank has it still"


def test_workers_of_the_ray_executor_join_by_name(llama: Callable[..., str], cluster: None) -> None:
    """They are actors that vLLM creates, busy in an endless method, and of no member's process."""
    path = llama()
    trainer = ray.remote(Trainer).options(num_cpus=0).remote(path)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    engine = ray.remote(Engine).options(num_cpus=0).remote(path, **parallel)
    try:
        get(engine.start_s.remote(), timeout=300)
        config = rtr.GroupConfig(joinable_by="cluster")
        with rtr.init_group({"trainer": trainer, "engine": engine}, config=config, name="executor") as group:
            get(trainer.open.remote())
            get(trainer.step.remote())
            get(engine.connect.remote(group="executor"))
            assert len(group.members) == 4
            version = get(trainer.step.remote())
            get(engine.update.remote(version), timeout=100)
            assert agree(trainer, engine)
            assert [row.pulled for row in group.stats().weights if row.pulled] == [version, version]
    finally:
        ray.kill(engine)
        ray.kill(trainer)


def test_engines_of_an_external_launcher_are_the_ranks(llama: Callable[..., str], cluster: None) -> None:
    """Two actors, each with its engine, are the ranks of one model, as torchrun starts them."""
    path = llama()
    for left in Path("/dev/shm").glob("-tp:0-[[]0-1[]]-cpushm_*"):
        left.unlink()  # of a process that was killed; vLLM gives them the same name each time
    meeting = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting.port}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = True
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    trainer = ray.remote(Trainer).options(num_cpus=0).remote(path)
    engines = []
    for rank in range(2):
        variables = {name: str(its) for name, its in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        engines.append(ray.remote(Engine).options(num_cpus=0).remote(path, variables=variables, **parallel))
    try:
        get([engine.start_s.remote() for engine in engines], timeout=300)
        with rtr.init_group(
            {"trainer": trainer, "engine_0": engines[0], "engine_1": engines[1]}, name="launcher"
        ) as group:
            get(trainer.open.remote())
            get(trainer.step.remote())
            get([engine.connect.remote() for engine in engines])
            version = get(trainer.step.remote())
            get([engine.update.remote() for engine in engines], timeout=100)  # both ranks choose the same
            tokens = get([each.greedy.remote() for each in (trainer, *engines)])
            assert tokens[1:] == tokens[:1] * 2
            assert [row.pulled for row in group.stats().weights if row.pulled] == [version, version]
    finally:
        for actor in (*engines, trainer):
            ray.kill(actor)


def test_every_data_parallel_engine_has_the_version(llama: Callable[..., str], cluster: None) -> None:
    path = llama()
    trainer = ray.remote(Trainer).options(num_cpus=0).remote(path)
    engine = ray.remote(AsyncEngine).options(num_cpus=0).remote(path, data_parallel_size=2)
    try:
        get(engine.start.remote(), timeout=300)
        with rtr.init_group({"trainer": trainer, "engine": engine}) as group:
            get(trainer.open.remote())
            get(trainer.step.remote())
            get(engine.connect.remote("policy"))
            version = get(trainer.step.remote())
            get(engine.update.remote(version), timeout=100)
            for rank in range(2):
                assert get(engine.greedy.remote(data_parallel_rank=rank)) == get(trainer.greedy.remote())
            pulled = [row.pulled for row in group.stats().weights if row.member.startswith("engine.")]
            assert pulled == [version, version]
    finally:
        ray.kill(engine)
        ray.kill(trainer)


def test_an_update_while_requests_run(llama: Callable[..., str], cluster: None) -> None:
    path = llama()
    trainer = ray.remote(Trainer).options(num_cpus=0).remote(path)
    engine = ray.remote(AsyncEngine).options(num_cpus=0).remote(path)
    try:
        get(engine.start.remote(), timeout=200)
        with rtr.init_group({"trainer": trainer, "engine": engine}):
            get(trainer.open.remote())
            get(trainer.step.remote())
            get(engine.connect.remote("policy"))
            for _ in range(2):
                then, count = get(engine.update_while_generating.remote(get(trainer.step.remote())), timeout=100)
                assert 0 < then < count == 60
                assert agree(trainer, engine)
    finally:
        ray.kill(engine)
        ray.kill(trainer)


def test_a_server_is_updated_over_http(llama: Callable[..., str], cluster: None, tmp_path: Path) -> None:
    path = llama()
    trainer = ray.remote(Trainer).options(num_cpus=0).remote(path)
    server = ray.remote(Server).options(num_cpus=0).remote(path, str(tmp_path / "socket"))
    try:
        get(server.ask.remote("GET", "/health"), timeout=250)
        with rtr.init_group({"trainer": trainer, "server": server}):
            get(trainer.open.remote())
            version = get(trainer.step.remote())

            def ask(method: str, path: str, body: Any = None) -> Any:
                return get(server.ask.remote(method, path, body), timeout=100)

            ask("POST", "/init_weight_transfer_engine", {"init_info": {"store": "policy"}})
            ask("POST", "/pause")
            ask("POST", "/start_weight_update")
            ask("POST", "/update_weights", {"update_info": {"version": version}})
            ask("POST", "/finish_weight_update", {"weight_version": str(version)})
            ask("POST", "/resume")
            assert ask("GET", "/weight_info") == {"weight_version": str(version)}
            assert agree(trainer, server)
            assert len(rtr.get_group().members) == 3
            get(server.stop.remote())
    finally:
        ray.kill(server)
        ray.kill(trainer)


def test_a_server_is_updated_by_the_http_client_of_vllm(llama: Callable[..., str], cluster: None) -> None:
    """vLLM's trainer interface and its own client, which reaches the server by a port."""
    path = llama()
    trainer = ray.remote(Trainer).options(num_cpus=0).remote(path)
    server = ray.remote(Server).options(num_cpus=0).remote(path)
    try:
        host, port = get(server.address.remote(), timeout=250)
        with rtr.init_group({"trainer": trainer, "server": server}):
            get(trainer.connect_over_http.remote(f"http://{host}:{port}"))
            for version in ("2", "3"):
                get(trainer.change.remote())
                get(trainer.send.remote())
                assert get(server.ask.remote("GET", "/weight_info")) == {"weight_version": version}
                assert agree(trainer, server)
            get(server.stop.remote())
    finally:
        ray.kill(server)
        ray.kill(trainer)


def test_the_example_trains_though_an_engine_is_killed() -> None:
    command = [sys.executable, "examples/grpo_vllm.py", "--steps", "30"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert "          engine_1: lost" in lines and "          engine_1: back" in lines
    assert lines[-1].startswith("checked: the reward rose")


# --- the adapter's classes, driven directly ---------------------------------------------------------------------------


class TinyModel(torch.nn.Module):
    """What the engines need of a model of vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 3))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        for name, tensor in weights:
            default_weight_loader(dict(self.named_parameters())[name], tensor)


@pytest.fixture(scope="module")
def plugins() -> None:
    """vLLM is imported, which warns of what it uses, and has loaded its plugins."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        import raytorchrpc.integrations.vllm.trainer  # noqa: F401


@pytest.fixture
def members(plugins: None) -> Iterator[Members]:
    with Members(rtr.GroupConfig(rpc_timeout_s=20)) as made:
        yield made


@pytest.fixture
def worker(members: Members) -> Any:
    """The side of a worker, as vLLM's factory makes it."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(model := TinyModel())  # as vLLM does when it makes a model
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1), model_config=SimpleNamespace(dtype=torch.float32)
    )
    return WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="raytorchrpc"), config, torch.device("cpu"), model
    )


class DirectClient:
    """Passes vLLM's requests to one worker, in this process, by JSON; acts as member ``a`` then."""

    def __init__(self, members: Members, worker: Any) -> None:
        self.members, self.worker, self.weight_version = members, worker, ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        with self.members.acting("a"):
            self.worker.init_transfer_engine(self.worker.parse_init_info(json.loads(json.dumps(init_info))))

    def start_weight_update(self) -> None:
        self.worker.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        with self.members.acting("a"):
            self.worker.update_weights(json.loads(json.dumps(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.worker.finish_weight_update()
        self.weight_version = str(weight_version)


def trainer_init(client: Any, source: Any, **options: Any) -> Any:
    """Through vLLM's factory, which finds the backend by the class of the settings."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from raytorchrpc.integrations.vllm.trainer import TrainerInit

    return WeightTransferTrainerFactory.trainer_init(TrainerInit(rank=0, **options), client=client, source=source)


def filled(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 3), float(value))}


def test_an_update_before_init_names_the_call_that_is_missing(members: Members, worker: Any) -> None:
    with members.acting("a"):
        worker.start_weight_update()
        with pytest.raises(rtr.ConfigurationError, match=r"call init_weight_transfer_engine\(.*NAME.* first"):
            worker.update_weights({"version": 1})
        worker.before_step()
        worker.finish_weight_update()
        worker.shutdown()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": "7"}, r"version='7' of UpdateInfo has to be of type int \| None"),
        ({"version": True}, "version=True of UpdateInfo"),
        ({"version": 1.0}, "version=1.0 of UpdateInfo"),
        ({"timeout": "5"}, r"timeout='5' of UpdateInfo has to be of type float \| None"),
        ({"versoin": 7}, "Invalid update_info for WeightEngine: .*'versoin'"),
    ],
)
def test_wrong_fields_of_an_update_are_named(
    members: Members, worker: Any, fields: dict[str, Any], message: str
) -> None:
    client = DirectClient(members, worker)
    with members.acting("home"):
        rtr.WeightStore("policy").publish(filled(1))
    client.init_weight_transfer_engine({"store": "policy"})
    with pytest.raises(ValueError, match=message):
        client.update_weights(fields)
    assert not worker.model.weight.any()
    client.update_weights({"version": 1, "timeout": 20})
    assert bool((worker.model.weight == 1).all())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": 3}, "store=3 of InitInfo has to be of type str"),
        ({"store": None}, "store=None of InitInfo"),
        ({"group": 1}, "group=1 of InitInfo"),
        ({"timeout": "60"}, "timeout='60' of InitInfo has to be of type float"),
        ({"group_bytes": 1.5}, "group_bytes=1.5 of InitInfo has to be of type int"),
        ({"into": None}, "into=None of InitInfo"),
        ({"stor": "policy"}, "Invalid init_info for WeightEngine: .*'stor'"),
    ],
)
def test_wrong_fields_of_an_init_are_named(worker: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worker.parse_init_info(fields)


def test_a_shut_down_engine_is_initialised_again(members: Members, worker: Any) -> None:
    client = DirectClient(members, worker)
    with members.acting("home"):
        for store, value in (("one", 1.0), ("two", 2.0)):
            rtr.WeightStore(store).publish(filled(value))
    for store, value in (("one", 1.0), ("two", 2.0), ("one", 1.0)):
        client.init_weight_transfer_engine({"store": store})
        client.update_weights({"version": 1})
        assert bool((worker.model.weight == value).all())
        worker.shutdown()
        assert worker.how is None
        with pytest.raises(rtr.ConfigurationError, match="call init_weight_transfer_engine"):
            client.update_weights({"version": 1})


def test_an_init_that_fails_leaves_no_earlier_store(members: Members, worker: Any) -> None:
    client = DirectClient(members, worker)
    with members.acting("home"):
        rtr.WeightStore("one").publish(filled(1))
    client.init_weight_transfer_engine({"store": "one"})
    with pytest.raises(rtr.NotFound, match="no such"):
        client.init_weight_transfer_engine({"store": "no such", "timeout": 0.2})
    with pytest.raises(rtr.ConfigurationError, match="call init_weight_transfer_engine"):
        client.update_weights({"version": 1})
    assert not worker.model.weight.any()


def test_a_trainer_by_vllms_factory(members: Members, worker: Any) -> None:
    """From the first weights to an update; a second trainer of the same store goes on with its versions."""
    from raytorchrpc.integrations.vllm.trainer import ModelSource

    client, weights = DirectClient(members, worker), filled(1)
    with members.acting("home"):
        for versions in (("2", "3"), ("5", "6")):
            trainer = trainer_init(client, ModelSource(weights))
            for version in versions:
                weights["weight"].add_(1)
                trainer.send_weights()
                assert torch.equal(worker.model.weight, weights["weight"]) and client.weight_version == version
            trainer.shutdown()


def test_what_a_trainer_cannot_publish_is_refused(members: Members, worker: Any) -> None:
    from raytorchrpc.integrations.vllm.trainer import ModelSource

    class Pipelined(ModelSource):
        def held_names(self) -> list[str]:
            return ["weight"]

    client = DirectClient(members, worker)
    with members.acting("home"):
        for source, message in (
            (None, r"source= is missing: pass ModelSource\(model\)"),
            (Pipelined(filled(1)), "Pipelined yields a part of the model in each process: pass ModelSource"),
        ):
            with pytest.raises(rtr.ConfigurationError, match=message):
                trainer_init(client, source)
        with pytest.raises(rtr.ConfigurationError, match="ModelSource takes a module or its tensors by name"):
            ModelSource(iter(filled(1).items()))  # type: ignore[arg-type]
        with pytest.raises(rtr.ConfigurationError, match="timeout='5' of TrainerInit has to be of type float"):
            trainer_init(client, ModelSource(filled(1)), timeout="5")
        with pytest.raises(rtr.NotFound):
            rtr.WeightStore.find("policy", timeout=0.1)


@pytest.mark.usefixtures("plugins")
def test_metadata_is_the_same_each_time_and_agrees_with_the_tensors() -> None:
    from raytorchrpc.integrations.vllm.trainer import HAS_MODES, ModelSource

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for source in (ModelSource(model), ModelSource(model.state_dict())):
        first, second = (source.metadata if HAS_MODES else source.metadata() for _ in range(2))
        assert [(its.name, its.dtype, its.shape) for its in first] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source
        ]
        assert second == first and [name for name, _ in source] == list(model.state_dict())


def test_the_names_that_vllm_does_not_promise_are_there() -> None:
    """Without those of ``steps``, an engine cannot be used; without the others, it loads whole tensors."""
    importlib.import_module("raytorchrpc.integrations.vllm.steps")
    importlib.import_module("raytorchrpc.integrations.vllm.internals")
