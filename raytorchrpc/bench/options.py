"""The user's options for a run, parsed from text and checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytorchrpc.bench.results import published_sizes
from raytorchrpc.bench.rows import DEVICES, QUICK, ROWS, Device, Row, choose
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.text.settings import size_in_bytes

MAX_SIZE = 64 * 10**9
#: Default limits of a whole run (seconds); ``--budget`` overrides them.
BUDGET_S, QUICK_BUDGET_S = 300.0, 50.0
MIN_BUDGET_S, MAX_BUDGET_S = 10.0, 86400.0
_QUICK_SIZES = (1_250, 1_250_000, 40_000_000)


@dataclass(frozen=True)
class Options:
    """The options of a run, before the limits of the machine apply."""

    rows: tuple[Row, ...]
    devices: tuple[Device, ...]
    sizes: tuple[int, ...]
    """Bytes, ascending."""
    budget_s: float
    hosts: tuple[str, str] | None = None


def make_options(
    *,
    rows: Sequence[str] = (),
    sizes: Sequence[str] = (),
    device: str = "all",
    quick: bool = False,
    budget_s: float | None = None,
    hosts: Sequence[str] = (),
) -> Options:
    """Parse the user's options; items of lists may hold commas. Raises ConfigurationError with one line."""
    devices = chosen_devices(device)
    names = split(rows)
    chosen = choose(names) if names else choose(QUICK) if quick else ROWS
    if not any(set(row.devices) & set(devices) for row in chosen):
        raise ConfigurationError(f"none of the rows {', '.join(row.name for row in chosen)} carries {device} tensors")
    budget_s = checked_budget(budget_s, QUICK_BUDGET_S if quick else BUDGET_S)
    given = tuple(sorted({parse_size(text) for text in split(sizes)}))
    if hosts and (len(hosts) != 2 or hosts[0] == hosts[1]):
        raise ConfigurationError("hosts must be two different Ray nodes, each given by id, address or host name")
    ends = (hosts[0], hosts[1]) if hosts else None
    return Options(chosen, devices, given or (_QUICK_SIZES if quick else published_sizes()), budget_s, ends)


def chosen_devices(device: str) -> tuple[Device, ...]:
    """The devices that ``--device`` names. Raises ConfigurationError."""
    if device not in (*DEVICES, "all"):
        raise ConfigurationError(f"device {device!r} is not one of {', '.join(DEVICES)}, all")
    return tuple(each for each in DEVICES if device in (each, "all"))


def checked_budget(budget_s: float | None, default_s: float) -> float:
    """The time for a whole run (seconds). Raises ConfigurationError."""
    budget_s = default_s if budget_s is None else budget_s
    if not MIN_BUDGET_S <= budget_s <= MAX_BUDGET_S:
        raise ConfigurationError(f"the budget must be {MIN_BUDGET_S:g} to {MAX_BUDGET_S:g} seconds, not {budget_s:g}")
    return budget_s


def split(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def parse_size(text: str) -> int:
    """Bytes of ``1250``, ``1.25KB``, ``2.5 GB`` (powers of 1000) or ``8MiB`` (of 1024). Raises ConfigurationError."""
    size = size_in_bytes(text)
    if size is None or not 1 <= size <= MAX_SIZE:
        raise ConfigurationError(f"size {text!r} is not a number of bytes up to {show_size(MAX_SIZE)}, such as 1.25MB")
    return size


def show_size(size: int) -> str:
    """Format bytes as the published tables do: ``1.25 KB``, ``640 MB``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"
