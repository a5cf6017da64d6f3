"""The replay memory and the network of the Atari example, on frames made up here."""

from __future__ import annotations

import pytest
import torch

from examples.atari_dqn.network import NETS, SIDE, Network, td_loss
from examples.atari_dqn.replay import STACK, Batch, Replay, Rows


def rows(episodes: list[int], first: int = 0, age: int = 0) -> Rows:
    """Episodes of so many frames each; frame n is full of n, so is its action; the last one began ``age`` earlier."""
    ages = torch.cat([torch.arange(length) + (age if number == 0 else 0) for number, length in enumerate(episodes)])
    numbers = torch.arange(first, first + len(ages))
    frames = numbers.to(torch.uint8)[:, None, None].expand(-1, 2, 3).clone()
    return Rows(frames, numbers, numbers.float(), torch.zeros(len(ages), dtype=torch.bool), ages)


def drawn(replay: Replay, count: int = 2_000) -> dict[int, list[int]]:
    """The frames of every transition that was drawn, by its action."""
    batch = replay.sample(count)
    assert torch.equal(batch.actions.float(), batch.rewards)
    return {int(action): frames[:, 0, 0].tolist() for action, frames in zip(batch.actions, batch.frames, strict=True)}


def test_stacks_end_at_the_beginning_of_their_episode_and_last_frames_are_no_transitions() -> None:
    replay = Replay(1, 100, 2, 3, seed=0)
    replay.add(0, rows([6, 3]))
    assert drawn(replay) == {
        0: [0, 0, 0, 0, 1],
        1: [0, 0, 0, 1, 2],
        2: [0, 0, 1, 2, 3],
        3: [0, 1, 2, 3, 4],
        4: [1, 2, 3, 4, 5],
        6: [6, 6, 6, 6, 7],  # 5 was the last frame of its episode
        7: [6, 6, 6, 7, 8],
    }


def test_a_ring_that_is_full_forgets_the_oldest() -> None:
    replay = Replay(1, 20, 2, 3, seed=0)
    for begin in range(0, 45, 5):
        replay.add(0, rows([5], first=begin, age=begin))
    seen = drawn(replay)
    assert sorted(seen) == list(range(25 + STACK - 1, 44))  # 25 to 44 are there, and a stack needs three before it
    assert all(frames == list(range(action - 3, action + 2)) for action, frames in seen.items())


def test_a_memory_without_a_transition_says_so() -> None:
    replay = Replay(1, 100, 2, 3, seed=0)
    with pytest.raises(ValueError, match="no transition yet"):
        replay.sample(1)
    replay.add(0, rows([1, 1, 1]))
    with pytest.raises(ValueError, match="no transition yet"):
        replay.sample(1)
    with pytest.raises(ValueError, match="less than 8 frames for each of 20 players"):
        Replay(20, 100, 2, 3, seed=0)


def test_a_network_gives_a_value_for_each_action_and_learns() -> None:
    torch.manual_seed(0)
    frames = torch.randint(256, (4, STACK + 1, SIDE, SIDE), dtype=torch.uint8)
    assert all(Network(net, 6)(frames[:, :STACK]).shape == (4, 6) for net in NETS)
    network, target = Network("tiny", 6), Network("tiny", 6)
    batch = Batch(frames, torch.arange(4), torch.ones(4), torch.ones(4, dtype=torch.bool))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    losses = []
    for _ in range(15):
        loss, _ = td_loss(network, target, batch, 0.99)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert all(parameter.grad is None for parameter in target.parameters())
