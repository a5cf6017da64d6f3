"""A driver that reaches the cluster by Ray Client: it cannot be in a group, but what it starts in the cluster can."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import ray

from tests.polling import wait_until
from tests.ray.scripts import Script

pytest.importorskip("grpc", reason="Ray Client needs grpcio")

DRIVER = """
ray.init(os.environ["CLUSTER"])

def form():
    a, b = actors()
    with rtr.init_group({"a": a, "b": b}):
        return ray.get(a.call.remote("b", "double", 21))

for use in (form, rtr.get_group, rtr.join, lambda: rtr.rpc_sync("a").double(1)):
    try:
        use()
    except rtr.NotAMember as error:
        assert "uses Ray Client" in str(error), error
        print("refused")
print(ray.get(ray.remote(num_cpus=0)(form).remote(), timeout=120))
"""


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_driver_by_ray_client_forms_its_group_in_a_task(cluster: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = ray.get_runtime_context().gcs_address
    options = ["--address", address, "--host", "127.0.0.1", "--port", str(port), "--mode", "legacy"]
    server = subprocess.Popen([sys.executable, "-m", "ray.util.client.server", *options])
    try:
        assert wait_until(lambda: answers(port), 60)
        script = Script(DRIVER, f"ray://127.0.0.1:{port}")
        try:
            ended, out, err = script.run()
            assert (ended, out.split()) == (0, ["refused"] * 4 + ["42"]), err
        finally:
            script.end()
    finally:
        server.terminate()
        server.wait(30)
