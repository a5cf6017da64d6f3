"""Who may import whom, read off the import statements; and what importing the package may not do."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "raytorchrpc"
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

#: Anybody may import these: data and errors, what a fork needs, and the one file with private names.
COMMON = {"errors", "config", "metrics", "_compat", "_processes", "forking", "threads"}
#: What a room may import besides. A room that is not here may import COMMON only: say here what a new one needs.
MAY_IMPORT = {
    "__init__": {
        *("calls", "collectives", "device_map", "group", "member", "peers", "process_groups", "queues", "rdt"),
        *("readmission", "runtime_env", "topics", "weights"),
    },
    "queues": {"_channel_home", "_channels", "_outlet", "_store", "handles", "member"},
    "topics": {"_channel_home", "_channels", "_outlet", "_store", "handles", "member", "queues"},
    "_channels": {
        *("_channel_home", "_items", "_order", "_outlet", "_store", "calls", "execution", "handles", "loops", "member"),
        "services",
    },
    "_channel_home": {"_items", "_order", "_outlet", "_store", "handles", "member", "services"},
    "_order": {"_items", "_store", "handles", "services"},
    "_store": {"_items", "_outlet", "services"},
    "_outlet": {"_items", "services"},
    "_items": {"_bulk", "codec", "lanes.base", "streams"},
    "weights": {
        *("_published", "_pulling", "_relays", "_snapshots", "_weight_services", "calls", "filling", "handles"),
        *("member", "services"),
    },
    "_weight_services": {"_published", "_relays", "handles", "member", "services"},
    "_pulling": {"_published", "_snapshots", "lanes.base"},
    "_published": {"_relays", "_snapshots", "lanes.base", "member", "peers", "services"},
    "_relays": {"services"},
    "_snapshots": {"lanes.base", "staging", "streams"},
    "handles": {"calls", "execution", "member", "peers", "readmission", "services", "serving"},
    "group": {
        *("admission", "collectives", "device_map", "forming", "joining", "keeping", "member", "news", "peers"),
        *("routing", "traces"),
    },
    "keeping": {
        "lanes._tls",
        *("admission", "collectives", "equipment", "forming", "news", "roster", "supervision"),
        *("trace_file", "traces", "watching"),
    },
    "supervision": {
        *("admission", "collectives", "forming", "joining", "lines", "membership", "news", "peers", "process_groups"),
        *("requested", "returns", "roster"),
        "telling",
        "trace_file",
        "traces",
        "watching",
    },
    "traces": {"lines", "member", "roster", "trace_file", "tracing"},
    "trace_file": {"tracing"},
    "watching": {"lines", "member", "roster"},
    "telling": {"admission", "lines", "membership", "roster"},
    "process_groups": {"collectives", "lines", "member", "membership", "rendezvous", "roster", "topology"},
    "collectives": {"_gloo_peers", "_nccl_env", "_sockfilter", "rendezvous", "topology"},
    "_gloo_peers": {"_sockfilter"},
    "rendezvous": {"services"},
    "lines": {"lanes._acceptor", "lanes._credentials", "codec", "exceptions", "lanes.base", "lanes.socket", "serving"},
    "membership": {
        *("admission", "calls", "collectives", "execution", "fabric", "handles", "joining", "lanes.base", "member"),
        *("rendezvous", "services"),
    },
    "forming": {"admission", "joining", "peers", "roster"},
    "roster": {"lanes._credentials", "admission", "device_map", "fabric", "membership", "peers", "routing", "topology"},
    "joining": {
        *("admission", "device_map", "equipment", "exporting", "fabric", "lanes.absent", "lanes.base", "lanes.shm"),
        *("member", "peers", "rdt", "routing", "serving", "shipping"),
    },
    "equipment": {"_nccl_env", "admission", "calls", "fabric", "lanes", "member", "topology"},
    "admission": {"lanes._credentials", "device_map", "fabric", "peers", "routing", "topology"},
    "returns": {"mailbox", "readmission", "roster"},
    "calls": {"deferred", "execution", "loops", "member", "rdt", "retrying", "underway"},
    "deferred": {"loops", "readmission", "retrying", "services", "underway", "workers"},
    "readmission": {"mailbox", "services", "workers"},
    "mailbox": {"admission"},
    "retrying": {"execution", "loops", "underway", "workers"},
    "member": {
        "allowance",
        "codec",
        "collectives",
        "device_map",
        "execution",
        "filling",
        "loops",
        "lanes.base",
        "peers",
        "readmission",
        "retrying",
        "services",
        "serving",
        "shipping",
        "staging",
        "streams",
        "tracing",
        "underway",
        "workers",
    },
    "underway": {
        *("codec", "exceptions", "execution", "filling", "lanes.base", "loops", "peers", "serving", "shipping"),
        *("tracing", "workers"),
    },
    "filling": {"codec", "lanes.base", "shipping"},
    "allowance": {"execution", "loops", "peers"},
    "fabric": {"_sockfilter"},
    "peers": {"device_map", "lanes.base"},
    "codec": {"_bulk"},
    "exceptions": {"codec"},
    "serving": {
        *("autograd", "codec", "exceptions", "execution", "lanes.base", "services", "shipping", "staging", "streams"),
        *("loops", "tracing", "workers"),
    },
    "execution": {"loops"},
    "tracing": {"execution", "lanes.base", "loops"},
    "shipping": {"codec", "device_map", "lanes.base", "staging"},
    "staging": {"codec", "device_map", "lanes._cuda_driver", "lanes.base"},
    "streams": {"device_map"},
    "routing": {"_lane_rules", "_tensorpipe", "device_map", "topology"},
    "_lane_rules": {"_rdma", "_tensorpipe", "device_map", "topology"},
    "_tensorpipe": {"_rdma", "device_map", "topology"},
    "_rdma": {"topology"},
    "_nccl_env": {"_rdma", "topology"},
    "device_map": {"topology"},
    "topology": {"_sysfs"},
    "cli": {
        "",
        "__version__",
        "bench",
        "cli",
        "doctor",
        "group",
        "keeping",
        "manifest",
        "routing",
        "topology",
        "watching",
    },
    "manifest": {"manifest", "runtime_env"},
    "bench": {"", "__version__", "_rdma", "bench", "topology"},
    "doctor": {
        *("_lane_rules", "_nccl_env", "_rdma", "_sysfs", "_tensorpipe"),
        *("cli.doctor", "doctor", "routing", "topology"),
    },
    "rdt": {"_rdt_source", "_rdt_transport"},
    "_rdt_transport": {"_rdt_pull", "_rdt_source", "lanes.base", "rdt", "shipping"},
    "_rdt_pull": {
        "_rdt_source",
        "codec",
        "execution",
        "lanes.nng",
        "member",
        "peers",
        "retrying",
        "staging",
        "underway",
        "workers",
    },
    "_rdt_source": {"calls", "codec", "lanes.nng", "member", "serving", "streams"},
}
#: A lane may import these: never another lane, only the private files (lanes/_x) that it needs.
LANES_MAY_IMPORT = {"codec", "streams", "lanes._bounds", "lanes.base"}
#: Lanes, and private files beside them, that need something of their own.
LANE_EXTRAS = {
    "torchrpc": {"exceptions", "fabric"},
    "_handshake": {"lanes._credentials"},
    "_protection": {"lanes._credentials", "lanes._handshake", "lanes._tls"},
    "_tls": {"lanes._handshake"},
    "_frames": {"lanes._protection"},
    "_acceptor": {"lanes._credentials", "lanes._handshake", "lanes._protection"},
    "socket": {
        *("lanes._acceptor", "lanes._credentials", "lanes._patience", "lanes._connection", "lanes._frames"),
        *("lanes._handshake", "lanes._protection"),
    },
    "_connection": {"lanes._patience", "lanes._pending", "lanes._frames", "lanes._protection"},
    "nng": {"lanes._credentials", "lanes._handshake", "lanes._nng", "lanes._nng_line", "lanes._protection", "workers"},
    "_nng_line": {"lanes._frames", "lanes._nng", "lanes._pending", "lanes._protection"},
    "loopback": {"lanes._pending"},
    "shm": {"lanes._arena", "lanes._copier", "lanes._lent", "staging"},
    "_copier": {"workers"},
    "_lent": {"lanes._arena"},
    "cuda_ipc": {
        *("lanes._arena", "lanes._cuda_driver", "lanes._cuda_events", "lanes._cuda_shared", "lanes._pieces"),
    },
    "_cuda_events": {"lanes._arena", "lanes._cuda_driver"},
    "_cuda_shared": {"lanes._cuda_driver"},
    "nixl": {"lanes._nixl", "lanes._pieces", "lanes._registered"},
    "_registered": {"lanes._cuda_driver", "lanes._nixl"},
    "nccl": {
        *("lanes._acceptor", "lanes._carrier", "lanes._control", "lanes._credentials"),
        *("lanes._nccl_driver", "lanes._pieces", "lanes._protection", "lanes._two_sided"),
    },
    "_two_sided": {"lanes._carrier", "lanes._control"},
    "_nccl_driver": {"lanes._carrier", "lanes._pieces"},
    "_control": {"lanes._acceptor", "lanes._credentials", "lanes._handshake", "lanes._protection"},
}
PRIVATE_TO_LANES = {name for name in FILES if name.startswith("lanes._") and name != "lanes.__init__"}
WITHOUT_RAY = ("routing", "device_map", "codec", "config", "errors", "_nccl_env", "doctor.reports")
WITHOUT_TORCH = ("routing", "device_map", "config", "errors", "_nccl_env", "doctor.reports")


def imported(tree: ast.AST, *, at_load: bool = False) -> Iterator[str]:
    """Dotted names of what is imported; with ``at_load``, leaving out what functions import when they run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_load and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            yield from imported(node, at_load=at_load)


