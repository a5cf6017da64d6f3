"""Derives data/kuberay_v1.json from KubeRay's CRDs: the names, types and rules of what manifests here can have.

    python -m tests.unit.kuberay_schema VERSION ray.io_rayjobs.yaml ray.io_rayclusters.yaml > kuberay_v1.json

The files lie in ray-operator/config/crd/bases of a release of KubeRay. Of every object on the way to a field that a
manifest can have, all fields are kept by name, so that an unknown one is refused; what lies below others is left out.
A field of ours that the CRD does not have ends this program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.unit.manifests import everything

_RULES = ("type", "enum", "pattern", "minimum", "maximum", "anyOf", "required")


def compact(schema: dict[str, Any], samples: list[Any]) -> dict[str, Any]:
    """That part of a schema which these values reach."""
    kept: dict[str, Any] = {rule: schema[rule] for rule in _RULES if rule in schema}
    if "properties" in schema:
        kept["additionalProperties"] = False
        kept["properties"] = {}
        used = {key for sample in samples for key in sample}
        if unknown := used - schema["properties"].keys():
            raise SystemExit(f"KubeRay has no field {', '.join(sorted(unknown))} there")
        for name, below in schema["properties"].items():
            reached = [sample[name] for sample in samples if name in sample]
            kept["properties"][name] = compact(below, reached) if reached else {}
    elif isinstance(schema.get("additionalProperties"), dict):
        reached = [value for sample in samples for value in sample.values()]
        kept["additionalProperties"] = compact(schema["additionalProperties"], reached)
    elif "items" in schema:
        kept["items"] = compact(schema["items"], [item for sample in samples for item in sample])
    return kept


def main(version: str, *files: str) -> None:
    found: dict[str, Any] = {
        "source": f"Names, types and rules derived from the CustomResourceDefinitions of KubeRay {version} by "
        "tests/unit/kuberay_schema.py"
    }
    for file in files:
        definition = yaml.safe_load(Path(file).read_text())["spec"]
        kind = definition["names"]["kind"]
        (served,) = (each for each in definition["versions"] if each["name"] == "v1")
        whole = served["schema"]["openAPIV3Schema"]
        found[kind] = compact({**whole, "required": ["apiVersion", "kind", "metadata", "spec"]}, everything(kind))
        found[kind]["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    print(json.dumps(found, separators=(",", ":"), sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
