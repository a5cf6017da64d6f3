"""Plays a game with an epsilon-greedy policy."""

from __future__ import annotations

from typing import Any

import ale_py
import gymnasium
import torch
from torch import Tensor, nn

from .replay import STACK, Rows

gymnasium.register_envs(ale_py)


def make_game(game: str) -> Any:
    """Returns an ALE game with 84 x 84 grey frames, each the pixel-wise maximum of the last two of four.

    Raises ValueError for an unknown game.
    """
    try:
        return gymnasium.make_vec(
            f"ALE/{game}-v5",
            num_envs=1,
            num_threads=1,
            stack_num=1,
            reward_clipping=False,
            repeat_action_probability=0.0,
        )
    except (gymnasium.error.Error, ValueError) as error:
        raise ValueError(f"game {game!r} is unknown to ALE: {' '.join(str(error).split())}") from error


class Player:
    """Plays one episode after another."""

    def __init__(self, game: str, seed: int) -> None:
        self._game = make_game(game)
        self.actions = int(self._game.single_action_space.n)
        self._generator = torch.Generator().manual_seed(seed)
        self._frame = self._to_tensor(self._game.reset(seed=seed)[0])
        self._stack = self._frame.repeat(STACK, 1, 1)
        self._age, self._over, self._return = 0, False, 0.0

    def play(self, policy: nn.Module, steps: int, epsilon: float) -> tuple[Rows, list[float]]:
        """Plays ``steps`` steps. Returns the rows, and the unclipped returns of the episodes that ended."""
        rows = Rows(
            torch.empty((steps, *self._frame.shape), dtype=torch.uint8),
            torch.zeros(steps, dtype=torch.int64),
            torch.zeros(steps),
            torch.zeros(steps, dtype=torch.bool),
            torch.empty(steps, dtype=torch.int64),
        )
        returns = []
        for step in range(steps):
            rows.frames[step], rows.ages[step] = self._frame, self._age
            action = 0 if self._over else self._choose(policy, epsilon)
            seen, rewards, ended, cut, _ = self._game.step(torch.tensor([action]).numpy())
            if self._over:  # this step started the next episode and ignored the action
                self._age, self._over, self._return = 0, False, 0.0
            else:
                reward = float(rewards[0])
                rows.actions[step], rows.rewards[step] = action, (reward > 0) - (reward < 0)
                rows.ends[step] = bool(ended[0])
                self._age, self._over = self._age + 1, bool(ended[0] or cut[0])
                self._return += reward
                if self._over:
                    returns.append(self._return)
            self._frame = self._to_tensor(seen)
            older = self._stack[1:].clone() if self._age else self._frame.expand(STACK - 1, -1, -1)
            self._stack = torch.cat((older, self._frame[None]))
        return rows, returns

    def _choose(self, policy: nn.Module, epsilon: float) -> int:
        if torch.rand((), generator=self._generator) < epsilon:
            return int(torch.randint(self.actions, (), generator=self._generator))
        with torch.inference_mode():
            return int(policy(self._stack[None]).argmax())

    def _to_tensor(self, frames: Any) -> Tensor:
        return torch.from_numpy(frames[0, 0].copy())  # the game overwrites its buffer in the next step

    def close(self) -> None:
        self._game.close()
