"""Torch's own RPC API between Ray actors: an agent with a policy, and observers that play and ask it for actions.

The program keeps the form that it has with processes of torch.distributed.rpc. The agent creates an observer in each of
the other processes (``rpc.remote``), keeps RRefs to them, and gives each an RRef to itself. Classes stand in this
script. The task is to keep a moving point near zero.

    python examples/torch_rl.py               # sixty episodes, about ten seconds
    python examples/torch_rl.py --episodes 20 # the short form

The last line reports how the mean return rose. If it did not rise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.distributed import rpc

import raytorchrpc as rtr

STEPS = 20


class Game:
    """A point on a line: it is pushed left (action 0) or right (action 1), and earns more the nearer it is to zero."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self) -> Tensor:
        self.at, self.speed = 2 * torch.rand((), generator=self.generator) - 1, torch.zeros(())
        return torch.stack([self.at, self.speed])

    def step(self, action: int) -> tuple[Tensor, float]:
        self.speed = 0.8 * self.speed + (0.2 * action - 0.1)
        self.at = self.at + self.speed
        return torch.stack([self.at, self.speed]), -float(self.at.abs())


class Observer:
    """Lives in a process of its own, and plays there."""

    def __init__(self) -> None:
        self.rank = rtr.current_member().rank
        self.game = Game(self.rank)

    def play(self, agent: rpc.RRef[Agent]) -> list[float]:
        """Plays one episode with the actions that the agent chooses. Returns the rewards."""
        state, rewards = self.game.reset(), []
        for _ in range(STEPS):
            action = agent.rpc_sync().choose(self.rank, state)
            state, reward = self.game.step(action)
            rewards.append(reward)
        return rewards


class Agent:
    """Owns the policy, and the RRefs to its observers."""

    def __init__(self, observers: list[int]) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.me = rpc.RRef(self)
        self.observers = [rpc.remote(observer, Observer) for observer in observers]  # by rank
        self.chosen: dict[int, list[Tensor]] = {observer: [] for observer in observers}
        # One for each observer, which call in any order: every run of the program plays the same games.
        self.generators = {observer: torch.Generator().manual_seed(observer) for observer in observers}

    def choose(self, observer: int, state: Tensor) -> int:
        """Called by observers, on threads of torch's pool: each has a list of its own."""
        logs = self.policy(state).log_softmax(0)
        action = int(torch.multinomial(logs.exp(), 1, generator=self.generators[observer]))
        self.chosen[observer].append(logs[action])
        return action

    def run_episode(self) -> float:
        """Has every observer play, and learns from it. Returns the mean return."""
        playing = [observer.rpc_async().play(self.me) for observer in self.observers]
        rewards = torch.tensor(torch.futures.wait_all(playing))
        ahead = rewards.flip(1).cumsum(1).flip(1)
        advantage = (ahead - ahead.mean()) / ahead.std()
        chosen = torch.stack([torch.stack(each) for each in self.chosen.values()])
        self.optimizer.zero_grad()
        (-chosen * advantage).mean().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        for each in self.chosen.values():
            each.clear()
        return float(rewards.sum(1).mean())


def train(observers: list[int], episodes: int) -> list[float]:
    """Runs in the agent's process."""
    agent = Agent(observers)
    return [agent.run_episode() for _ in range(episodes)]


@ray.remote
class Process:
    """In place of a process that calls init_rpc."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="An agent and its observers with torch's own RPC API.")
    parser.add_argument("--observers", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=60)
    options = parser.parse_args(arguments)
    if options.observers < 1 or options.episodes < 20:
        parser.error("--observers must be at least 1, and --episodes must be at least 20")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    processes = [Process.remote() for _ in range(1 + options.observers)]
    with rtr.init_group(processes) as group:
        observers = [member.rank for member in group.members[1:]]
        returns = ray.get(processes[0].run.remote(train, observers, options.episodes))
    first, last = (sum(part) / len(part) for part in (returns[:8], returns[-8:]))
    if last <= first:
        sys.exit(f"torch_rl: the mean return went from {first:.1f} to {last:.1f}, but must rise")
    print(f"checked: the mean return rose from {first:.1f} to {last:.1f} in {options.episodes} episodes")
    return list(returns)


if __name__ == "__main__":
    main()
