"""Replies of the torchrpc lane that cannot be sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc.lanes.base import Message
from raytorchrpc.lanes.torchrpc import lane
from raytorchrpc.tensors.codec import NOTHING, Encoded
from raytorchrpc.tensors.dtypes import UNCOPIED
from tests.shortage import NO_MEMORY


def test_a_reply_that_there_is_no_memory_for_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender learns of it, so that an item of a queue goes back, and can send another one."""

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(NO_MEMORY)

    replies: list[Any] = []
    serving = SimpleNamespace(devices=[], serve=lambda message, reply: replies.append(reply))
    monkeypatch.setattr(lane, "_serving", serving)
    monkeypatch.setattr(lane, "copied", fail)
    future = lane._serve(("header",), b"", [], [], 0)
    large = Encoded(b"", [torch.empty(4, dtype=next(iter(UNCOPIED)))], [], 0)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        replies[0](Message(("ok",), large))
    assert not future.done()
    replies[0](Message(("no memory",), NOTHING))
    assert future.wait()[0] == ("no memory",)
