"""Which KV blocks engines read from each other, and for how long they are held."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.kv_handover import (
    Holds,
    Ledger,
    Prompt,
    Settings,
    Source,
    by_head,
    heads_of,
    reads_of,
)
from tests.polling import wait_until

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
SOURCES = [Source("kv.1", "cache.1")]
LONG = 20.0


def ledger(*sizes: int) -> Ledger:
    made = Ledger("engine", list(sizes or (4,)), 8)
    made.sources = SOURCES
    return made


def prefilled(blocks: list[list[int]], tokens: int, *sizes: int) -> Any:
    """The parameters of a prompt, as a proxy brings them."""
    made = ledger(*sizes)
    parameters = made.finished("r", PREFILL, blocks, tokens, is_complete=True)
    assert parameters is not None
    assert made.next_step(is_idle=True).holds == [(1, "r")]
    return json.loads(json.dumps(parameters))


def loaded(
    parameters: Any, tokens: int, here: list[list[int]], computed: int = 0, *sizes: int, external: int | None = None
) -> Any:
    """The rows that a decode engine with these blocks reads; None: it does not."""
    decode = ledger(*sizes)
    decode.arrive("d", parameters)
    count = decode.matched("d", tokens, computed)
    decode.allocated("d", here, count if external is None else external)
    step = decode.next_step(is_idle=False)
    if not count:
        assert [prompt.hold for prompt in step.drops] == [1]
        return []
    (load,) = step.loads
    return load.rows


@pytest.mark.parametrize(
    ("blocks", "tokens", "here", "computed", "external", "rows"),
    [
        # All tokens but the last.
        ([[5, 6, 7]], 9, [[1, 2, 3]], 0, None, [([5, 6], [1, 2])]),
        ([[5, 6, 7]], 10, [[1, 2, 3]], 0, None, [([5, 6, 7], [1, 2, 3])]),
        # What the decode engine has is not read; its scheduler may want fewer.
        ([[5, 6, 7]], 12, [[1, 2, 3]], 8, None, [([7], [3])]),
        ([[5, 6, 7]], 9, [[1, 2, 3]], 8, None, []),
        ([[5, 6, 7]], 12, [[1, 2, 3]], 4, 4, [([6], [2])]),
        # Blocks outside of a window are not read. Where one of the others is gone, all is computed.
        ([[5, 6, 7, 8], [0, 0, 3, 4]], 16, [[1, 2, 9, 8], [0, 0, 11, 12]], 0, None,
         [([5, 6, 7, 8], [1, 2, 9, 8]), ([3, 4], [11, 12])]),
        ([[5, 6, 7, 8], [0, 0, 3, 4]], 16, [[1, 2, 9, 8], [0, 10, 11, 12]], 0, None, None),
    ],
)  # fmt: skip
def test_blocks_that_the_decode_engine_lacks_are_read(
    blocks: list[list[int]], tokens: int, here: list[list[int]], computed: int, external: int | None, rows: Any
) -> None:
    sizes = [4] * len(blocks)
    assert loaded(prefilled(blocks, tokens, *sizes), tokens, here, computed, *sizes, external=external) == rows


def test_caches_that_do_not_fit_are_not_read(caplog: pytest.LogCaptureFixture) -> None:
    assert loaded(prefilled([[5, 6]], 8), 8, [[1]], 0, 8) is None
    assert "block_size" in caplog.text
    assert loaded(prefilled([[5, 6]], 8), 8, [[1, 2], [3, 4]], 0, 4, 4) is None


def test_a_prompt_is_read_once() -> None:
    """A request comes again if its read failed, or if it was preempted."""
    decode = ledger()
    decode.arrive("d", prefilled([[5, 6]], 8))
    assert decode.matched("d", 8, 0) == decode.matched("d", 8, 0) == 7
    decode.allocated("d", [[1, 2]], 7)
    assert len(decode.next_step(is_idle=True).loads) == 1
    assert decode.matched("d", 8, 0) == 0
    decode.allocated("d", [[1, 2]], 0)
    assert decode.finished("d", None, [[1, 2]], 9, is_complete=True) is None
    step = decode.next_step(is_idle=True)
    assert not step.loads
    assert not step.drops


def test_what_was_aborted_is_not_held() -> None:
    decode, prefill = ledger(), ledger()
    decode.arrive("d", prefilled([[5, 6]], 8))
    decode.finished("d", None, [[]], 0, is_complete=False)
    assert [prompt.hold for prompt in decode.next_step(is_idle=True).drops] == [1]
    assert prefill.finished("r", PREFILL, [[5, 6]], 8, is_complete=False) is None
    assert prefill.finished("r", None, [[5, 6]], 8, is_complete=True) is None
    assert not prefill.next_step(is_idle=True).holds


@pytest.mark.parametrize(
    "parameters", [None, {}, PREFILL, {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_host": "h"}]
)
def test_other_requests_are_none_of_its_business(parameters: Any) -> None:
    assert Prompt.of(parameters) is None


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("sources", [1, 2, 4, 8])
@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_each_rank_reads_each_of_its_heads_once(heads: int, sources: int, readers: int) -> None:
    for rank, plan in enumerate(reads_of(sources, readers, heads)):
        if sources == readers:
            assert plan == {rank: []}
            continue
        read = Counter(head for some in plan.values() for head in some)
        assert read == Counter(heads_of(rank, readers, heads))
        assert all(head in heads_of(source, sources, heads) for source, some in plan.items() for head in some)


def test_views_of_heads() -> None:
    cache = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    views = dict(by_head({"layer": cache}, range(6, 9)))
    assert [*views] == ["layer:6", "layer:7", "layer:8"]
    assert torch.equal(views["layer:7"], cache[:, 1])
    assert not dict(by_head({"layer": cache}, range(2))), "a layer with other heads has none of these"


@pytest.mark.parametrize(
    ("given", "text"), [({"hold": 3}, r"\['hold'\].*hold_s"), ({"hold_s": "long"}, "hold_s='long'.*float")]
)
def test_wrong_settings_are_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(rtr.ConfigurationError, match=text):
        Settings.of(given)


def test_blocks_are_held_until_all_readers_have_read() -> None:
    made = Holds(LONG)
    made.add(1, "r")
    for _ in range(2):
        assert made.ended() == set()
        made.release(1, 2)
    assert made.ended() == {"r"}
    assert made.ended() == set()
    with pytest.raises(rtr.NotFound, match="prompt 1 is not held"):
        made.release(1, 2)


def test_blocks_that_nobody_reads_are_held_for_a_time() -> None:
    made = Holds(0.2)
    made.add(1, "r")
    assert made.ended() == set()
    assert wait_until(lambda: made.ended() == {"r"}, LONG)
    assert len(made) == 0


def test_a_reader_that_is_too_late_is_told() -> None:
    """Also one of several, of which another one has given up."""
    made = Holds(LONG)
    made.add(1, "r")
    made.release(1, 3)
    made.release(1)
    assert made.ended() == {"r"}
    with pytest.raises(rtr.NotFound):
        made.release(1, 3)


def test_readers_may_come_before_the_worker_is_told() -> None:
    made = Holds(LONG)
    made.release(2)
    made.release(1, 1)
    assert made.ended() == set(), "the scheduler would not know the request"
    for number in (1, 2, 3):
        made.add(number, f"r{number}")
    assert made.ended() == {"r1", "r2"}
    with pytest.raises(rtr.NotFound):
        made.release(1, 1)
