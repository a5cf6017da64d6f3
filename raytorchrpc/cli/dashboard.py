"""``raytorchrpc dashboard``: a dashboard for Ray's Grafana, made from the list of metrics."""

from __future__ import annotations

from typing import Any, NamedTuple

from raytorchrpc.calls.metrics import METRICS, series

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_GROUP = 'group=~"$group"'
_CHOSEN = f'{_GROUP}, member=~"$member"'
_COLUMNS, _HEIGHT = 24, 8


class Panel(NamedTuple):
    """A diagram with a line for each combination of values of the labels ``by``."""

    title: str
    query: str
    by: tuple[str, ...]
    unit: str = "short"


def _rate(name: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate({series(name)}{{{_CHOSEN}}}[$__rate_interval]))"


def _now(name: str, *by: str, of: str = "", merge: str = "sum") -> str:
    # Ray's agent shows a gauge only in the scrapes that follow an export.
    return f"{merge} by ({', '.join(by)}) (last_over_time({series(name)}{{{_CHOSEN}{of}}}[1m]))"


def _rates(title: str, name: str, *by: str, unit: str = "ops") -> Panel:
    return Panel(title, _rate(name, *by), by, unit)


def _values(title: str, name: str, *by: str, unit: str = "short", of: str = "", merge: str = "sum") -> Panel:
    return Panel(title, _now(name, *by, of=of, merge=merge), by, unit)


def _means(title: str, *by: str) -> Panel:
    return Panel(title, f"{_rate('call_seconds_sum', *by)} / {_rate('finished', *by)}", by, "s")


_STORE = ("group", "store", "home")
_NEWEST = _now("weight_version", *_STORE, of=', role="published"', merge="max")
_PULLED = _now("weight_version", *_STORE, "member", of=', role="pulled"', merge="max")
_LAG = Panel(
    "Policy lag: versions that a reader is behind",
    # Whichever members are chosen: the publisher need not be one of them.
    f"{_NEWEST.replace(_CHOSEN, _GROUP)} - on ({', '.join(_STORE)}) group_right () ({_PULLED} > 0)",
    ("store", "member"),
)
_FINE = "(needs metrics_period_s)"
ROWS: dict[str, tuple[Panel, ...]] = {
    "Calls": (
        _rates("Calls per second, by member", "calls", "member"),
        _means("Mean time of a call, by member", "member"),
        _values("Calls in flight, by member", "calls_in_flight", "member"),
        _values("Bytes in flight, by member", "bytes_in_flight", "member", unit="bytes"),
        _rates(f"Calls per second, by method {_FINE}", "calls", "method"),
        _means(f"Mean time of a call, by method {_FINE}", "method"),
        Panel(
            f"99th percentile, by method {_FINE}",
            f"histogram_quantile(0.99, {_rate('call_seconds_bucket', 'method', 'le')})",
            *(("method",), "s"),
        ),
    ),
    "Lanes": (
        _rates("Calls per second, by lane", "calls", "lane"),
        _rates("Bytes per second, by lane", "bytes", "lane", "direction", unit="Bps"),
        _means("Mean time of a call, by lane", "lane"),
    ),
    "Queues and topics": (
        _values("Items that wait", "queue_items", "kind", "name"),
        _values("Bytes that wait", "queue_bytes", "kind", "name", unit="bytes"),
        _values("Age of the oldest item", "queue_oldest_seconds", "kind", "name", unit="s", merge="max"),
        _rates("Items per second", "queue_moved", "kind", "name", "operation"),
        _values("Operations that wait", "queue_waiting", "kind", "name", "operation"),
        _values(f"Items that wait, by subscriber {_FINE}", "queue_items", "name", "subscriber"),
    ),
    "Weights": (
        _values("Version published", "weight_version", "store", of=', role="published"', merge="max"),
        _LAG,
        _values("Bytes of the present version", "weight_version_bytes", "store", "member", "state", unit="bytes"),
        _values(
            "Memory held for readers, and mapped from others", "weight_memory", "store", "member", "state", unit="bytes"
        ),
        _rates("Bytes per second", "weight_bytes", "store", "member", "direction", unit="Bps"),
        _rates("Pulls per second", "weight_pulls", "store", "outcome"),
    ),
    "Losses": (
        _rates("Failed calls per second, by error", "failures", "error"),
        _rates("Failed calls per second, by member", "failures", "member"),
        _values("Peers that a member cannot call", "peers_away", "member", merge="max"),
        _values("Returns after a loss, by member", "returns", "member", merge="max"),
    ),
}


def build() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, members in ROWS.items():
        panels.append({"type": "row", "title": row, "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1}})
        for place, panel in enumerate(members):
            where = {"x": place % 3 * _HEIGHT, "y": top + 1 + place // 3 * _HEIGHT, "w": _HEIGHT, "h": _HEIGHT}
            panels.append(_panel(panel, where))
        top = panels[-1]["gridPos"]["y"] + _HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    return {
        **{"title": "raytorchrpc", "uid": "raytorchrpc", "tags": ["ray"], "schemaVersion": 39, "editable": True},
        **{"time": {"from": "now-30m", "to": "now"}, "refresh": "10s", "panels": panels},
        "templating": {"list": [source, _variable("group"), _variable("member", _GROUP)]},
    }


def _panel(panel: Panel, where: dict[str, int]) -> dict[str, Any]:
    legend = " ".join(f"{{{{{label}}}}}" for label in panel.by)
    return {
        **{"type": "timeseries", "title": panel.title, "gridPos": where, "datasource": _SOURCE},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [{"expr": panel.query, "legendFormat": legend, "refId": "A", "datasource": _SOURCE}],
    }


def _variable(label: str, where: str = "") -> dict[str, Any]:
    query = f"label_values({series(next(iter(METRICS)))}{{{where}}}, {label})"
    return {
        **{"name": label, "label": label.capitalize(), "type": "query", "query": query, "datasource": _SOURCE},
        **{"includeAll": True, "allValue": ".*", "multi": True, "current": {"text": "All", "value": "$__all"}},
        **{"refresh": 2, "sort": 1},
    }
