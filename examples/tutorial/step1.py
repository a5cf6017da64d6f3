"""Learns to balance a pole: the learner calls a player, which plays with the policy that it is sent."""

from statistics import mean

import ray
import torch
from pole import improve, make_policy, play

import raytorchrpc as rtr


@ray.remote
class Player:
    def __init__(self):
        self.policy = make_policy()

    @rtr.method  # other members may call this directly
    def episodes(self, weights):
        self.policy.load_state_dict(weights)
        return play(self.policy)


@ray.remote
class Learner:
    def __init__(self):
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)

    def update(self, player):  # a plain Ray method, called by the driver through Ray
        batch = rtr.rpc_sync(player).episodes(self.policy.state_dict())
        return improve(self.policy, self.optimizer, batch)


def main():
    ray.init(log_to_driver=False)
    player, learner = Player.remote(), Learner.remote()
    with rtr.init_group({"learner": learner, "player": player}) as group:
        rewards = []
        for update in range(1, 61):
            rewards.append(ray.get(learner.update.remote(player)))
            if update % 10 == 0:
                print(f"update {update}: the pole stays up for {mean(rewards[-10:]):.0f} steps")
        print(group.routes())


if __name__ == "__main__":
    main()
