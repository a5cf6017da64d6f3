"""Reinforcement learning: two learners train one policy with DDP, and two collectors
play with it.

Collectors put rollouts into a queue, which blocks them when the learners are slower,
and pull the policy from a weight store before each rollout. The learners average
their gradients over a process group. The task is to balance a pole on a cart, sixteen
carts at a time. The return of an episode is the number of its steps, at most 200.

    python examples/rl_collectors.py  # sixty updates, about twenty seconds
    python examples/rl_collectors.py --updates 20  # the short form

The last line reports how the mean return rose. If it did not rise by half, the exit
status is 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import raytorchrpc as rtr

CARTS, LONGEST, DISCOUNT = 16, 200, 0.99


def make_policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def move(state: Tensor, action: Tensor) -> Tensor:
    """Returns the carts' states 0.02 s later: position, speed, angle, angular speed.

    Action 1 pushes right, 0 left.
    """
    _, speed, angle, turning = state.unbind(1)
    push = (20.0 * action - 10.0 + 0.05 * turning**2 * angle.sin()) / 1.1
    inertia = 0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1)
    turn = (9.8 * angle.sin() - angle.cos() * push) / inertia
    faster = push - 0.05 * turn * angle.cos() / 1.1
    return state + 0.02 * torch.stack([speed, faster, turning, turn], 1)


@torch.no_grad()
def play(policy: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Plays one episode with each cart.

    Returns states, actions, advantages and the mean episode length.
    """
    state = torch.rand(CARTS, 4, generator=generator) * 0.1 - 0.05
    up = torch.ones(CARTS, dtype=torch.bool)
    states, actions, lasted = [], [], []
    while up.any() and len(states) < LONGEST:
        chances = policy(state).softmax(1)
        action = torch.multinomial(chances, 1, generator=generator).squeeze(1)
        states.append(state)
        actions.append(action)
        lasted.append(up)
        state = move(state, action)
        up = up & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
    played = torch.stack(lasted)
    rewards = played.float()
    for step in reversed(range(len(rewards) - 1)):
        rewards[step] += DISCOUNT * rewards[step + 1]
    # The baseline is the mean over the carts that were still up at that step.
    advantages = rewards - rewards.sum(1, keepdim=True) / played.sum(1, keepdim=True)
    episodes = {
        "states": torch.stack(states),
        "actions": torch.stack(actions),
        "advantages": advantages,
    }
    episodes = {name: tensor[played] for name, tensor in episodes.items()}
    return episodes | {"length": played.sum(0).float().mean()}


@ray.remote
class Learner:
    def learn(self, rollouts: Any, weights: Any, updates: int) -> list[float]:
        first = rtr.process_group().rank() == 0
        policy = make_policy()
        model = DistributedDataParallel(policy)  # over the learners' process group
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
        if first:
            weights.publish(policy)
        returns = []
        for _ in range(updates):
            rollout = rollouts.get()  # blocks; each rollout goes to one learner
            advantage = rollout["advantages"] / (rollout["advantages"].std() + 1)
            logs = model(rollout["states"]).log_softmax(1)
            chosen = logs.gather(1, rollout["actions"][:, None]).squeeze(1)
            optimizer.zero_grad()
            (-chosen * advantage).mean().backward()  # averages gradients
            optimizer.step()
            if first:
                weights.publish(policy)
            returns.append(float(rollout["length"]))
        if first:
            rollouts.close(force=True)  # ends the collectors
        return returns


@ray.remote
class Collector:
    def collect(self, rollouts: Any, weights: Any, seed: int) -> int:
        """Plays until the learners close the queue.

        Returns the number of rollouts put.
        """
        policy, generator = make_policy(), torch.Generator().manual_seed(seed)
        version = rollouts_put = 0
        while True:
            version = weights.pull(policy, since=version)  # in place, if it is newer
            try:
                rollouts.put(play(policy, generator))  # blocks while it is full
            except rtr.Closed:
                return rollouts_put
            rollouts_put += 1


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a policy with DDP learners.")
    parser.add_argument("--updates", type=int, default=60)
    updates = parser.parse_args(arguments).updates
    if updates < 8:
        parser.error("--updates must be at least 8")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    learners = {f"learner_{number}": Learner.remote() for number in range(2)}
    collectors = {f"collector_{number}": Collector.remote() for number in range(2)}
    with rtr.init_group(learners | collectors) as group:
        group.process_group("gloo", members=list(learners))
        rollouts = rtr.Queue("rollouts", home="learner_0", maxsize=2)
        weights = rtr.WeightStore("policy", home="learner_0")
        shared = rollouts, weights
        seeds = enumerate(collectors.values())
        collecting = [one.collect.remote(*shared, seed) for seed, one in seeds]
        learning = [one.learn.remote(*shared, updates) for one in learners.values()]
        both = zip(*ray.get(learning), strict=True)
        returns = [(one + other) / 2 for one, other in both]
        played = sum(ray.get(collecting))
    for update in range(0, updates, max(1, updates // 6)):
        print(f"update {update:3}: mean return {returns[update]:5.1f}")
    first, last = (sum(part) / len(part) for part in (returns[:4], returns[-4:]))
    rise = f"from {first:.1f} to {last:.1f}"
    if last < 1.5 * first:
        sys.exit(f"rl_collectors: the mean return went {rise}, but must rise by half")
    print(f"checked: the mean return rose {rise} with {played} rollouts")


if __name__ == "__main__":
    main()
