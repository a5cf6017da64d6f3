"""Learns to balance a pole."""

import argparse
import collections
import contextlib
import os
import sys
from statistics import mean

import ray
import torch
from pole import improve, make_policy, play

import raytorchrpc as rtr


@ray.remote(max_restarts=-1, max_task_retries=-1)  # Ray starts it and run() again
class Player:
    def __init__(self, seed):
        self.policy = make_policy()
        torch.manual_seed(seed)  # each player plays other episodes

    def run(self, weights, batches):
        # A new process waits until the group has it back.
        name, version = rtr.current_member(timeout=60).name, 0
        while True:
            # In place, and only if there is a newer version.
            version = weights.pull(self.policy, since=version)
            batch = play(self.policy) | {"player": name, "version": version}
            try:
                batches.put(batch)  # blocks while the queue is full
            except rtr.Closed:
                return


@ray.remote
class Learner:
    def __init__(self):
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)

    def publish(self, weights):
        return weights.publish(self.policy)  # copies it, returns the version's number

    def update(self, weights, batches):
        batch = batches.get(timeout=60)  # of whichever player was first
        reward = improve(self.policy, self.optimizer, batch)
        newest = self.publish(weights)
        return reward, batch["player"], newest - 1 - batch["version"]

    def save(self, path, update):
        state = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "update": update,
        }
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)  # a crash leaves the old file or the new one

    def load(self, path):
        if not os.path.exists(path):
            return 0
        state = torch.load(path)
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["update"]


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--players", type=int, default=2)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--kill-at", type=int, default=0, help="kill at this update")
    parser.add_argument("--trace", help="write a trace for Perfetto to this file")
    parser.add_argument("--checkpoint", default="pole.pt", help="all nodes see it")
    parser.add_argument("--goal", type=int, default=60, help="steps in the end")
    return parser.parse_args()


def train(given, group, learner, players):
    batches = rtr.Queue("batches", home="learner", maxsize=2)
    weights = rtr.WeightStore("policy", home="learner")
    checkpoint = os.path.abspath(given.checkpoint)  # actors may work elsewhere
    done = ray.get(learner.load.remote(checkpoint))
    print(f"{done} updates are done")
    ray.get(learner.publish.remote(weights))
    playing = [player.run.remote(weights, batches) for player in players.values()]
    rewards, played = [], collections.Counter()
    for update in range(done + 1, done + given.updates + 1):
        reward, name, behind = ray.get(learner.update.remote(weights, batches))
        rewards.append(reward)
        played[name] += 1
        if update % 10 == 0:
            steps = f"the pole stays up for {mean(rewards[-10:]):.0f} steps"
            print(f"update {update}: {steps}, {behind} behind")
            report(group)
            ray.get(learner.save.remote(checkpoint, update))
        if update == given.kill_at:
            ray.kill(players["player_0"], no_restart=False)
    group.wait_ready(60)  # until every member is back
    print(group.stats())
    batches.close(force=True)  # ends the players' loops
    ray.get(playing)
    for name, count in sorted(played.items()):
        print(f"{name}: {count} batches")
    return mean(rewards[-10:])


def show(change):
    print(f"{', '.join(change.members)}: {change.kind} {change.cause}".rstrip())


def report(group):
    stats = group.stats()  # asks every member
    for row in stats.queues:
        waiting = f"{row.items} wait, {len(row.putting)} players wait for room"
        print(f"  {row.name}: {waiting}, {row.taken} taken")
    for row in stats.weights:
        if row.member != row.home:
            print(f"  {row.member}: {row.pulled} versions pulled, {row.lag} behind")


def main():
    given = options()
    ray.init(runtime_env=rtr.runtime_env())
    learner = Learner.remote()
    spread = Player.options(scheduling_strategy="SPREAD")  # over the nodes
    numbers = range(given.players)
    players = {f"player_{number}": spread.remote(number) for number in numbers}
    config = rtr.GroupConfig(metrics_period_s=5)  # for Prometheus and Grafana
    with rtr.init_group({"learner": learner, **players}, config=config) as group:
        group.on_change(show)  # called on a thread of the group
        with group.trace(given.trace) if given.trace else contextlib.nullcontext():
            steps = train(given, group, learner, players)
        nodes = len({member.node_id for member in group.members})
    if steps < given.goal:
        sys.exit(f"{steps:.0f} steps are fewer than the goal of {given.goal}")
    where = f"{given.players} players on {nodes} node(s)"
    print(f"{where}: the goal of {given.goal} steps is reached")


if __name__ == "__main__":
    main()
