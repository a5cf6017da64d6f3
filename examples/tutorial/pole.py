"""A pole to balance on a cart, sixteen carts at a time, and a policy that learns to push them."""

import torch

CARTS, LONGEST, DISCOUNT = 16, 200, 0.99


def make_policy():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


def move(state, action):
    """Returns the states 0.02 s later: position, speed, angle, turning. Action 1 pushes right, 0 left."""
    _, speed, angle, turning = state.unbind(1)
    push = (20 * action - 10 + 0.05 * turning**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    return state + 0.02 * torch.stack([speed, push - 0.05 * turn * angle.cos() / 1.1, turning, turn], 1)


@torch.no_grad()
def play(policy):
    """Plays one episode with each cart. An episode's reward is the number of steps that its pole stays up."""
    state, up, steps = torch.rand(CARTS, 4) * 0.1 - 0.05, torch.ones(CARTS, dtype=torch.bool), []
    while up.any() and len(steps) < LONGEST:
        action = policy(state).softmax(1).multinomial(1).squeeze(1)
        steps.append((state, action, up))
        state = move(state, action)
        up = up & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
    states, actions, played = (torch.stack(each) for each in zip(*steps, strict=True))
    returns = played.float()
    for step in reversed(range(len(steps) - 1)):
        returns[step] += DISCOUNT * returns[step + 1]
    better = returns - returns.sum(1, keepdim=True) / played.sum(1, keepdim=True)  # than the other carts
    reward = float(played.sum(0).float().mean())
    return {"states": states[played], "actions": actions[played], "better": better[played], "reward": reward}


def improve(policy, optimizer, batch):
    """Makes the actions more likely that did better than others (REINFORCE). Returns the mean reward."""
    chosen = policy(batch["states"]).log_softmax(1).gather(1, batch["actions"][:, None]).squeeze(1)
    loss = -(chosen * batch["better"] / (batch["better"].std() + 1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return batch["reward"]
