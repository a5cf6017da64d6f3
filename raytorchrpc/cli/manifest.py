"""``raytorchrpc manifest``: KubeRay YAML from a few options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Write Kubernetes manifests for KubeRay.", no_args_is_help=True)

_Name = Annotated[str, typer.Option(help="Name of the job or cluster.")]
_Image = Annotated[str, typer.Option(help="Container image with raytorchrpc, torch and Ray.")]
_RayVersion = Annotated[str | None, typer.Option(help="Ray's version in the image; default: the installed one.")]
_Workers = Annotated[int, typer.Option(help="Number of worker pods, besides the head.")]
_Gpus = Annotated[int, typer.Option(help="GPUs per worker.")]
_Cpus = Annotated[int, typer.Option(help="CPUs per worker.")]
_Memory = Annotated[str, typer.Option(help="Memory per worker, including /dev/shm.")]
_Shm = Annotated[str, typer.Option(help="Size of /dev/shm per worker; counts as its memory.")]
_Rdma = Annotated[str | None, typer.Option(help="The cluster's RDMA resource, such as rdma/hca_shared_devices_a.")]
_RdmaCount = Annotated[int, typer.Option(help="RDMA resources per worker.")]
_HostNetwork = Annotated[bool, typer.Option("--host-network", help="Workers use the node's network.")]
_NonRoot = Annotated[bool, typer.Option("--non-root", help="With RDMA: keep the image's user (see the docs).")]
_Auth = Annotated[str, typer.Option(help="Ray's authentication: token or disabled.")]
_Env = Annotated[list[str] | None, typer.Option(help="NAME=VALUE for every pod; repeatable.")]
_Namespace = Annotated[str, typer.Option(help="Kubernetes namespace.")]
_Output = Annotated[Path | None, typer.Option(help="File to write; default: print it.")]


@app.command()
def raycluster(
    image: _Image,
    name: _Name = "raytorchrpc",
    namespace: _Namespace = "default",
    ray_version: _RayVersion = None,
    workers: _Workers = 2,
    gpus: _Gpus = 0,
    cpus: _Cpus = 8,
    memory: _Memory = "32Gi",
    shm: _Shm = "8Gi",
    rdma_resource: _Rdma = None,
    rdma_count: _RdmaCount = 1,
    host_network: _HostNetwork = False,
    non_root: _NonRoot = False,
    auth: _Auth = "token",
    env: _Env = None,
    output: _Output = None,
) -> None:
    """Write a RayCluster, to which jobs are submitted."""
    _write("raycluster", dict(locals()))


@app.command()
def rayjob(
    image: _Image,
    entrypoint: Annotated[str, typer.Option(help="The command, as for `ray job submit`.")],
    name: _Name = "raytorchrpc",
    namespace: _Namespace = "default",
    ray_version: _RayVersion = None,
    workers: _Workers = 2,
    gpus: _Gpus = 0,
    cpus: _Cpus = 8,
    memory: _Memory = "32Gi",
    shm: _Shm = "8Gi",
    rdma_resource: _Rdma = None,
    rdma_count: _RdmaCount = 1,
    host_network: _HostNetwork = False,
    non_root: _NonRoot = False,
    auth: _Auth = "token",
    env: _Env = None,
    output: _Output = None,
) -> None:
    """Write a RayJob: one command on a cluster of its own, which ends with it."""
    _write("rayjob", dict(locals()))


def _write(kind: str, values: dict[str, Any]) -> None:
    import ray

    from raytorchrpc.errors import ConfigurationError
    from raytorchrpc.manifest import ClusterOptions, JobOptions, ray_cluster, ray_job, to_yaml

    output: Path | None = values.pop("output")
    values["root"] = not values.pop("non_root")
    values["ray_version"] = values["ray_version"] or ray.__version__
    pairs = values.pop("env") or []
    try:
        if bad := [pair for pair in pairs if "=" not in pair]:
            raise ConfigurationError(f"env: {bad[0]!r} is not NAME=VALUE")
        values["env"] = dict(pair.split("=", 1) for pair in pairs)
        if kind == "rayjob":
            job = JobOptions(**values)
            text = to_yaml(ray_job(job), job)
        else:
            cluster = ClusterOptions(**values)
            text = to_yaml(ray_cluster(cluster), cluster)
        if output is None:
            typer.echo(text, nl=False)
        else:
            output.write_text(text)
    except (ConfigurationError, OSError) as error:
        typer.echo(f"raytorchrpc manifest {kind}: {error}", err=True)
        raise typer.Exit(1) from error
