"""A member's figures at the Prometheus endpoint of its node, in a Ray of its own that reports often."""

from __future__ import annotations

import pytest

from tests.ray.scripts import Script

pytest.importorskip("aiohttp", reason="the endpoint needs ray[default]: pip install '.[jobs]' in a checkout")

CODE = """
import urllib.request

os.environ["RAY_metrics_report_interval_ms"] = "500"
start(light=False)
a, b = actors(2)
config = rtr.GroupConfig(metrics_period_s=0.2)
node = ray.nodes()[0]
url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

def lines():
    try:
        text = urllib.request.urlopen(url, timeout=60).read().decode()
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
    pair = ('group="seen"', 'peer="b"', 'lane="socket"')
    assert settle(lambda: value("ray_raytorchrpc_calls_total", *pair) == 8, 150), lines()
    assert value("ray_raytorchrpc_failures_total", 'error="TypeError"') == 1, lines()
    assert value("ray_raytorchrpc_call_seconds_bucket_total", 'le="+Inf"', 'lane="socket"') == 8, lines()
    assert value("ray_raytorchrpc_bytes_total", 'direction="out"') > 0
    assert [name for name in ray.get(a.threads.remote()) if name.endswith("-metrics")] == ["raytorchrpc-a-metrics"]
assert not [name for name in ray.get(a.threads.remote()) if name.endswith("-metrics")]
print("fine")
"""


@pytest.mark.slow
def test_what_a_member_counts_is_at_the_prometheus_endpoint_of_its_node() -> None:
    script = Script(CODE)
    try:
        ended, out, err = script.run()
        assert ended == 0 and "fine" in out.splitlines(), err
    finally:
        script.end()
