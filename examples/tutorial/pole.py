"""Poles to balance, each on a cart, and a policy that learns to push the carts."""

import torch

CARTS, LONGEST, DISCOUNT = 16, 200, 0.99


def make_policy():
    torch.manual_seed(0)
    first, last = torch.nn.Linear(4, 32), torch.nn.Linear(32, 2)
    return torch.nn.Sequential(first, torch.nn.Tanh(), last)


def move(state, action):
    """Position, speed, angle and turning 0.02 s later. Action 1 pushes right."""
    _, speed, angle, turning = state.unbind(1)
    push = (20 * action - 10 + 0.05 * turning**2 * angle.sin()) / 1.1
    inertia = 0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1)
    turn = (9.8 * angle.sin() - angle.cos() * push) / inertia
    faster = push - 0.05 * turn * angle.cos() / 1.1
    return state + 0.02 * torch.stack([speed, faster, turning, turn], 1)


@torch.no_grad()
def play(policy):
    """Plays an episode with each cart. The reward: the steps that a pole stays up."""
    state, up = torch.rand(CARTS, 4) * 0.1 - 0.05, torch.ones(CARTS, dtype=torch.bool)
    steps = []
    while up.any() and len(steps) < LONGEST:
        action = policy(state).softmax(1).multinomial(1).squeeze(1)
        steps.append((state, action, up))
        state = move(state, action)
        up = up & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
    states, actions, played = (torch.stack(each) for each in zip(*steps, strict=True))
    returns = played.float()
    for step in reversed(range(len(steps) - 1)):
        returns[step] += DISCOUNT * returns[step + 1]
    others = returns.sum(1, keepdim=True) / played.sum(1, keepdim=True)
    better = (returns - others)[played]
    reward = float(played.sum(0).float().mean())
    states, actions = states[played], actions[played]
    return {"states": states, "actions": actions, "better": better, "reward": reward}


def improve(policy, optimizer, batch):
    """Makes better actions more likely (REINFORCE). Returns the mean reward."""
    likely = policy(batch["states"]).log_softmax(1)
    chosen = likely.gather(1, batch["actions"][:, None]).squeeze(1)
    loss = -(chosen * batch["better"] / (batch["better"].std() + 1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return batch["reward"]
