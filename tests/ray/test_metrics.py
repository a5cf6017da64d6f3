"""A member's figures at the Prometheus endpoint of its node."""

from __future__ import annotations

import pytest

from tests.ray.scripts import Script

pytest.importorskip("aiohttp", reason="the endpoint needs ray[default]: pip install '.[jobs]' in a checkout")
pytestmark = pytest.mark.slow

ENDPOINT = """
import json, re, subprocess, tempfile, urllib.parse, urllib.request
from pathlib import Path

os.environ["RAY_metrics_report_interval_ms"] = "500"
start(light=False)
node = ray.nodes()[0]
target = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"

def fetch(url):
    return urllib.request.urlopen(url, timeout=60).read().decode()
"""

MEMBER = """
a, b = actors(2)
config = rtr.GroupConfig(metrics_period_s=0.2)

def lines():
    try:
        text = fetch(f"http://{target}/metrics")
    except OSError:  # the agent is still starting
        return []
    return [line for line in text.splitlines() if line.startswith("ray_raytorchrpc") and 'member="a"' in line]

def value(name, *tags):
    for line in lines():
        if line.startswith(name) and all(tag in line for tag in tags):
            return float(line.rpartition(" ")[2])
    return None

with rtr.init_group({"a": a, "b": b}, name="seen", config=config):
    assert ray.get([a.call.remote("b", "double", n) for n in range(7)])[3] == 6
    try:
        ray.get(a.call.remote("b", "double"))
    except TypeError:
        pass
    calls = ('group="seen"', 'method="double"', 'lane="socket"')

    def counts():  # each of them arrives at the endpoint in its own time
        return [
            value("ray_raytorchrpc_calls_total", *calls),
            value("ray_raytorchrpc_failures_total", 'error="TypeError"'),
            value("ray_raytorchrpc_call_seconds_bucket_total", 'le="+Inf"', 'lane="socket"'),
        ]

    assert settle(lambda: counts() == [8, 1, 8], 150), lines()
    assert settle(lambda: (value("ray_raytorchrpc_bytes_total", 'direction="out"') or 0) > 0, 60), lines()
print("fine")
"""


def succeeds(code: str) -> None:
    script = Script(code)
    try:
        ended, out, err = script.run()
        assert ended == 0 and "fine" in out.splitlines(), err
    finally:
        script.end()


def test_what_a_member_counts_is_at_the_prometheus_endpoint_of_its_node() -> None:
    succeeds(ENDPOINT + MEMBER)
