"""A member's figures at the Prometheus endpoint of its node, and the dashboard that is made from them."""

from __future__ import annotations

import shutil

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

PROMETHEUS = """
folder = tempfile.TemporaryDirectory()
settings = Path(folder.name) / "prometheus.yml"
scraped = {"job_name": "ray", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
settings.write_text(json.dumps({"scrape_configs": [scraped]}))
options = [f"--config.file={settings}", f"--storage.tsdb.path={folder.name}/data", "--web.listen-address=127.0.0.1:0"]
prometheus = subprocess.Popen(["prometheus", *options], stderr=subprocess.PIPE, text=True)
atexit.register(prometheus.kill)
where = next(filter(None, (re.search('"Listening on" address=(.*)', line) for line in prometheus.stderr)))[1]
threading.Thread(target=prometheus.stderr.read, daemon=True).start()

def query(expression):
    "Values by the set of their labels."
    answer = json.loads(fetch(f"http://{where}/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
    return {frozenset(row["metric"].items()): float(row["value"][1]) for row in answer["data"]["result"]}

def values(expression):
    return [*query(expression).values()]

members = dict(zip("abcd", actors(4)))

def news():
    return rtr.Topic("news", home="a")

def policy():
    return rtr.WeightStore("policy", home="a")

def step(me, others):
    for other in others:
        rtr.rpc_sync(other).double(1)
    try:
        rtr.rpc_sync(others[0]).double()
    except TypeError:
        pass
    box = rtr.Queue("box", home="a")
    box.put(1)
    box.get()
    news().publish("x")

def pull():
    import torch
    policy().pull({"w": torch.zeros(100)})

def publish():
    import torch
    policy().publish({"w": torch.zeros(100)})

def subscribe():
    import builtins
    builtins.subscription = news().subscribe("drop_oldest", maxsize=2)

def run(names):
    def everybody():
        ray.get([members[n].run.remote(step, n, [o for o in names if o != n]) for n in names])
    ray.get(members["a"].run.remote(publish))
    ray.get([members[n].run.remote(pull) for n in names[1:]])
    ray.get([members[n].run.remote(subscribe) for n in names])
    everybody()
    return everybody
"""

DASHBOARD = """
printed = subprocess.run([sys.executable, "-m", "raytorchrpc.cli", "dashboard"], capture_output=True, check=True).stdout
shown = json.loads(printed)
assert [panel["title"] for panel in shown["panels"] if panel["type"] == "row"] == [
    "Calls", "Lanes", "Queues and topics", "Weights", "Losses"
]
expressions = {panel["title"]: panel["targets"][0]["expr"] for panel in shown["panels"] if "targets" in panel}

def asked(title):
    text = expressions[title].replace("$__rate_interval", "1m").replace("$group", "four").replace("$member", ".*")
    assert "$" not in text, text
    return query(text)

def series(group, member):
    "What a member exports, without the names of the group and the member."
    found = query('last_over_time({__name__=~"ray_raytorchrpc_.+", group="%s", member="%s"}[5m])' % (group, member))
    return {frozenset(pair for pair in labels if pair[0] not in ("group", "member", "WorkerId")) for labels in found}

# Without a setting, where every member calls every other one.
sizes = {}
for group, names in (("two", "ab"), ("three", "abc")):
    with rtr.init_group({name: members[name] for name in names}, name=group, config=rtr.GroupConfig()):
        everybody = run(names)
    # A member exports once more when it leaves.
    assert settle(lambda: all(series(group, name) for name in names), 60)
    assert settle(lambda: series(group, "b") == series(group, names[-1]), 30)
    sizes[group] = len(series(group, "b"))
assert sizes["two"] == sizes["three"] > 5, sizes

with rtr.init_group(members, name="four", config=rtr.GroupConfig(metrics_period_s=0.5)) as group:
    everybody = run("abcd")
    ray.get(members["a"].run.remote(publish))
    ray.get(members["a"].run.remote(publish))

    def empty():
        everybody()
        return [title for title in expressions if not asked(title)]

    assert settle(lambda: not empty(), 120), {title: expressions[title] for title in empty()}
    lag = asked("Policy lag: versions that a reader is behind")
    assert {(dict(labels)["member"], value) for labels, value in lag.items()} == {("b", 2), ("c", 2), ("d", 2)}, lag
    assert max(asked("Age of the oldest item").values()) > 0
    methods = {dict(labels)["method"] for labels in asked("Calls per second, by method (needs metrics_period_s)")}
    assert {"double", "queue box.put", "topic news.put", "weight store policy.lease"} <= methods, methods
    sent = sum(row.calls for row in group.stats() if row.caller == "b")
    assert settle(lambda: values('sum(ray_raytorchrpc_calls_total{group="four", member="b"})') == [sent], 60)
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


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus")
def test_every_panel_of_the_dashboard_shows_what_prometheus_has_of_a_group() -> None:
    """Also that a member exports as many series in a larger group."""
    succeeds(ENDPOINT + PROMETHEUS + DASHBOARD)
