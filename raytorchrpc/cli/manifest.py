"""``raytorchrpc manifest``: KubeRay YAML from a few options."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from raytorchrpc.cli.plain_help import Command, Group

app = typer.Typer(help="Write Kubernetes manifests for KubeRay.", no_args_is_help=True, cls=Group)


@app.command(cls=Command)
def raycluster(
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image with raytorchrpc, torch and Ray.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the job or cluster.")] = "raytorchrpc",
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Kubernetes namespace.")] = "default",
    ray_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Ray's version in the image; default: the installed one.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="Number of worker pods, besides the head.")] = 2,
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs per worker.")] = 0,
    cpus: Annotated[int, typer.Option(metavar="N", help="CPUs per worker.")] = 8,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory per worker, including /dev/shm.")] = "32Gi",
    shm: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of /dev/shm per worker; counts as its memory.")
    ] = "8Gi",
    rdma_resource: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cluster's RDMA resource, such as rdma/hca_shared_devices_a.")
    ] = None,
    rdma_count: Annotated[int, typer.Option(metavar="N", help="RDMA resources per worker.")] = 1,
    host_network: Annotated[bool, typer.Option("--host-network", help="Workers use the node's network.")] = False,
    non_root: Annotated[
        bool, typer.Option("--non-root", help="With RDMA: keep the image's user; see docs/kubernetes.md.")
    ] = False,
    auth: Annotated[str, typer.Option(metavar="NAME", help="Ray's authentication: token or disabled.")] = "token",
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Variable for every pod; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write; default: print it.")] = None,
) -> None:
    """Write a RayCluster, to which jobs are submitted."""
    _write("raycluster", dict(locals()))


def rayjob(
    entrypoint: Annotated[str, typer.Option(metavar="COMMAND", help="The command, as for `ray job submit`.")],
    **more: Any,
) -> None:
    """Write a RayJob: one command on a cluster of its own, which ends with it."""
    _write("rayjob", {"entrypoint": entrypoint, **more})


# typer takes the options from the signature: those of the cluster, and the command.
_own, _cluster = signature(rayjob, eval_str=True), signature(raycluster, eval_str=True)
_image, *_others = _cluster.parameters.values()
rayjob.__signature__ = _cluster.replace(  # type: ignore[attr-defined]
    parameters=[_image, _own.parameters["entrypoint"], *_others]
)
app.command(cls=Command)(rayjob)


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
        options = JobOptions(**values) if kind == "rayjob" else ClusterOptions(**values)
        text = to_yaml(ray_job(options) if isinstance(options, JobOptions) else ray_cluster(options), options)
        if output is None:
            typer.echo(text, nl=False)
        else:
            output.write_text(text)
    except (ConfigurationError, OSError) as error:
        typer.echo(f"raytorchrpc manifest {kind}: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from error
