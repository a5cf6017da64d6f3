"""Weights of trainers in the rollout workers of verl's own manager, brought by raytorchrpc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayError

import raytorchrpc as rtr

pytest.importorskip("verl", exc_type=ImportError)

from tests.integrations import verl_actors
from tests.integrations.verl_actors import (
    Replica,
    Trainers,
    config_of,
    manager_of,
    start_replicas,
    start_trainers,
)

# verl's own environment has another package of the name tests, which Ray's workers would look into.
ray.cloudpickle.register_pickle_by_value(verl_actors)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cluster")]
#: No call lasts longer, unless it says so.
get = partial(ray.get, timeout=120)


class Job(NamedTuple):
    """Two trainers of verl, two replicas, and its manager."""

    config: Any
    trainers: Trainers
    replicas: list[Replica]
    manager: Any

    def step(self) -> dict[str, torch.Tensor]:
        """A step of training; returns the model."""
        return ray.get([trainer.step.remote() for trainer in self.trainers.actors], timeout=60)[0]

    def own(self, replicas: list[Replica] | None = None) -> list[dict[str, torch.Tensor]]:
        chosen = self.replicas if replicas is None else replicas
        return ray.get([replica.workers[0].own.remote() for replica in chosen], timeout=60)


def make_job(folder: Path, **options: Any) -> Job:
    config = config_of(**options)
    trainers = start_trainers(config, str(folder / "trainers"))
    replicas = start_replicas(config, str(folder / "replicas"))
    return Job(config, trainers, replicas, manager_of(config, trainers, replicas))


def end_job(job: Job) -> None:
    for actor in [*job.trainers.actors, *(replica.workers[0] for replica in job.replicas)]:
        ray.kill(actor)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Parts of 1 MB, of a model of 0.8 MB in layers of 0.26 MB."""
    made = make_job(tmp_path)
    yield made
    end_job(made)


def make_toy(folder: Path) -> None:
    """A model of two layers, its tokenizer, prompts, and a reward."""
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *map(str, range(29))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = {"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, **tokens)).save_pretrained(folder)
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"{at} {at + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": at},
        }
        for at in range(16)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    reward = "def compute_score(data_source, solution_str, **_):\n    return len(set(solution_str.split())) / 8\n"
    (folder / "reward.py").write_text(reward, encoding="utf-8")


