"""``python -m raytorchrpc.doctor._node NAME ADDRESS HOSTS``: prints this machine's evidence as JSON."""

from __future__ import annotations

import sys

from raytorchrpc.doctor.collector import gather


def main() -> None:
    name, node_ip, hosts = sys.argv[1:]
    print(gather(name=name, node_ip=node_ip, hosts=int(hosts)).model_dump_json())


if __name__ == "__main__":
    main()
