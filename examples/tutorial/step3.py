"""Learns to balance a pole: several players put episodes into one queue."""

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

    def run(self, learner, batches):
        while True:
            self.policy.load_state_dict(rtr.rpc_sync(learner).weights())
            batch = play(self.policy) | {"player": rtr.current_member().name}
            try:
                batches.put(batch)  # blocks while the queue is full
            except rtr.Closed:
                return


@ray.remote
class Learner:
    def __init__(self):
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)

    @rtr.method(concurrent=True)  # may run while update() waits for a batch
    def weights(self):
        return self.policy.state_dict()

    def update(self, batches):
        batch = batches.get(timeout=60)  # of whichever player was first
        return improve(self.policy, self.optimizer, batch), batch["player"]


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
        playing = [player.run.remote(learner, batches) for player in players.values()]
        for update in range(1, given.updates + 1):
            reward, name = ray.get(learner.update.remote(batches))
            rewards.append(reward)
            played[name] += 1
            if update % 10 == 0:
                print(f"update {update}: the pole stays up for {mean(rewards[-10:]):.0f} steps")
        batches.close(force=True)  # ends the players' loops
        ray.get(playing)
        print(*(f"{name}: {count} batches" for name, count in sorted(played.items())), sep="\n")


if __name__ == "__main__":
    main()
