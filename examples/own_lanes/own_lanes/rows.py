"""The rows and rules of both lanes. Imports neither torch nor Ray, so a plan can be
made without them.
"""

from __future__ import annotations

from raytorchrpc.lanes.registry import Lane, Traffic
from raytorchrpc.lanes.rules import Pair, Verdict


def same_machine(pair: Pair, traffic: Traffic) -> Verdict:
    """Both lanes need one host, one user, and process ids that both members share."""
    if not pair.a.same_host(pair.b):
        return "different hosts"
    if not pair.a.shares(pair.b, "pid", "net", "user") or pair.a.uid != pair.b.uid:
        return "same host, but different containers or users"
    return ("Unix sockets" if traffic == "calls" else "memfds"), "same host"


MEMFD = Lane(
    name="memfd",
    carries=("cpu",),
    rule="own_lanes.rows:same_machine",
    make="own_lanes.memfd:make",
    out_of_band=True,
)
UNIX_STREAM = Lane(
    name="unix_stream",
    carries=("calls",),
    rule="own_lanes.rows:same_machine",
    make="own_lanes.unix_stream:make",
    carries_descriptors=True,
)
