"""The Q network and the loss of DQN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .replay import STACK, Batch

#: Pixels of a frame, each way.
SIDE = 84
NETS = ("nature", "small", "tiny")


class Network(nn.Module):
    """From four stacked grey frames, as bytes, to one value for each action.

    ``nature`` is the network of Mnih et al. (2015). ``small`` sees every third pixel and has 1/50 of the arithmetic,
    for machines without a GPU. ``tiny`` sees 49 pixels, too few to play by: it is there to measure everything else.
    """

    def __init__(self, kind: str, actions: int) -> None:
        super().__init__()
        if kind == "nature":
            self.every = 1
            body = [
                *(nn.Conv2d(STACK, 32, 8, 4), nn.ReLU()),
                *(nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
                *(nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten()),
                *(nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
                nn.Linear(512, actions),
            ]
        elif kind == "small":
            self.every = 3
            body = [
                *(nn.Conv2d(STACK, 16, 8, 4), nn.ReLU(), nn.Flatten()),
                *(nn.Linear(16 * 6 * 6, 64), nn.ReLU()),
                nn.Linear(64, actions),
            ]
        elif kind == "tiny":
            self.every = 12
            body = [nn.Flatten(), nn.Linear(STACK * 7 * 7, 32), nn.ReLU(), nn.Linear(32, actions)]
        else:
            raise ValueError(f"net {kind!r} is unknown; known: {', '.join(NETS)}")
        self.body = nn.Sequential(*body)

    def forward(self, frames: Tensor) -> Tensor:
        """(n, 4, 84, 84) bytes to (n, actions)."""
        return self.body(self.seen(frames))

    def seen(self, frames: Tensor) -> Tensor:
        """What ``body`` gets: numbers from 0 to 1, of the pixels that this network looks at."""
        return frames[..., :: self.every, :: self.every].to(torch.float32).div_(255)


def td_loss(network: Network, target: Network, batch: Batch, gamma: float) -> tuple[Tensor, Tensor]:
    """The Huber loss of a batch's temporal-difference errors, and the mean value of the actions taken."""
    seen = network.seen(batch.frames)
    values = network.body(seen[:, :STACK]).gather(1, batch.actions[:, None]).squeeze(1)
    with torch.no_grad():
        following = target.body(seen[:, 1:]).amax(1)
        wanted = batch.rewards + gamma * following * ~batch.ends
    return functional.smooth_l1_loss(values, wanted), values.detach().mean()
