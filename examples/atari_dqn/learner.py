"""The actor that trains the network."""

from __future__ import annotations

import copy
import queue
import threading
import time
from typing import Any

import torch
from torch import nn

from .network import SIDE, Network, td_loss
from .replay import Batch, Replay, Rows
from .settings import Settings
from .transports import Transport

#: Seconds without a frame from any collector after which the learner gives up. Restarting one takes much less.
TIMEOUT_S = 120.0


class Stopped(Exception):
    """``stop`` was called."""


class Learner:
    """Holds the network, its target network and its optimizer. ``stop`` may be called while ``train`` runs."""

    def __init__(self, settings: Settings, actions: int) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.network = Network(settings.net, actions).to(self.device)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), settings.rate, eps=1.5e-4)
        self.iteration = self.steps = self.episodes = 0
        self.returns: list[float] = []
        self._stop = threading.Event()

    def begin(self, transport: Transport, state: dict[str, Any] | None = None) -> int:
        """Publishes the first weights, from the checkpoint ``state`` if given. Returns the steps done so far."""
        settings, self.transport = self.settings, transport
        seed = settings.seed
        if settings.replay == "learner":
            self.replay = Replay(settings.collectors, settings.capacity, SIDE, SIDE, seed, self.device)
        if state is not None:
            self._load(state)
        self._start = (self.iteration, self.steps)
        self._publish()
        return self.steps

    def train(self, iterations: int) -> dict[str, Any]:
        """Runs ``iterations``, or fewer after ``stop``, and returns statistics. Waits up to TIMEOUT_S for each item."""
        start, first = time.perf_counter(), self.iteration
        losses, values = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        while self.iteration < first + iterations:
            try:
                batch = self._sample() if self.settings.replay == "learner" else self._receive()
            except Stopped:
                break
            loss, value = self._update(batch.to(self.device))
            losses, values = losses + loss, values + value
            self.iteration += 1
            if self.iteration % self.settings.target == 0:
                self.target.load_state_dict(self.network.state_dict())
            if self.iteration % self.settings.sync == 0:
                self._publish()
        done = self.iteration - first
        return {
            "iteration": self.iteration,
            "done": done,
            "steps": self.steps,
            "episodes": self.episodes,
            "return": sum(self.returns) / len(self.returns) if self.returns else None,
            "loss": losses.item() / max(done, 1),
            "value": values.item() / max(done, 1),
            "epsilon": self.settings.epsilon_at(self.steps),
            "seconds": time.perf_counter() - start,
        }

    def stop(self) -> None:
        """Ends ``train`` after its current update, or within a second if it waits for frames."""
        self._stop.set()

    def _update(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, value = td_loss(self.network, self.target, batch, self.settings.gamma)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 10)
        self.optimizer.step()
        return loss.detach(), value

    # --- items from the collectors --------------------------------------------------------------------------------

    def _sample(self) -> Batch:
        """Returns a batch from the replay memory, after ``every`` new steps have arrived for this iteration."""
        iteration, steps = self._start
        required = steps + self.settings.warmup + (self.iteration + 1 - iteration) * self.settings.every
        while self.steps < required:
            about, tensors = self._next()
            self.replay.add(about["player"], Rows(**tensors))
        return self.replay.sample(self.settings.batch)

    def _receive(self) -> Batch:
        return Batch(**self._next()[1])

    def _next(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            if self._stop.is_set():
                raise Stopped
            try:
                about, tensors = self.transport.get(timeout=1)
                break
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no collector has sent anything for {TIMEOUT_S:g} s") from None
        self.steps += about["steps"]
        self.episodes += len(about["returns"])
        self.returns = (self.returns + about["returns"])[-100:]
        return about, tensors

    def _publish(self) -> None:
        self.transport.publish({name: value.detach().cpu() for name, value in self.network.state_dict().items()})

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what a run needs to resume, on the CPU. The replay memory is not included; it is filled again."""
        state = {
            "network": self.network.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "steps": self.steps,
            "episodes": self.episodes,
            "returns": self.returns,
            "torch_rng": torch.get_rng_state(),
            "replay_rng": self.replay.generator.get_state() if self.settings.replay == "learner" else None,
        }
        return _on_cpu(state)

    def _load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration, self.steps = state["iteration"], state["steps"]
        self.episodes, self.returns = state["episodes"], list(state["returns"])
        torch.set_rng_state(state["torch_rng"])
        if self.settings.replay == "learner" and state["replay_rng"] is not None:
            self.replay.generator.set_state(state["replay_rng"])


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return [_on_cpu(each) for each in value] if isinstance(value, list) else value
