"""The commands and their options; the module of the same name implements each."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from raytorchrpc import __version__


def _without_type(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""  # recent releases of typer show <bool> otherwise
    return params


class Command(TyperCommand):
    """A command whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


class Group(TyperGroup):
    """A command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


_AddressOrLocal = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Address of a running Ray cluster; default: start a local one."),
]
_Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The cluster's address; default: RAY_ADDRESS, or the one on this machine."),
]

app = typer.Typer(
    name="raytorchrpc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    cls=Group,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"raytorchrpc {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Direct calls between Ray actors; tensors take the fastest available transport."""


@app.command(cls=Command)
def demo(
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of worker actors.")] = 2,
    target: Annotated[float, typer.Option(metavar="SHARE", min=0.0, max=1.0, help="Test accuracy to reach.")] = 0.95,
    max_steps: Annotated[int, typer.Option(metavar="N", min=1, help="Fail after that many steps.")] = 5000,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the data split, the model and the batches.")] = 0,
    address: _AddressOrLocal = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time fewer exchanges.")] = False,
) -> None:
    """Train a classifier with direct calls between Ray actors, then time the same calls through Ray."""
    given = {name: value for name, value in locals().items() if name != "quick"}
    from raytorchrpc.cli.demo import run  # imported here, because --help needs neither Ray nor torch

    run(**given, exchanges=50 if quick else 200)


@app.command(cls=Command)
def bench(
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Measure patterns of use instead of sizes: quiet, paced, history, in-flight, busy-callee, all-to-all, "
            "fan-in, idle (names or patterns, comma-separated), or all.",
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Rows to measure: names or patterns (nccl-*), comma-separated."),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="Sizes, such as 20KB,1.25MB; default: the published ones."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Device of the tensors: cpu, cuda or all.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows and sizes, under a minute of measuring.")] = False,
    budget_s: Annotated[
        float | None, typer.Option("--budget", metavar="SECONDS", help="Time limit of measuring, once actors are up.")
    ] = None,
    hosts: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="NODE NODE", help="Measure between these two Ray nodes (id, address or host name)."),
    ] = None,
    address: _AddressOrLocal = None,
    against: Annotated[
        str | None, typer.Option(metavar="published", help="Also show the field's published figures.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures, one per line.")] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the whole result, as input for --from.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw latency and bandwidth by size (PNG).")] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report: tables, how to reproduce them, gaps.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE", help="Show results of --json instead of measuring; repeatable."),
    ] = None,
) -> None:
    """Time every transport between two actors: raytorchrpc's lanes, Ray's transports, bare libraries.

    Exits with 0, with 2 for options that cannot work, or with 1 if the run fails.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from raytorchrpc.cli.bench import run
    from raytorchrpc.errors import ConfigurationError, RayTorchRpcError

    try:
        run(**given)
    except (RayTorchRpcError, ConnectionError) as error:
        typer.echo(f"raytorchrpc bench: {error}", err=True)
        bad_input = isinstance(error, ConfigurationError) or not isinstance(error, RayTorchRpcError)
        raise typer.Exit(2 if bad_input else 1) from error


@app.command(cls=Command)
def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Examine every node of a Ray cluster.")] = False,
    address: _Address = None,
    actors: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Examine these actors from inside: NAME or NAMESPACE/NAME, comma-separated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the whole report, as JSON.")] = False,
    sysfs_root: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Examine a tree with proc, sys and dev instead of this machine."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as problems.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for nodes and actors.")
    ] = 60.0,
) -> None:
    """Report what this machine's GPUs, adapters, limits and software mean for the lanes, and what to do."""
    given = dict(locals())
    from raytorchrpc.doctor.command import run

    raise typer.Exit(run(**given))


@app.command(cls=Command)
def top(
    address: _Address = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="Show only groups of this name.")] = None,
    interval_s: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Time between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table, covering one interval.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one line of JSON per update.")] = False,
) -> None:
    """Show a cluster's groups live: calls by pair, lane and method, queues, weights, and lost members."""
    given = dict(locals())
    from raytorchrpc.cli.top import run

    raise typer.Exit(run(**given))


@app.command(cls=Command)
def dashboard() -> None:
    """Print a dashboard for Ray's Grafana, as JSON to import there."""
    import json

    from raytorchrpc.cli.dashboard import build

    typer.echo(json.dumps(build(), indent=1))


manifest = typer.Typer(help="Write Kubernetes manifests for KubeRay.", no_args_is_help=True, cls=Group)
app.add_typer(manifest, name="manifest")


@manifest.command(cls=Command)
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
manifest.command(cls=Command)(rayjob)


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
