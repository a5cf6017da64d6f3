"""Post-training of a language model: two FSDP2 trainers, and two generators that share one tensor-parallel model.

The generators sample answers from a small Llama-style model with random weights and put them into a queue. The trainers
update the model with REINFORCE and publish each version of it to a weight store, every trainer its own shards. The
generators prefetch the newest version while they sample with the previous one, then swap. The reward of an answer is
the share of one token in it. In the middle of the run one generator is killed: Ray restarts it, it rejoins its group,
the pair forms its process group again, and the run goes on.

    python examples/rl_post_training.py          # forty steps on CPUs; --gpus 4 and --gpus 2 use GPUs
    python examples/rl_post_training.py --quick  # the short form

The last line reports what was checked. If the reward did not double, or versions went back, the exit status is 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor, nn

import raytorchrpc as rtr

VOCABULARY, WANTED, ANSWER, ANSWERS = 32, 7, 12, 64
TRAINERS, GENERATORS = ["trainer_0", "trainer_1"], ["generator_0", "generator_1"]
#: What a collective raises after its process group has ended.
ABORTED = (RuntimeError, ValueError, rtr.ProcessGroupLost)


class Step(NamedTuple):
    """One step of a trainer, or the mean of both."""

    version: float  # published by this step
    reward: float
    lag: float  # versions between the one that the samples came from and the one that learned from them
    publish_s: float
    swap_s: float  # in a generator; includes the wait for the rest of the prefetch


@dataclass
class Result:
    steps: list[Step]
    versions: list[list[int]]  # that each generator's last process used


def make_model(options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # only in the actors: it takes seconds

    torch.manual_seed(options.seed)
    size = {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden, "num_hidden_layers": options.layers}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, **size)
    return LlamaForCausalLM(config).to(options.device)


@ray.remote
class Trainer:
    """One of two FSDP2 ranks."""

    def __init__(self, rank: int, options: Any) -> None:
        self._rank, self._options = rank, options

    def open_store(self) -> tuple[str, int]:
        """For the trainers' process group, which is torch's alone: the group's own one is that of the generators."""
        self._store = dist.TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
        return self._store.host, self._store.port

    def start(self, address: tuple[str, int], samples: rtr.Queue, weights: rtr.WeightStore) -> None:
        """Shards the model and publishes its first version."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        options = self._options
        store = self._store if self._rank == 0 else dist.TCPStore(*address)
        dist.init_process_group(options.backend, store=store, rank=self._rank, world_size=len(TRAINERS))
        mesh = init_device_mesh(options.device, (len(TRAINERS),))
        self._model = make_model(options)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=0.005)
        self._samples, self._weights = samples, weights
        self._version = weights.publish(self._model)

    def step(self) -> Step:
        """Updates the model with one item of the queue for each trainer, and publishes the next version."""
        batch = self._samples.get(120)
        answers, rewards = batch["answers"].to(self._options.device), batch["reward"].to(self._options.device)
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # the baseline is the mean of the item
        logits = self._model(answers[:, :-1], use_cache=False).logits
        chosen = logits.log_softmax(2).gather(2, answers[:, 1:, None]).squeeze(2)
        self._optimizer.zero_grad()
        (-chosen * advantage[:, None]).mean().backward()  # FSDP averages the trainers' gradients
        self._optimizer.step()
        lag, began = self._version - batch["version"], time.perf_counter()
        self._version = self._weights.publish(self._model)  # this trainer's shards
        return Step(self._version, rewards.mean().item(), lag, time.perf_counter() - began, batch["swap_s"])

    def finish(self) -> None:
        if self._rank == 0:
            self._samples.close(force=True)  # ends the generators
        dist.destroy_process_group()


@ray.remote(max_restarts=1)
class Generator:
    """One of two tensor-parallel ranks. Both do the same, and the first one puts the samples."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self._versions: list[int] = []  # used by this process

    def generate(self, samples: rtr.Queue, weights: rtr.WeightStore) -> list[int]:
        """Generates until the queue is closed. Returns the versions that this process used."""
        while True:
            number = rtr.process_group_info(timeout=120).number  # waits for the first one, and after a loss
            try:
                if self._generate(number, samples, weights):
                    return self._versions
            except ABORTED:
                until = time.monotonic() + 10
                while not has_ended(number):
                    if time.monotonic() > until:
                        raise  # not because of a loss
                    time.sleep(0.05)

    def _generate(self, number: int, samples: rtr.Queue, weights: rtr.WeightStore) -> bool:
        """Returns whether the queue was closed; False if the process group has ended."""
        group, closed, used, swap_s = rtr.process_group(), False, 0, 0.0
        model = self._tensor_parallel_model()  # made anew, because its DTensors belong to the process group
        control = dist.new_group(backend="gloo")  # a wait in nccl would keep the GPU busy
        while True:
            # Both ranks must use the same version, so the first one chooses. 0: the queue is closed.
            chosen = torch.tensor(weights.wait() if group.rank() == 0 and not closed else 0)
            dist.broadcast(chosen, 0, group=control)
            if (newest := int(chosen)) == 0:
                return True
            if used == 0:
                used = weights.pull(model, newest)
                self._versions.append(used)
            prefetch = weights.prefetch(model, newest) if newest > used else None
            answers = self._sample(model, group)
            if has_ended(number):
                return False  # with nccl, the answers are undefined then
            if group.rank() == 0:
                parts = answers.chunk(len(TRAINERS))
                items = [{"answers": part, "reward": reward(part), "version": used, "swap_s": swap_s} for part in parts]
                try:
                    samples.put_many(items, 120)  # blocks while the queue is full
                except rtr.Closed:
                    closed = True
            if prefetch is not None:
                began = time.perf_counter()
                used = prefetch.swap()
                swap_s = time.perf_counter() - began
                self._versions.append(used)

    def _tensor_parallel_model(self) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
        plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        mesh = init_device_mesh(self._options.device, (dist.get_world_size(),))
        return parallelize_module(make_model(self._options), mesh, plan).eval()

    @torch.no_grad()
    def _sample(self, model: nn.Module, group: dist.ProcessGroup) -> Tensor:
        """Returns answers for all trainers, each after a random token that stands for its prompt."""
        last = torch.randint(VOCABULARY, (len(TRAINERS) * ANSWERS, 1), device=self._options.device)
        tokens, cache = [last], None
        for _ in range(ANSWER):
            output = model(last, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            last = torch.multinomial(output.logits[:, -1].softmax(1), 1)
            dist.broadcast(last, 0, group=group)  # so that both ranks go on with the same tokens
            tokens.append(last)
        return torch.cat(tokens, 1).cpu()


def reward(answers: Tensor) -> Tensor:
    """The share of the wanted token, without the prompt."""
    return (answers[:, 1:] == WANTED).float().mean(1)


def has_ended(number: int) -> bool:
    """Whether this member's process group of that number has ended."""
    try:
        return rtr.process_group_info().number != number
    except rtr.ProcessGroupLost:
        return True


def start_actors(options: Any) -> dict[str, Any]:
    """With four GPUs, each actor gets one. With two, a trainer and a generator share one."""
    places: list[dict[str, Any]] = [{}] * 4
    if gpus := options.gpus:
        bundles = placement_group([{"GPU": 1, "CPU": 1}] * gpus)
        ray.get(bundles.ready(), timeout=60)
        strategies = [PlacementGroupSchedulingStrategy(bundles, number % gpus) for number in range(4)]
        places = [{"num_gpus": gpus / 4, "num_cpus": 0, "scheduling_strategy": strategy} for strategy in strategies]
    trainers = [Trainer.options(**place).remote(rank, options) for rank, place in enumerate(places[:2])]
    generators = [Generator.options(**place).remote(options) for place in places[2:]]
    return dict(zip(TRAINERS + GENERATORS, trainers + generators, strict=True))


def train(options: Any) -> Result:
    actors = start_actors(options)
    trainers = [actors[name] for name in TRAINERS]
    steps: list[Step] = []
    with rtr.init_group(actors) as group:
        samples = rtr.Queue("samples", home=TRAINERS[0], maxsize=2)
        # Three versions may be published between the choice of one and the start of its pull in both generators.
        weights = rtr.WeightStore("policy", publishers=TRAINERS, keep=4)
        running: dict[str, Any] = {}

        def start_generators(names: list[str]) -> None:
            group.process_group(options.backend, members=GENERATORS)
            running.update((name, actors[name].generate.remote(samples, weights)) for name in names)

        def on_change(change: Any) -> None:
            print(f"          {', '.join(change.members)}: {change.kind}")
            if change.kind == "back":
                start_generators(list(change.members))  # the partner still runs and waits for the process group

        address = ray.get(trainers[0].open_store.remote())
        starting = [trainer.start.remote(address, samples, weights) for trainer in trainers]
        start_generators(GENERATORS)
        ray.get(starting)
        group.on_change(on_change)
        for number in range(options.steps):
            if number == options.steps // 2:
                ray.kill(actors[GENERATORS[1]], no_restart=False)
            reports = ray.get([trainer.step.remote() for trainer in trainers])
            step = Step(*(sum(values) / len(values) for values in zip(*reports, strict=True)))
            print(
                f"step {number:3}: version {step.version:3.0f}, reward {step.reward:.2f}, lag {step.lag:.1f}, "
                f"publish {1000 * step.publish_s:5.1f} ms, swap {1000 * step.swap_s:5.1f} ms"
            )
            steps.append(step)
        ray.get([trainer.finish.remote() for trainer in trainers])
        versions = [ray.get(running[name]) for name in GENERATORS]
    return Result(steps, versions)


def main(arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description="REINFORCE with FSDP2 trainers and tensor-parallel generators.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_const", dest="steps", const=12, help="twelve steps")
    parser.add_argument("--gpus", type=int, default=0, help="2 or 4; 0 (the default) runs on CPUs with gloo")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model, a multiple of 8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps < 8:
        parser.error("--steps must be at least 8")
    if options.gpus not in (0, 2, 4):
        parser.error("--gpus must be 0, 2 or 4")
    if find_spec("transformers") is None:
        sys.exit("rl_post_training: it needs transformers: pip install '.[llm]' in a checkout")
    options.device, options.backend = ("cuda", "nccl") if options.gpus else ("cpu", "gloo")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    result = train(options)
    published: list[Any] = [step.version for step in result.steps]
    first, last = (sum(step.reward for step in part) / 3 for part in (result.steps[:3], result.steps[-3:]))
    if last < 2 * first:
        sys.exit(f"rl_post_training: the reward went from {first:.2f} to {last:.2f}, but must double")
    if any(versions != sorted(versions) for versions in (published, *result.versions)):
        sys.exit(f"rl_post_training: versions did not ascend: {published}, {result.versions}")
    print(
        f"checked: the reward rose from {first:.2f} to {last:.2f}, versions ascended to {published[-1]:.0f}, "
        f"and {GENERATORS[1]} rejoined with version {result.versions[1][0]}"
    )
    return result


if __name__ == "__main__":
    logging.getLogger("raytorchrpc").setLevel(logging.ERROR)  # train() prints the loss of a member
    try:
        main()
    except (rtr.RayTorchRpcError, RayError, ConnectionError) as error:
        reason = error.cause if isinstance(error, RayTaskError) else error
        sys.exit(f"rl_post_training: {type(reason).__name__}: {str(reason).splitlines()[0]}")
