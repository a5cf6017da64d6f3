"""The replay memory: stores every frame once, in one tensor of bytes that is allocated at the start."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Frames in one input of the network.
STACK = 4


class Rows(NamedTuple):
    """Consecutive frames of one player, and its action on each.

    The last frame of an episode has a row too, whose action has no meaning. The row of a transition is therefore
    always followed by the frame to which the transition leads.
    """

    frames: Tensor
    """(n, height, width), bytes."""
    actions: Tensor
    rewards: Tensor
    """Clipped to -1, 0, 1."""
    ends: Tensor
    """Whether this action ended the game. False if only a time limit was reached."""
    ages: Tensor
    """Frames since the episode started. A row followed by one of age 0 is not a transition."""


class Batch(NamedTuple):
    """Transitions: of the five frames, the first four are the state, and the last four the next state."""

    frames: Tensor
    """(n, 5, height, width), bytes."""
    actions: Tensor
    rewards: Tensor
    ends: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Copies to a device. Blocks until done, because dropping the originals returns their memory to the sender."""
        return Batch(*(tensor.to(device) for tensor in self))


class Replay:
    """Holds a ring of rows for each player, and samples from them uniformly. Not thread-safe."""

    def __init__(
        self, players: int, capacity: int, height: int, width: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        """``capacity``: rows in total. The frames are on ``device``, everything else on the CPU."""
        self.size = capacity // players  # rows of one ring
        if self.size < 2 * STACK:
            raise ValueError(f"capacity {capacity} is less than {2 * STACK} frames for each of {players} players")
        self._shape = (height, width)
        rows = players * self.size
        self._frames = torch.zeros((rows, height * width), dtype=torch.uint8, device=device)
        self._actions = torch.zeros(rows, dtype=torch.int64)
        self._rewards = torch.zeros(rows)
        self._ends = torch.zeros(rows, dtype=torch.bool)
        self._ages = torch.zeros(rows, dtype=torch.int64)
        self._written = torch.zeros(players, dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """The approximate number of rows that can be sampled; it includes ends of episodes."""
        return int(self._count_available().sum())

    def add(self, player: int, rows: Rows) -> None:
        """Appends rows of a player. In a full ring, they overwrite the oldest."""
        rows = Rows(*(column[-self.size :] for column in rows))
        count = len(rows.actions)
        places = (int(self._written[player]) + torch.arange(count)) % self.size + player * self.size
        self._frames[places.to(self._frames.device)] = rows.frames.reshape(count, -1).to(self._frames.device)
        self._actions[places] = rows.actions
        self._rewards[places] = rows.rewards
        self._ends[places] = rows.ends
        self._ages[places] = rows.ages
        self._written[player] += count

    def sample(self, count: int, out: Tensor | None = None) -> Batch:
        """Samples ``count`` transitions, with replacement. ``out``: a buffer for the frames.

        Raises ValueError if there is no transition yet.
        """
        players, rows = self._draw(count)
        places = players * self.size + rows % self.size
        # A stack never reaches back past the start of its episode: the first frame is repeated instead.
        back = torch.minimum(torch.arange(STACK - 1, -1, -1), self._ages[places][:, None])
        stack = torch.cat((rows[:, None] - back, rows[:, None] + 1), 1) % self.size + players[:, None] * self.size
        stack = stack.reshape(-1).to(self._frames.device)
        if out is None:
            out = self._frames.new_empty((count, STACK + 1, *self._shape))
        torch.index_select(self._frames, 0, stack, out=out.view(stack.numel(), -1))
        return Batch(out, self._actions[places], self._rewards[places], self._ends[places])

    def _count_available(self) -> Tensor:
        """Returns for each player the number of rows that have a successor and a complete stack."""
        overwritten = torch.where(self._written > self.size, STACK - 1, 0)
        return (self._written.clamp(max=self.size) - 1 - overwritten).clamp(min=0)

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Samples players, and rows of theirs, counted from the first row ever added."""
        bounds = self._count_available().cumsum(0)
        total = int(bounds[-1])
        newest = self._written - 1  # has no successor yet
        kept: list[tuple[Tensor, Tensor]] = []
        missing, failures = count, 0
        while missing:
            if not total or failures == 100:
                raise ValueError("the replay memory has no transition yet")
            drawn = torch.randint(total, (missing,), generator=self.generator)
            players = torch.searchsorted(bounds, drawn, right=True)
            rows = newest[players] - (bounds[players] - drawn)
            following = (rows + 1) % self.size + players * self.size
            good = self._ages[following] > 0
            kept.append((players[good], rows[good]))
            failures = 0 if good.any() else failures + 1
            missing -= int(good.sum())
        return torch.cat([players for players, _ in kept]), torch.cat([rows for _, rows in kept])
