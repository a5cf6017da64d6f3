"""Ray Direct Transport: the tensors of Ray's ObjectRefs travel over a group's lanes."""

from raytorchrpc.rdt.api import TRANSPORT, enable, enable_where_possible, get, held, wait

__all__ = ["TRANSPORT", "enable", "enable_where_possible", "get", "held", "wait"]
