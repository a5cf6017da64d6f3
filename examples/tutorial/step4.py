"""Learns to balance a pole: the players pull the policy from a weight store."""

import argparse
import collections
from statistics import mean

import ray
import torch
from pole import improve, make_policy, play

import raytorchrpc as rtr


@ray.remote
class Player:
    def __init__(self, seed):
        self.policy = make_policy()
        torch.manual_seed(seed)  # each player plays other episodes

    def run(self, weights, batches):
        name, version = rtr.current_member().name, 0
        while True:
            version = weights.pull(self.policy, since=version)  # in place, and only if there is a newer one
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
        return weights.publish(self.policy)  # copies it, and returns the number of the version

    def update(self, weights, batches):
        batch = batches.get(timeout=60)  # of whichever player was first
        reward, newest = improve(self.policy, self.optimizer, batch), self.publish(weights)
        return reward, batch["player"], newest - 1 - batch["version"]


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--players", type=int, default=2)
    parser.add_argument("--updates", type=int, default=60)
    return parser.parse_args()


def main():
    given = options()
    ray.init(log_to_driver=False)
    learner = Learner.remote()
    players = {f"player_{number}": Player.remote(number) for number in range(given.players)}
    rewards, played = [], collections.Counter()
    with rtr.init_group({"learner": learner, **players}):
        batches = rtr.Queue("batches", home="learner", maxsize=2)
        weights = rtr.WeightStore("policy", home="learner")
        ray.get(learner.publish.remote(weights))
        playing = [player.run.remote(weights, batches) for player in players.values()]
        for update in range(1, given.updates + 1):
            reward, name, behind = ray.get(learner.update.remote(weights, batches))
            rewards.append(reward)
            played[name] += 1
            if update % 10 == 0:
                print(f"update {update}: the pole stays up for {mean(rewards[-10:]):.0f} steps, {behind} behind")
        batches.close(force=True)  # ends the players' loops
        ray.get(playing)
        print(*(f"{name}: {count} batches" for name, count in sorted(played.items())), sep="\n")


if __name__ == "__main__":
    main()
