"""What each part of the tutorial costs beside plain Ray: both do the same work in turns, with the tutorial's batches.

python costs.py             # about half a minute
python costs.py --rounds 5  # the short form
"""

import argparse
import time
from statistics import median

import ray
import torch
from pole import make_policy, play
from ray.util.queue import Queue as RayQueue

import raytorchrpc as rtr


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@ray.remote
class Player:
    def __init__(self):
        self.policy, self.large = make_policy(), torch.nn.Linear(3200, 3200)
        self.batch = play(self.policy)

    @rtr.method
    def episodes(self, weights):
        return self.batch

    def feed(self, queue, count):
        for _ in range(count):
            queue.put(self.batch)

    def pull(self, weights, large):
        model = self.large if large else self.policy
        return seconds(lambda: weights.pull(model))

    def load(self, reference, large):
        model = self.large if large else self.policy
        return seconds(lambda: model.load_state_dict(ray.get(reference[0])))


@ray.remote
class Learner:
    def __init__(self):
        self.policy, self.large = make_policy(), torch.nn.Linear(3200, 3200)

    def call(self, player):
        weights = self.policy.state_dict()
        direct = seconds(lambda: rtr.rpc_sync(player).episodes(weights))
        return direct, seconds(lambda: ray.get(player.episodes.remote(weights)))

    def take(self, queue, count):
        return seconds(lambda: [queue.get(timeout=60) for _ in range(count)]) / count

    def publish(self, weights, large):
        model = self.large if large else self.policy
        return seconds(lambda: weights.publish(model))

    def put(self, large):
        model, found = self.large if large else self.policy, []
        return seconds(lambda: found.append(ray.put(model.state_dict()))), found


def take_batches(learner, players, queue, count=40):
    feeding = [player.feed.remote(queue, count // len(players)) for player in players]
    took = ray.get(learner.take.remote(queue, count // len(players) * len(players)))
    ray.get(feeding)
    return took


def update_weights(learner, player, weights, large):
    """Returns the time to publish and to pull, directly and through the object store."""
    direct = ray.get(learner.publish.remote(weights, large)) + ray.get(player.pull.remote(weights, large))
    took, reference = ray.get(learner.put.remote(large))
    return direct, took + ray.get(player.load.remote(reference, large))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    ray.init(log_to_driver=False)
    learner, players = Learner.remote(), [Player.remote() for _ in range(2)]
    ray.get([actor.__ray_ready__.remote() for actor in (learner, *players)])
    start = time.perf_counter()
    with rtr.init_group({"learner": learner, "left": players[0], "right": players[1]}) as group:
        formed = time.perf_counter() - start
        ours, rays = rtr.Queue("batches", home="learner", maxsize=2), RayQueue(maxsize=2)
        small, large = (rtr.WeightStore(name, home="learner") for name in ("small", "large"))
        parts = {
            "call: weights there, a batch back": lambda: ray.get(learner.call.remote(players[0])),
            "queue: a batch, 1 player": lambda: [take_batches(learner, players[:1], queue) for queue in (ours, rays)],
            "queue: a batch, 2 players": lambda: [take_batches(learner, players, queue) for queue in (ours, rays)],
            "weights: publish and pull 1 KB": lambda: update_weights(learner, players[0], small, False),
            "weights: publish and pull 41 MB": lambda: update_weights(learner, players[0], large, True),
        }
        print(f"{'milliseconds, median':34}{'raytorchrpc':>12}{'plain Ray':>12}")
        for name, measure in parts.items():
            measure()  # connections and buffers are made at the first use
            direct, plain = (1e3 * median(each) for each in zip(*(measure() for _ in range(rounds)), strict=True))
            print(f"{name:34}{direct:12.2f}{plain:12.2f}")
        stats = median(seconds(group.stats) for _ in range(rounds))
        print(f"{'monitoring: one group.stats()':34}{1e3 * stats:12.2f}{'-':>12}")
    print(f"forming the group: {formed:.2f} s")


if __name__ == "__main__":
    main()
