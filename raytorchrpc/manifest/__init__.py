"""Kubernetes manifests for KubeRay: ``RayJob`` and ``RayCluster`` of ``ray.io/v1``.

``options`` is what a user chooses, checked before anything is written; ``build`` makes the objects and their YAML.
"""

from __future__ import annotations

from raytorchrpc.manifest.build import ray_cluster, ray_job, to_yaml
from raytorchrpc.manifest.options import ClusterOptions, JobOptions

__all__ = ["ClusterOptions", "JobOptions", "ray_cluster", "ray_job", "to_yaml"]
