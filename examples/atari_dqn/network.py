"""The Q network and the loss of DQN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .replay import STACK, Batch

#: Height and width of a frame, in pixels.
SIDE = 84
NETS = ("nature", "small", "tiny")


class Network(nn.Module):
    """Maps four stacked grey frames, as bytes, to one value per action.

    ``nature`` is the network of Mnih et al. (2015). ``small`` uses every third pixel and has 1/50 of the arithmetic,
    for machines without a GPU. ``tiny`` uses 49 pixels, too few to play: it serves to measure everything else.
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
        """Maps (n, 4, 84, 84) bytes to (n, actions)."""
        return self.body(self.scale(frames))

    def scale(self, frames: Tensor) -> Tensor:
        """Returns the input of ``body``: the pixels that this network uses, scaled to 0 to 1."""
        return frames[..., :: self.every, :: self.every].to(torch.float32).div_(255)


def td_loss(network: Network, target: Network, batch: Batch, gamma: float) -> tuple[Tensor, Tensor]:
    """Returns the Huber loss of a batch's temporal-difference errors, and the mean value of the actions taken."""
    scaled = network.scale(batch.frames)
    values = network.body(scaled[:, :STACK]).gather(1, batch.actions[:, None]).squeeze(1)
    with torch.no_grad():
        following = target.body(scaled[:, 1:]).amax(1)
        target_values = batch.rewards + gamma * following * ~batch.ends
    return functional.smooth_l1_loss(values, target_values), values.detach().mean()
