"""``raytorchrpc dashboard``; tests/ray runs its queries in a Prometheus."""

from __future__ import annotations

import json
import re

from raytorchrpc.calls.metrics import METRICS, series
from tests.unit import command_line


def test_the_dashboard_shows_every_series_and_no_other_and_its_panels_do_not_overlap() -> None:
    printed = command_line.run("dashboard")
    assert printed.exit_code == 0
    panels = json.loads(printed.stdout)["panels"]
    queries = [panel["targets"][0]["expr"] for panel in panels if panel["type"] != "row"]
    assert {name for query in queries for name in re.findall(r"ray_raytorchrpc_\w+", query)} == set(
        map(series, METRICS)
    )
    cells = [
        (x, y)
        for each in (panel["gridPos"] for panel in panels)
        for x in range(each["x"], each["x"] + each["w"])
        for y in range(each["y"], each["y"] + each["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
