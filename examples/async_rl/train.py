"""Asynchronous reinforcement learning: environments play, judges score, and a learner learns, all at the same time.

The policy sees a letter and chooses the next one; it should count: b after a, c after b. Environments put frames into a
queue, judges put their rewards into a second one, and the learner publishes each version of the policy. A full queue
holds up who puts, so no batch is far behind. A placement group gives the environments nodes of their own.

    python train.py                                # on this machine: one environment is killed, and comes back
    python train.py --compare                      # the same over plain Ray, too: lines and seconds
    python train.py --checkpoint run.pt            # again: goes on from there
    python train.py --nodes 2 --environments 16 --judges 4 --pixels 28224 --hidden 2048 --learner-gpus 1

``rayjob.yaml`` runs it on Kubernetes. If the policy has not learned to count, the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import os
import statistics
import sys
import threading
import time
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from ray.util.metrics import Gauge
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.queue import Queue as RayQueue
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor, nn

import raytorchrpc as rtr

LETTERS, CLIP = 16, 0.2


def make_policy(hidden: int) -> nn.Module:
    """Letters in, the logarithms of the chances of each next letter out."""
    torch.set_num_threads(1)  # the actors share the machine
    torch.manual_seed(0)
    layers = [nn.Embedding(LETTERS, hidden), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, LETTERS)]
    return nn.Sequential(*layers, nn.LogSoftmax(-1))


def make_frames(pixels: int) -> Tensor:  # one of each letter
    return torch.randn(LETTERS, pixels, generator=torch.Generator().manual_seed(0))


class Direct:
    def __init__(self, waiting: int) -> None:
        self.frames = rtr.Queue("frames", home="judge_0", maxsize=waiting)
        self.rewards = rtr.Queue("rewards", home="learner", maxsize=waiting)
        self.weights = rtr.WeightStore("policy", home="learner")

    def publish(self, model: nn.Module) -> int:
        return self.weights.publish(model)

    def pull(self, model: nn.Module, since: int) -> int:
        return self.weights.pull(model, since=since)  # in place, and only if there is a newer version

    def close(self) -> None:
        self.frames.close(force=True)
        self.rewards.close(force=True)


class PlainRay:
    @ray.remote(num_cpus=0)
    class Newest:
        version = 0, None

        def exchange(self, reference: Any = None) -> tuple[int, Any]:
            self.version = (self.version[0] + 1, reference) if reference else self.version
            return self.version

    def __init__(self, waiting: int) -> None:
        self.frames, self.rewards = (RayQueue(waiting, actor_options={"num_cpus": 0}) for _ in range(2))
        self.weights = self.Newest.remote()

    def publish(self, model: nn.Module) -> int:
        return ray.get(self.weights.exchange.remote([ray.put(model.state_dict())]))[0]

    def pull(self, model: nn.Module, since: int) -> int:
        version, reference = ray.get(self.weights.exchange.remote())
        if version > since:
            model.load_state_dict(ray.get(reference[0]))
        return version

    def close(self) -> None:
        self.frames.shutdown(force=True)
        self.rewards.shutdown(force=True)


@ray.remote(max_restarts=-1, max_task_retries=-1)  # Ray starts a killed process and run() again
class Environment:
    def __init__(self, given: argparse.Namespace, number: int) -> None:
        self.given, self.policy, self.screen = given, make_policy(given.hidden), make_frames(given.pixels)
        torch.manual_seed(number)
        self.noise = 0.1 * torch.randn(given.episodes, given.steps + 1, given.pixels)

    def run(self, link: Any) -> None:
        version = 0
        with contextlib.suppress(rtr.Closed, RayActorError):  # the end of the queues
            while True:
                version = link.pull(self.policy, version)
                link.frames.put(self.play() | {"version": version})  # waits while the queue is full

    @torch.no_grad()
    def play(self) -> dict[str, Any]:
        letters, chances = [torch.randint(LETTERS, (self.given.episodes,))], []
        for _ in range(self.given.steps):
            outlook = self.policy(letters[-1])
            letters.append(outlook.exp().multinomial(1).squeeze(1))
            chances.append(outlook.gather(1, letters[-1][:, None]).squeeze(1))
        seen = torch.stack(letters, 1)  # shape (episodes, steps + 1), and one frame for each
        return {"letters": seen, "chances": torch.stack(chances, 1), "frames": self.screen[seen].add_(self.noise)}


@ray.remote
class Judge:  # sees only frames; in a real program it is a model of its own, or a tool
    def __init__(self, given: argparse.Namespace) -> None:
        self.screen = make_frames(given.pixels)

    def run(self, link: Any) -> None:
        with contextlib.suppress(rtr.Closed, RayActorError):
            while True:
                batch = link.frames.get()
                letters = (batch.pop("frames") @ self.screen.T).argmax(-1)
                batch["reward"] = (letters[:, 1:] == (letters[:, :-1] + 1) % LETTERS).float()
                link.rewards.put(batch)


@ray.remote
class Learner:
    def __init__(self, given: argparse.Namespace) -> None:
        self.device = "cuda" if given.learner_gpus else "cpu"
        self.policy = make_policy(given.hidden).to(self.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.gauges = [Gauge(f"async_rl_{name}", f"{name} of the last batch") for name in ("reward", "behind")]

    def update(self, link: Any) -> tuple[float, int]:
        """Returns the mean reward of the batch, and how many versions behind the policy was that played it."""
        batch = link.rewards.get()
        letters, old, reward = (batch[name].to(self.device) for name in ("letters", "chances", "reward"))
        new = self.policy(letters[:, :-1]).gather(2, letters[:, 1:, None]).squeeze(2)
        ratio, better = (new - old).exp(), reward - reward.mean()
        loss = -torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        result = float(reward.mean()), link.publish(self.policy) - 1 - batch["version"]
        for gauge, value in zip(self.gauges, result, strict=True):
            gauge.set(value)
        return result

    def save(self, path: str, update: int) -> None:
        state = {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(), "update": update}
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)  # a crash leaves the old file or the new one

    def begin(self, link: Any, path: str | None) -> int:
        """Loads the checkpoint if there is one, and publishes the policy. Returns the updates that are done."""
        state = torch.load(path, map_location=self.device) if path and os.path.exists(path) else None
        if state:
            self.policy.load_state_dict(state["policy"])
            self.optimizer.load_state_dict(state["optimizer"])
        link.publish(self.policy)
        return state["update"] if state else 0


def train(given: argparse.Namespace, kind: type[Any]) -> tuple[float, float]:
    """Places and runs the actors. Returns the mean reward of the last updates, and the seconds of one update."""
    others, here = given.nodes - 1, 1 + given.judges + (given.environments if given.nodes == 1 else 0)
    apart = [{"CPU": given.cpus * math.ceil(given.environments / others)}] * others if others else []
    first = {"CPU": given.cpus * here, "GPU": given.learner_gpus}
    placed = placement_group([first, *apart], strategy="STRICT_SPREAD")  # each bundle on a node of its own
    ray.get(placed.ready(), timeout=120)

    def on(bundle: int, actor: Any, **more: Any) -> Any:
        strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=bundle)
        return actor.options(num_cpus=given.cpus, scheduling_strategy=strategy, **more)

    learner, rows = on(0, Learner, num_gpus=given.learner_gpus).remote(given), list[tuple[float, int]]()
    actors = {f"judge_{number}": on(0, Judge).remote(given) for number in range(given.judges)}
    for number in range(given.environments):
        actor = on(1 + number % others if others else 0, Environment)
        actors[f"environment_{number}"] = actor.remote(given, number)
    members, config = {"learner": learner, **actors}, rtr.GroupConfig(metrics_period_s=5)  # to Ray's metrics
    with rtr.init_group(members, config=config) if kind is Direct else contextlib.nullcontext() as group:
        link, back = kind(given.waiting), threading.Event()
        killing = group is not None and not given.compare and 0 < given.kill_at <= given.updates
        if killing:
            group.on_change(lambda change: change.kind == "back" and back.set())
        done = ray.get(learner.begin.remote(link, given.checkpoint))
        running = [actor.run.remote(link) for actor in actors.values()]
        ray.get(learner.update.remote(link))  # which waits until all actors have started
        begun = time.perf_counter()
        for update in range(done + 1, done + given.updates + 1):
            rows.append(ray.get(learner.update.remote(link), timeout=120))
            if update % 10 == 0:
                reward, behind = (statistics.mean(each) for each in zip(*rows[-10:], strict=True))
                print(f"update {update}: reward {reward:.2f}, {behind:.1f} versions behind")
                if given.checkpoint:
                    ray.get(learner.save.remote(given.checkpoint, update))
            if killing and update == done + given.kill_at:
                ray.kill(actors["environment_0"], no_restart=False)
        took = (time.perf_counter() - begun) / given.updates
        if group is not None:
            if killing and not back.wait(60):
                raise TimeoutError("environment_0 was killed, and did not come back within a minute")
            nodes = len({member.node_id for member in group.members})
            print(f"{len(members)} members on {nodes} node(s)" + "; one was killed, and is back" * killing)
        link.close()
        ray.get(running)
    remove_placement_group(placed)
    return statistics.mean(reward for reward, _ in rows[-10:]), took


def main() -> None:
    parser = argparse.ArgumentParser(description="Asynchronous reinforcement learning on one node or several.")
    sizes = {"nodes": 1, "environments": 2, "judges": 2, "updates": 80, "kill-at": 10, "waiting": 2}
    sizes |= {"episodes": 64, "steps": 16, "pixels": 784, "hidden": 64, "learner-gpus": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpus", type=float, default=0.2, help="of each actor")
    parser.add_argument("--goal", type=float, default=0.8, help="mean reward at the end; 1 is perfect")
    parser.add_argument("--checkpoint", type=os.path.abspath, help="file that all nodes see, to go on from")
    parser.add_argument("--compare", action="store_true", help="run it over plain Ray, too, and kill nobody")
    given = parser.parse_args()
    if min(getattr(given, name) for name in ("nodes", "environments", "judges", "updates", "waiting")) < 1:
        parser.error("--nodes, --environments, --judges, --updates and --waiting must be at least 1")
    ray.init(include_dashboard=False, logging_level="error", runtime_env=rtr.runtime_env())
    for kind in (Direct, PlainRay) if given.compare else (Direct,):
        reward, took = train(given, kind)
        print(f"{kind.__name__}: {1e3 * took:.1f} ms an update, {len(inspect.getsource(kind).splitlines())} lines")
        if reward < given.goal:
            sys.exit(f"async_rl: the reward is {reward:.2f}, below {given.goal}")
    print(f"checked: the reward is {reward:.2f}, at least {given.goal}")


if __name__ == "__main__":
    main()