def rooms(name: str, *, at_load: bool = False) -> set[str]:
    """The files of this package that a file imports (its own name left out)."""
    found = set()
    for dotted in imported(TREES[name], at_load=at_load):
        head, _, rest = dotted.partition(".")
        if head != "raytorchrpc":
            continue
        while rest and rest not in FILES and f"{rest}.__init__" not in FILES and "." in rest:
            rest = rest.rpartition(".")[0]  # a name inside the file
        found.add(rest)
    return found - {name}


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("lanes.")])
def test_a_room_imports_only_those_below_it(name: str) -> None:
    package = name.partition(".")[0]
    room = package if package in ("bench", "cli", "doctor", "manifest") else name
    allowed = MAY_IMPORT.get(room, set()) | COMMON
    strangers = {other for other in rooms(name) if other not in allowed and other.partition(".")[0] not in allowed}
    assert not strangers, f"{name} may not import {strangers}"


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("lanes.")])
def test_a_lane_knows_no_other_lane_and_nothing_above_it(name: str) -> None:
    lane = name.removeprefix("lanes.")
    allowed = LANES_MAY_IMPORT | COMMON | LANE_EXTRAS.get(lane, set())
    strangers = rooms(name) - allowed
    assert not strangers, f"{name} may not import {strangers}"


