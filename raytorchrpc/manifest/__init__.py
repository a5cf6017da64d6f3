"""Kubernetes manifests for KubeRay: ``RayJob`` and ``RayCluster`` of ``ray.io/v1``.

``options`` holds and checks the user's choices; ``build`` creates the objects and their YAML.
"""

from __future__ import annotations

from raytorchrpc.manifest.build import ray_cluster, ray_job, to_yaml
from raytorchrpc.manifest.options import ClusterOptions, JobOptions

__all__ = ["ClusterOptions", "JobOptions", "ray_cluster", "ray_job", "to_yaml"]
