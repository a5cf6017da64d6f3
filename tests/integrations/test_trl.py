"""TRL's own trainers train a small model on a CPU, and a real vLLM server generates with its weights."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raytorchrpc as rtr

with warnings.catch_warnings():  # of trl and what it imports there are many
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    pytest.importorskip("vllm")
    from peft import LoraConfig
    from trl.experimental.async_distillation import async_distillation_trainer
    from trl.experimental.async_grpo import async_grpo_trainer
    from trl.generation import vllm_generation

    from raytorchrpc.integrations.trl import RayTorchRpcWeightTransfer, publish_adapters, use_in_server_mode
    from tests.integrations.trl_actors import (
        greedy,
        make_distillation_trainer,
        make_stable_trainer,
        make_trainer,
        save_model,
    )
from tests.integrations.vllm_actors import Server, Trainer
from tests.polling import suspend

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cluster")]


LORA = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights="gaussian")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def server(path: str, cluster: None) -> Iterator[Server]:
    """A server that this process has started."""
    # TRL's rollouts ask for probabilities, which takes a tokenizer.
    server = Server(path, options=("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"))
    try:
        yield server
    finally:
        server.stop()


class Orphan(Server):
    """A server below no process of the tests."""

    def start(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
        variables["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        shell = ["sh", "-c", '"$@" & echo $!', "sh", *command]  # the shell ends, and the server stays
        started = super().start(shell, variables)
        assert started.stdout is not None
        self.pid = int(started.stdout.readline())
        return started

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        self._reader.join(60)  # until it has closed its output


def other_weights(path: str) -> dict[str, Any]:
    """The tensors of a model with other random weights."""
    return Trainer(path, seed=random.randrange(1000)).model.state_dict()


def url_of(server: Server) -> str:
    return "http://{}:{}".format(*server.address())


def test_a_trainer_and_its_rollouts_work_as_with_the_transfer_of_trl(path: str, server: Server, tmp_path: Path) -> None:
    url = url_of(server)
    trainer = make_trainer(path, url, tmp_path, RayTorchRpcWeightTransfer(url))
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.model_version == 4
    assert server.greedy() == greedy(trainer, path)


def test_a_student_of_a_distillation_brings_its_weights(path: str, server: Server, tmp_path: Path) -> None:
    url = url_of(server)
    trainer = make_distillation_trainer(path, url, tmp_path, RayTorchRpcWeightTransfer(url))
    trainer.train()
    assert trainer.state.global_step == 3
    assert server.greedy() == greedy(trainer, path)


@pytest.fixture
def server_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's client is replaced for one test."""
    monkeypatch.setattr(vllm_generation, "VLLMClient", vllm_generation.VLLMClient)
    use_in_server_mode(timeout=60)


@pytest.mark.parametrize(("kind", "lend", "peft"), [("GRPO", False, None), ("RLOO", True, None), ("GRPO", True, LORA)])
@pytest.mark.usefixtures("server_mode")
def test_a_trainer_in_server_mode_brings_its_weights(
    kind: str, lend: bool, peft: Any, path: str, server: Server, tmp_path: Path
) -> None:
    use_in_server_mode(timeout=60, lend=lend)
    trainer = make_stable_trainer(kind, path, url_of(server), tmp_path, peft)
    trainer.train()
    assert trainer.state.global_step == 3
    trainer.vllm_generation.sync_weights()
    assert server.greedy() == greedy(trainer, path)
    held = sum(row.held for row in rtr.get_group("trl").stats().weights)
    assert (held == 0) == lend, "the store has no memory of what is lent"
    trainer.vllm_generation.vllm_client.close_communicator()


