"""Learns to balance a pole: a player plays all the time, and its episodes wait for the learner in a queue."""

from statistics import mean

import ray
import torch
from pole import improve, make_policy, play

import raytorchrpc as rtr


@ray.remote
class Player:
    def __init__(self):
        self.policy = make_policy()

    def run(self, learner, batches):
        while True:
            self.policy.load_state_dict(rtr.rpc_sync(learner).weights())
            try:
                batches.put(play(self.policy))  # blocks while the queue is full
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
        return improve(self.policy, self.optimizer, batches.get(timeout=60))


def main():
    ray.init(log_to_driver=False)
    player, learner = Player.remote(), Learner.remote()
    with rtr.init_group({"learner": learner, "player": player}) as group:
        batches = rtr.Queue("batches", home="learner", maxsize=2)
        playing = player.run.remote(learner, batches)
        rewards = []
        for update in range(1, 61):
            rewards.append(ray.get(learner.update.remote(batches)))
            if update % 10 == 0:
                print(f"update {update}: the pole stays up for {mean(rewards[-10:]):.0f} steps")
        batches.close(force=True)  # ends the player's loop
        ray.get(playing)
        print(group.stats())


if __name__ == "__main__":
    main()
