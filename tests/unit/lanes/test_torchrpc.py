"""The torchrpc lane and its agent, with a torch that does nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.lanes.base import Message, PeerAddress
from raytorchrpc.lanes.torchrpc.agent import Fabric, FabricPeer
from raytorchrpc.lanes.torchrpc.lane import TorchRpcLane
from raytorchrpc.tensors.codec import Encoded


def test_no_peer_is_removed_while_torch_connects_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would read the URL of a removed peer from freed memory. Later requests hold nobody up."""
    fabric, removed, removed_meanwhile = Fabric(), threading.Event(), []
    fabric._agent = SimpleNamespace(get_worker_info=lambda name: object())
    lane = TorchRpcLane("a", fabric, (), {})
    removers = []

    def send(*request: Any) -> Any:
        removers.append(threading.Thread(target=lane.disconnect, args=("b",)))
        removers[-1].start()
        removed_meanwhile.append(removed.wait(5 if removed_meanwhile else 0.2))
        return torch.futures.Future()

    monkeypatch.setattr(torch_internals, "agent_is_set", lambda: True)
    monkeypatch.setattr(torch_internals, "add_peer", lambda *peer, **settings: None)
    monkeypatch.setattr(torch_internals, "remove_peer", lambda *peer, **settings: removed.set())
    monkeypatch.setattr(torch_internals, "invoke_async", send)
    peers = [PeerAddress(name, FabricPeer(f"rtr:{name}", number, "", {})) for number, name in enumerate("bc")]
    lane.connect(peers)
    message = Message(("echo",), Encoded(b"", [], [], 0))
    lane.call("c", message, 5)
    removers[0].join(5)
    assert removed.is_set()
    removed.clear()
    lane.connect(peers[:1])
    lane.call("c", message, 5)
    assert removed_meanwhile == [False, True]