def test_what_lanes_are_allowed_holds_no_lane_and_nothing_above_them() -> None:
    allowed = LANES_MAY_IMPORT.union(*LANE_EXTRAS.values())
    assert not {other for other in allowed if other.startswith("lanes.")} - {"lanes.base"} - PRIVATE_TO_LANES
    assert not allowed & {"group", "forming", "joining", "member", "calls", "serving", "shipping", "routing"}


def loaded_by(name: str) -> set[str]:
    """The files that are loaded with this one, the package's own __init__ left out."""
    found, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in FILES and current not in found:
            found.add(current)
            todo += rooms(current, at_load=True)
    return found


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, "ray") for name in WITHOUT_RAY] + [(name, "torch") for name in WITHOUT_TORCH],
)
def test_a_pure_room_loads_without(name: str, library: str) -> None:
    for file in loaded_by(name):
        used = {dotted.partition(".")[0] for dotted in imported(TREES[file], at_load=True)}
        assert library not in used, f"{name} loads {library} through {file}"


# --- private names ---------------------------------------------------------------------------------------


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_imports(tree: ast.AST) -> set[str]:
    """Imports of torch or Ray with a private name anywhere on the way."""
    return {
        dotted
        for dotted in imported(tree)
        if dotted.partition(".")[0] in ("ray", "torch") and any(private(part) for part in dotted.split("."))
    }