@pytest.fixture(scope="module")
def lora_server(path: str, cluster: None) -> Iterator[Server]:
    options = ("--load-format", "auto", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    server = Server(path, options=(*options, "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"))
    try:
        yield server
    finally:
        server.stop()


def assert_the_adapter_alone_was_sent() -> None:
    stats = {row.store: row.bytes_out for row in rtr.get_group("trl").stats().weights if row.bytes_out}
    assert set(stats) == {"policy-adapter"} and stats["policy-adapter"] < 5 * 32_000


@pytest.mark.usefixtures("server_mode")
def test_of_a_peft_model_the_adapter_alone_is_sent(path: str, lora_server: Server, tmp_path: Path) -> None:
    base = lora_server.greedy()
    trainer = make_stable_trainer("GRPO", path, url_of(lora_server), tmp_path, LORA)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    tokens, client = greedy(trainer, path), trainer.vllm_generation.vllm_client
    assert lora_server.greedy(model=client.model) == tokens
    assert lora_server.greedy() == base, "which was not sent"
    assert_the_adapter_alone_was_sent()
    loaded = {model["id"] for model in lora_server.ask("GET", "/v1/models")["data"]}
    assert loaded == {path, client.model}, "the server keeps no earlier adapter"
    client.communicator._vllm.unload_lora_adapter(client.model)
    assert lora_server.greedy(model=client.model) == tokens, "a server that was restarted finds it by its name"
    client.close_communicator()


def test_an_asynchronous_trainer_publishes_its_adapter_alone(
    path: str, lora_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (async_grpo_trainer, async_distillation_trainer):
        monkeypatch.setattr(module, "save_lora_adapter", module.save_lora_adapter)
        monkeypatch.setattr(module.VLLMClient, "load_lora_adapter", module.VLLMClient.load_lora_adapter)
    publish_adapters(timeout=60)
    trainer = make_trainer(path, url_of(lora_server), tmp_path, None, LORA, max_staleness=0)
    trainer.train()
    assert trainer.model_version == 4
    assert lora_server.greedy(model="trl-policy-v4") == greedy(trainer, path)
    assert_the_adapter_alone_was_sent()
    assert not list(tmp_path.glob("**/adapter_config.json")), "there are no files"
    rtr.get_group("trl").shutdown()


def test_a_server_that_nobody_started_joins_by_ray(path: str, tmp_path: Path) -> None:
    """As ``vllm serve`` in another terminal: its workers connect to Ray, and join the trainer's group by its name."""
    server = Orphan(path, options=())
    try:
        transfer = RayTorchRpcWeightTransfer(url_of(server), group="apart")
        trainer = make_trainer(path, url_of(server), tmp_path, transfer, max_steps=1)
        trainer.train()
        assert server.greedy() == greedy(trainer, path)
    finally:
        server.stop()


def test_failures_are_told_and_the_next_update_works(path: str, server: Server) -> None:
    weights = other_weights(path)
    url = url_of(server)
    transfer = RayTorchRpcWeightTransfer(url, group="failures", timeout=60)
    try:
        transfer.init_weight_transfer()
        with pytest.raises(rtr.RayTorchRpcError, match=rf"{url} has not taken version 1 of 'policy'"):
            transfer.send_weights((f"policy.{name}", its) for name, its in weights.items())
        transfer.pause()
        transfer.send_weights(iter(weights.items()))
        transfer.resume()
        assert len(server.greedy()) == 12

        def failing() -> Iterator[tuple[str, Any]]:
            yield next(iter(weights.items()))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            transfer.send_weights(failing())
        transfer.send_weights(iter(weights.items()))
        transfer.resume()
    finally:
        transfer.destroy()
    transfer.destroy()
    with pytest.raises(rtr.NotAMember):
        rtr.get_group("failures")
    transfer.send_weights(iter(weights.items()))  # a second train(): the group is formed again
    transfer.resume()
    transfer.destroy()


def test_a_server_that_is_stopped_does_not_hold_up_the_trainer_for_ever(path: str) -> None:
    server = Server(path, options=())
    try:
        transfer = RayTorchRpcWeightTransfer(url_of(server), group="stopped", timeout=60)
        transfer.init_weight_transfer()
        transfer.send_weights(iter(other_weights(path).items()))
        transfer.resume()
        transfer.timeout = 3
        suspend(server.process.pid)
        try:
            with pytest.raises(rtr.RayTorchRpcError, match=r"has not taken version 2.*timed out"):
                transfer.send_weights(iter(other_weights(path).items()))
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        transfer.timeout = 60
        transfer.send_weights(iter(other_weights(path).items()))
        transfer.resume()
        server.stop()
        with pytest.raises(rtr.RayTorchRpcError, match="has not taken version 4"):
            transfer.send_weights(iter(other_weights(path).items()))
        transfer.destroy()
    finally:
        server.process.kill()


def test_a_member_of_another_group_is_told_the_argument(server: Server) -> None:
    with rtr.init_group([], name="mine", include_driver=True, config=rtr.GroupConfig(joinable_by="cluster")):
        transfer = RayTorchRpcWeightTransfer(url_of(server))
        with pytest.raises(rtr.NotAMember, match=r"no group 'trl' \(known here: mine\)"):
            transfer.init_weight_transfer()