def assert_equal(found: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    for its in found:
        assert its.keys() == wanted.keys()
        assert all(torch.equal(its[name], wanted[name]) for name in wanted)


def test_rollouts_have_the_model_after_each_update(job: Job) -> None:
    for step in range(3):
        wanted = job.step()
        metrics = job.manager.update_weights(global_steps=step)
        assert_equal(job.own(), wanted)
        assert metrics["raytorchrpc/publish_s"] > 0


def test_the_model_comes_in_parts_of_which_each_trainer_publishes_a_share(tmp_path: Path) -> None:
    config = config_of(megabytes=1)
    trainers = start_trainers(config, str(tmp_path / "trainers"), layers=3, width=600)  # a layer is larger than a part
    replicas = start_replicas(config, str(tmp_path / "replicas"))
    made = Job(config, trainers, replicas, manager_of(config, trainers, replicas))
    try:
        wanted = made.step()
        whole = sum(tensor.nbytes for tensor in wanted.values())
        metrics = made.manager.update_weights(global_steps=1)
        assert_equal(made.own(), wanted)
        assert 0 < metrics["raytorchrpc/publish_bytes"] < 0.7 * whole
    finally:
        end_job(made)


def test_trainers_in_a_group_of_the_users_publish_weights_and_take_rollouts(job: Job) -> None:
    """Weights by the checkpoint engine and rollouts by the storage of TransferQueue, in actors that have a group."""
    tq = pytest.importorskip("transfer_queue")
    from raytorchrpc.integrations import transferqueue

    def put(number: int) -> None:
        import transfer_queue
        from tensordict import TensorDict

        transfer_queue.init()
        rows = {"tokens": torch.arange(number, number + 4)[:, None].expand(4, 50_000)}
        transfer_queue.kv_batch_put([f"{number}_{row}" for row in range(4)], "train", TensorDict(rows, batch_size=4))

    def take(number: int) -> list[int]:
        import transfer_queue

        transfer_queue.init()
        got = transfer_queue.kv_batch_get([f"{number}_{row}" for row in range(4)], "train")["tokens"]
        assert all(int(row[0]) == int(row[-1]) and len(row) == 50_000 for row in got.unbind())
        return [int(row[0]) for row in got.unbind()]

    def tell(number: int) -> None:
        rtr.Queue("steps", group="mine").put(number)

    def hear() -> Any:
        return rtr.Queue("steps", group="mine", home="first").get(60)

    workers = [replica.workers[0] for replica in job.replicas]
    with rtr.init_group(dict(zip(("first", "second"), job.trainers.actors, strict=True)), name="mine"):
        tq.init({"backend": {"storage_backend": transferqueue.NAME}})
        try:
            for step in range(2):
                wanted = job.step()
                job.manager.update_weights(global_steps=step)
                assert_equal(job.own(), wanted)
                numbers = [100 * step, 100 * step + 10]
                get(
                    [
                        worker.__ray_call__.remote(lambda _, n=n: put(n))
                        for worker, n in zip(workers, numbers, strict=True)
                    ]
                )
                taken = [
                    trainer.__ray_call__.remote(lambda _, n=n: take(n))
                    for trainer, n in zip(job.trainers.actors, numbers, strict=True)
                ]
                assert get(taken) == [[*range(n, n + 4)] for n in numbers]
                get(job.trainers.actors[0].__ray_call__.remote(lambda _: tell(7)))
                assert get(job.trainers.actors[1].__ray_call__.remote(lambda _: hear())) == 7
        finally:
            tq.close()


#: Of verl's trainer as it is, but for the sizes of the toy and for what a host without a GPU needs.
RECIPE = """
algorithm.adv_estimator=grpo data.train_files={toy}/data.parquet data.val_files={toy}/data.parquet
data.train_batch_size=4 data.max_prompt_length=16 data.max_response_length=8 data.dataloader_num_workers=0
actor_rollout_ref.model.path={toy} actor_rollout_ref.model.use_remove_padding=False
+actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.name=toy actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
reward.num_workers=1 reward.custom_reward_function.path={toy}/reward.py
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.device=cpu trainer.total_training_steps=2 trainer.logger=[console]
trainer.save_freq=-1 trainer.test_freq=-1 trainer.val_before_train=False trainer.resume_mode=disable
ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=False
"""


def test_the_trainer_of_verl_keeps_its_rollouts_in_the_storage(tmp_path: Path) -> None:
    """``verl.trainer.main_ppo`` with the backend that its configuration names; verl_cpu.py is the inference engine."""
    pytest.importorskip("transfer_queue")
    make_toy(tmp_path)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(rtr.__file__).parents[1]), str(Path(__file__).parent)]),
        "VERL_PLATFORM": "toy",
        "VERL_ENGINE_DEVICE": "cuda",  # verl has one engine of FSDP for all devices, and lists it for some
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,raytorchrpc.integrations.transferqueue",
    }
    environment.pop("RAY_ADDRESS", None)
    options = [*RECIPE.format(toy=tmp_path).split(), "transfer_queue.backend.storage_backend=RayTorchRpc"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *options]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=840, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert "step:1 " in run.stdout and "step:2 " in run.stdout
    assert "_TQ_STORAGE with key RayTorchRpc" in run.stdout + run.stderr  # TransferQueue says so when it ends


def test_a_rollout_that_dies_in_an_update_leaves_the_next_ones_to_the_others(job: Job, tmp_path: Path) -> None:
    job.step()
    job.manager.update_weights(global_steps=1)
    dying, living = job.replicas
    get(dying.workers[0].die_in_next_update.remote())
    with pytest.raises(RayActorError):
        job.manager.update_weights(global_steps=2)
    job.manager.remove_replicas([dying])
    wanted = job.step()
    job.manager.update_weights(global_steps=3)
    assert_equal(job.own([living]), wanted)
    added = start_replicas(job.config, str(tmp_path / "added"), count=1)
    job.manager.add_replicas(added)
    wanted = job.step()
    job.manager.update_weights(global_steps=4)
    assert_equal(job.own([living, *added]), wanted)
    ray.kill(added[0].workers[0])


def test_an_update_whose_trainer_fails_leaves_the_next_one_to_work(job: Job) -> None:
    job.step()
    get([trainer.misbehave.remote(fails_after=3) for trainer in job.trainers.actors])
    with pytest.raises(RayError, match="out of memory, for instance"):
        job.manager.update_weights(global_steps=1)
    get([trainer.misbehave.remote() for trainer in job.trainers.actors])
    wanted = job.step()
    job.manager.update_weights(global_steps=2)
    assert_equal(job.own(), wanted)


def test_trainers_with_different_tensors_are_refused_and_the_remedy_works(job: Job, tmp_path: Path) -> None:
    job.step()
    get(job.trainers.actors[1].misbehave.remote(left_out="1.weight"))
    with pytest.raises(rtr.ConfigurationError, match="share=False"):
        job.manager.update_weights(global_steps=1)
    (tmp_path / "again").mkdir()
    again = make_job(tmp_path / "again", share=False)
    try:
        get(again.trainers.actors[1].misbehave.remote(left_out="1.weight"))
        wanted = again.step()
        again.manager.update_weights(global_steps=1)
        assert_equal(again.own(), wanted)
    finally:
        end_job(again)