def private_attributes(tree: ast.AST) -> set[str]:
    """``torch._x``, ``rpc.api._x``, ``rpc.f(_x=...)``: private names reached from something that was imported
    from torch or Ray."""
    roots = {"ray", "torch"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                whole = alias.name if isinstance(node, ast.Import) else f"{module}.{alias.name}"
                if whole.partition(".")[0] in ("ray", "torch"):
                    roots.add(alias.asname or alias.name.partition(".")[0])
    found = set()
    for node in ast.walk(tree):
        reached: ast.expr = node.func if isinstance(node, ast.Call) else node  # type: ignore[assignment]
        parts = []
        while isinstance(reached, ast.Attribute):
            parts.append(reached.attr)
            reached = reached.value
        if isinstance(reached, ast.Name) and reached.id in roots:
            found.update(part for part in parts if private(part))
            if isinstance(node, ast.Call):
                found.update(keyword.arg for keyword in node.keywords if keyword.arg and private(keyword.arg))
    return found


def mentioned(tree: ast.AST) -> set[str]:
    """Everything a file could reach a name by: attributes, keywords, text for getattr and ``**``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def names_of_compat() -> set[str]:
    """The private names of torch and Ray that _compat uses, on whatever object."""
    tree = TREES["_compat"]
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    parts = {part for dotted in private_imports(tree) for part in dotted.split(".")}
    state = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(target := node.target, ast.Name)
    }
    return {name for name in parts | mentioned(tree) if private(name) and name.isidentifier()} - own - state


@pytest.mark.parametrize("name", [name for name in FILES if name != "_compat"])
def test_only_compat_touches_private_names_of_torch_and_ray(name: str) -> None:
    assert not private_imports(TREES[name])
    assert not private_attributes(TREES[name])
    assert not mentioned(TREES[name]) & names_of_compat()


def test_every_private_name_in_compat_is_named_by_a_test() -> None:
    """A test that says what broke when the name moves; see tests/unit/test_compat.py."""
    tests = Path(__file__).parents[1]
    text = "\n".join((tests / kind / "test_compat.py").read_text() for kind in ("unit", "ray"))
    forgotten = {name for name in names_of_compat() if name not in text}
    assert not forgotten


def test_the_search_for_private_names_finds_them() -> None:
    tree = ast.parse(
        "import torch\nimport torch.distributed.rpc as rpc\nfrom ray._private import state\n"
        "torch._C.f()\nrpc.api._g\nrpc.Options(_h=1)\nself._own\nrpc.__name__"
    )
    assert private_attributes(tree) == {"_C", "_g", "_h"}
    assert private_imports(tree) == {"ray._private.state"}
    assert {"_init_rpc_states", "_actor_id", "_transports", "_private"} <= names_of_compat()


# --- what importing does ---------------------------------------------------------------------------------

WHAT_CHANGES = """
import json, logging, os, signal, sys, threading, warnings
import ray, torch, torch.distributed.rpc, pydantic  # what these do is not ours

def state():
    loggers = [logging.getLogger(), *map(logging.getLogger, sorted(logging.Logger.manager.loggerDict))]
    return {
        "environment": dict(os.environ),
        "logging": {l.name: (l.level, repr(l.handlers), l.propagate, l.disabled) for l in loggers},
        "warnings": repr(warnings.filters),
        "threads": sorted(t.name for t in threading.enumerate()),
        "signals": repr([signal.getsignal(s) for s in signal.valid_signals()]),
        "directory": os.getcwd(),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "cuda": torch.cuda.is_initialized(),
        "ray": ray.is_initialized(),
        "agent": torch.distributed.rpc.api._is_current_rpc_agent_set(),
    }

before = state()
import raytorchrpc
after = state()
ours = [name for name in after["logging"] if name.split(".")[0] == "raytorchrpc"]
quiet = (0, "[]", True, False)
loud = [name for name in ours if after["logging"].pop(name) != quiet]
for name in list(after["logging"]):
    if name not in before["logging"] and after["logging"][name] == quiet:
        del after["logging"][name]  # some other library asked for a logger, and set nothing
print(json.dumps({"changed": [key for key in before if before[key] != after[key]], "loud": loud, "ours": ours}))
"""


def test_importing_changes_nothing_in_the_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WHAT_CHANGES], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen["ours"], "the package's loggers have other names now"
    assert (seen["changed"], seen["loud"]) == ([], [])
    assert ran.stderr == ""
