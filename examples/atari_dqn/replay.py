"""The replay memory: every frame once, in one tensor of bytes that is made at the start."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Frames that the network sees at once.
STACK = 4


class Rows(NamedTuple):
    """Consecutive frames of one player, and what it did on each.

    The last frame of an episode has a row as well, whose action counts for nothing: so the row of a transition is
    always followed by the frame that the transition leads to.
    """

    frames: Tensor
    """(n, height, width), bytes."""
    actions: Tensor
    rewards: Tensor
    """Clipped to -1, 0, 1."""
    ends: Tensor
    """Whether the game was over after this action; not so where only a limit of time was reached."""
    ages: Tensor
    """Frames since the episode began. A row followed by one of age 0 is no transition."""


class Batch(NamedTuple):
    """Transitions: of the five frames the first four are the state, the last four the one that follows."""

    frames: Tensor
    """(n, 5, height, width), bytes."""
    actions: Tensor
    rewards: Tensor
    ends: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Blocks until they are copied: the memory that they arrived in is its sender's again when they are dropped."""
        return Batch(*(tensor.to(device) for tensor in self))


class Replay:
    """A ring of rows for each player, drawn from uniformly. Not thread-safe."""

    def __init__(
        self, players: int, capacity: int, height: int, width: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        """``capacity``: rows in all. The frames lie on ``device``, everything else on the CPU."""
        self.size = capacity // players  # of one ring
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
        """Rows that can be drawn, about: ends of episodes are among them."""
        return int(self._open().sum())

    def add(self, player: int, rows: Rows) -> None:
        """The rows that follow the last ones of this player; more than a ring holds overwrite each other in order."""
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
        """Draw ``count`` transitions, with replacement. ``out``: memory for the frames, used again.

        ValueError if there is none yet.
        """
        players, rows = self._draw(count)
        places = players * self.size + rows % self.size
        # A stack never reaches back over the beginning of its episode: there its first frame is repeated.
        back = torch.minimum(torch.arange(STACK - 1, -1, -1), self._ages[places][:, None])
        stack = torch.cat((rows[:, None] - back, rows[:, None] + 1), 1) % self.size + players[:, None] * self.size
        stack = stack.reshape(-1).to(self._frames.device)
        if out is None:
            out = self._frames.new_empty((count, STACK + 1, *self._shape))
        torch.index_select(self._frames, 0, stack, out=out.view(stack.numel(), -1))
        return Batch(out, self._actions[places], self._rewards[places], self._ends[places])

    def _open(self) -> Tensor:
        """For each player, rows that have a next one, and whose stack has not been overwritten."""
        overwritten = torch.where(self._written > self.size, STACK - 1, 0)
        return (self._written.clamp(max=self.size) - 1 - overwritten).clamp(min=0)

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Players, and rows of theirs counted from the first ever."""
        bounds = self._open().cumsum(0)
        total = int(bounds[-1])
        newest = self._written - 1  # it has no next one yet
        kept: list[tuple[Tensor, Tensor]] = []
        missing, vain = count, 0
        while missing:
            if not total or vain == 100:
                raise ValueError("the replay memory has no transition yet")
            drawn = torch.randint(total, (missing,), generator=self.generator)
            players = torch.searchsorted(bounds, drawn, right=True)
            rows = newest[players] - (bounds[players] - drawn)
            following = (rows + 1) % self.size + players * self.size
            good = self._ages[following] > 0
            kept.append((players[good], rows[good]))
            vain = 0 if good.any() else vain + 1
            missing -= int(good.sum())
        return torch.cat([players for players, _ in kept]), torch.cat([rows for _, rows in kept])
