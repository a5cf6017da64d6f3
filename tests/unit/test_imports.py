"""Which package may import which, read off the import statements; and what importing the package may not do."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raytorchrpc as rtr
from tests.unit.sources import parse

PACKAGE = Path(__file__).parents[2] / "raytorchrpc"
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}

#: What each package may import besides itself, from the ground up. ``lanes.*`` stands for every lane's folder. A module
#: at the top level is a package here; all of them may import ``errors`` and ``_compat``.
MAY_IMPORT: dict[str, set[str]] = {
    **{name: set() for name in ("errors", "_compat", "runtime_env", "process")},
    "text": set(),
    "_loading": {"process"},
    "lanes.registry": set(),
    "config": {"text", "lanes.registry"},
    "tensors": {"process"},
    "topology": {"tensors.devices", "config"},
    "lanes.base": {"process.completion", "process.locks", "tensors"},
    "lanes.common": {"lanes.base", "process", "tensors"},
    "lanes.setup": {"lanes.registry", "lanes.base", "lanes.common", "process", "topology", "config"},
    "lanes.*": {"lanes.base", "lanes.common", "lanes.setup", "process", "tensors", "topology", "config"},
    "lanes.rules": {"lanes.registry", "lanes.torchrpc.backends", "topology", "config"},
    "routing": {"text", "lanes.registry", "lanes.rules", "lanes.torchrpc.backends", "topology", "config"},
    "calls": {"text", "lanes.base", "process", "tensors", "config"},
    "patterns": {"calls", "lanes.base", "process", "tensors"},
    "rdt": {"calls", "lanes.base", "lanes.nng.offers", "process", "tensors"},
    "decorator": {"calls", "rdt"},
    "integrations": {
        *("__init__", "process.threads", "process.this_process", "group.tickets", "calls.receive_into", "lanes.base"),
        *("patterns.regions.reading", "process.locks", "process.workers", "tensors.host_device_copy", "text"),
    },
    "group": {
        *("_loading", "calls", "config", "lanes.base", "lanes.common", "lanes.registry", "lanes.setup", "lanes.socket"),
        *("lanes.torchrpc", "patterns.home", "patterns.waits", "process", "rdt", "routing", "tensors", "topology"),
    },
    "__init__": {
        *("_loading", "calls", "config", "decorator", "group", "patterns", "rdt", "runtime_env", "text"),
        *("tensors.distributed_tensors", "topology"),
    },
}
"""Operators' tools (bench, cli, doctor, manifest) may import anything below them; nothing imports them."""
TOOLS = {"bench": {"cli"}, "cli": set(), "doctor": {"bench", "cli", "manifest"}, "manifest": {"bench", "cli", "doctor"}}
#: The most levels that module imports have.
LEVELS = 19
#: "module: what it fills below it, when it is imported". This list shrinks.
FILLED_FROM_ABOVE: set[str] = set()
#: What users import, and the command line; ``lanes.base`` and ``lanes.setup`` are for lanes of other distributions.
PUBLIC = {"rdt", "errors", "doctor", "cli", "cli.app", "lanes.base", "lanes.setup"}
PUBLIC |= {
    f"integrations.{package}"
    for package in (
        "adapters",
        "kv_handover",
        "sglang",
        "torchrl",
        "ray_queue",
        "transferqueue",
        "trl",
        "verl",
        *("vllm", "vllm.adapters", "vllm.engine", "vllm.kv", "vllm.trainer"),
    )
}
#: Modules whose functions depend on their arguments alone, and whose objects change by calls alone: tests may use them.
#: They have no threads, sockets, processes or Ray of their own.
PURE = {
    *("config", "manifest", "routing", "runtime_env", "text"),
    *(
        "bench.cases",
        "bench.contestants",
        "bench.options",
        "bench.patterns",
        "bench.plots",
        "bench.results",
        "bench.site",
        "bench.tables",
    ),
    *("doctor.examination", "doctor.report"),
    "_compat.requirements",
    *("calls.counters", "calls.metrics", "calls.options", "calls.protocol", "calls.receive_into"),
    *(
        "calls.spans",
        "integrations.versions",
        "integrations.recording",
        "integrations.engines",
        "integrations.follower",
    ),
    *("group.core", "group.messages", "group.roster", "group.tracing", "group.view"),
    *("lanes.common.frames", "lanes.common.handshake", "lanes.common.packing", "lanes.registry", "lanes.rules"),
    *("patterns.queues.items", "patterns.queues.store"),
    *("patterns.weights.conversions", "patterns.weights.deltas", "patterns.weights.model_tensors"),
    *("patterns.weights.plan", "patterns.weights.pull_plan", "patterns.weights.relays", "patterns.weights.shards"),
    "patterns.weights.slices",
    *("tensors.codec", "tensors.devices", "tensors.dtypes", "tensors.exceptions", "tensors.plain_values"),
    *("tensors.kept_errors", "tensors.thread_modes"),
    *("topology.device_map", "topology.endpoint", "topology.nccl_env", "topology.rdma"),
}
#: What makes members in the process of a test, callees without one and GPUs out of the CPU, and what tests of actors
#: see inside a member. The last are about private names of Ray and torch, as _compat is.
SEAMS = (
    *("conformance/", "unit/members.py", "unit/callees.py", "unit/host_kernels.py", "insides.py"),
    *("unit/test_compat.py", "unit/compat_agents.py", "ray/test_compat.py"),
)
#: At most so many files import other modules of the package; see the seams in CONTRIBUTING.md.
TESTS_OF_PRIVATE_MODULES = 57
WITHOUT_RAY = (
    *("routing.planner", "lanes.registry", "lanes.rules", "topology.device_map", "topology.nccl_env", "tensors.codec"),
    *("config", "errors", "doctor.examination"),
)
WITHOUT_TORCH = (
    *("routing.planner", "lanes.registry", "lanes.rules", "topology.device_map", "topology.nccl_env", "config"),
    *("errors", "doctor.examination"),
)


@functools.cache
def tree_of(name: str) -> ast.Module:
    return parse(FILES[name].read_text())


def imported(tree: ast.AST, *, at_load: bool = False) -> Iterator[str]:
    """Dotted names of what is imported; with ``at_load``, leaving out what functions import when they run, and what
    only annotations need.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr) or (at_load and isinstance(node, ast.If) and is_name(node.test, "TYPE_CHECKING")):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_load and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            yield from imported(node, at_load=at_load)


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def module_of(dotted: str) -> str | None:
    """The module of this package in which an imported name is."""
    head, _, rest = dotted.partition(".")
    while rest and rest not in FILES and f"{rest}.__init__" not in FILES:
        rest = rest.rpartition(".")[0]  # a name inside the module
    return (rest or "__init__") if head == "raytorchrpc" else None


@functools.cache
def modules(name: str, *, at_load: bool = False) -> set[str]:
    """The modules of this package that a module imports."""
    return {found for dotted in imported(tree_of(name), at_load=at_load) if (found := module_of(dotted))} - {name}


def package(name: str) -> str:
    """The row of MAY_IMPORT for a module."""
    first, second, *_ = [*name.split("."), ""]
    if first != "lanes":
        return first
    return f"lanes.{second}" if f"lanes.{second}" in MAY_IMPORT else "lanes.*"


def inside(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("row", [*MAY_IMPORT, *TOOLS])
def test_a_package_imports_only_what_lies_below_it(row: str) -> None:
    names = [name for name in FILES if package(name) == row and name != "lanes.__init__"]
    assert names
    for name in names:
        own = {".".join(name.split(".")[:2]) if row == "lanes.*" else row}
        found = modules(name) - {"errors"} - {module for module in modules(name) if inside(module, own | {"_compat"})}
        if row in TOOLS:
            wrong = {module for module in found if inside(module, TOOLS[row])}
        else:
            wrong = {module for module in found if not inside(module, MAY_IMPORT[row])}
        assert not wrong, f"{name} may not import {sorted(wrong)}"


def test_no_modules_import_each_other() -> None:
    """Neither directly nor around a circle, whenever the import runs."""
    todo = {name: modules(name) & FILES.keys() - {"__init__"} for name in FILES}
    while free := [name for name, needs in todo.items() if not needs & todo.keys()]:
        for name in free:
            del todo[name]
    assert not todo, f"a circle of imports in {sorted(todo)}"


def test_the_import_levels_stay_few() -> None:
    """A module is one level above the highest one that it imports when it is loaded."""

    @functools.cache
    def level(name: str) -> int:
        return 1 + max(map(level, modules(name, at_load=True) & FILES.keys() - {"__init__"}), default=0)

    levels = {name: level(name) for name in FILES if name != "__init__"}
    highest = max(levels, key=lambda name: levels[name])
    assert levels[highest] <= LEVELS, f"{highest} is on level {levels[highest]}"


def loaded_by(name: str) -> set[str]:
    """The files that are loaded with this one, the package's own __init__ left out."""
    found, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in FILES and current not in found:
            found.add(current)
            todo += modules(current, at_load=True)
    return found


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, "ray") for name in WITHOUT_RAY] + [(name, "torch") for name in WITHOUT_TORCH],
)
def test_a_pure_module_loads_without(name: str, library: str) -> None:
    for file in loaded_by(name):
        used = {dotted.partition(".")[0] for dotted in imported(tree_of(file), at_load=True)}
        assert library not in used, f"{name} loads {library} through {file}"


# --- registries that a module above fills when it is imported: who reads one has to know who imports ----------


def fillings(tree: ast.Module) -> Iterator[str]:
    """Names of this package that statements outside of functions change: by a call, a subscript or an attribute."""
    names = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "raytorchrpc":
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    todo: list[ast.AST] = [tree]
    while todo:
        changed: list[ast.expr] = []
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                changed += [each for each in node.decorator_list if isinstance(each, (ast.Call, ast.Attribute))]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                changed += [node.value.func] if node.value.args or node.value.keywords else []
            elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                changed += [target for target in targets if isinstance(target, (ast.Subscript, ast.Attribute))]
            elif isinstance(node, (ast.stmt, ast.excepthandler)):
                todo.append(node)
        for reached in changed:
            path: list[str] = []
            while isinstance(reached, (ast.Attribute, ast.Subscript, ast.Call)):
                path = [reached.attr, *path] if isinstance(reached, ast.Attribute) else path
                reached = reached.func if isinstance(reached, ast.Call) else reached.value
            if isinstance(reached, ast.Name) and reached.id in names:
                yield ".".join([names[reached.id], *path])


def test_no_module_fills_a_registry_below_it_when_it_is_imported() -> None:
    found = set()
    for name in FILES:
        for dotted in fillings(tree_of(name)):
            below = module_of(dotted)
            if below is not None and package(below) != package(name):
                found.add(f"{name}: {dotted.removeprefix('raytorchrpc.')}")
    assert found <= FILLED_FROM_ABOVE, f"hidden circles: {sorted(found - FILLED_FROM_ABOVE)}"
    assert found >= FILLED_FROM_ABOVE, f"gone, so take them off the list: {sorted(FILLED_FROM_ABOVE - found)}"


def test_the_search_for_filled_registries_finds_them() -> None:
    tree = parse(
        "from raytorchrpc.a import b, c\nfrom raytorchrpc.d import e as f\nfrom other import g\n"
        "b.register(1)\nb()\nx = b(1)\n@c.add('n')\ndef h():\n  b.register(2)\n@f\ndef i(): pass\n"
        "if x:\n  f['k'] = 1\ng[1] = 2\nb.hook = h\nb.y[0].z += 1"
    )
    assert sorted(fillings(tree)) == [
        "raytorchrpc.a.b.hook",
        "raytorchrpc.a.b.register",
        "raytorchrpc.a.b.y.z",
        "raytorchrpc.a.c.add",
        "raytorchrpc.d.e",
    ]


# --- tests -----------------------------------------------------------------------------------------------


_IMPORTS = re.compile(r"^ *(?:from raytorchrpc[\w.]* import (?:\([^)]*\)|.*)|import raytorchrpc.*)$", re.MULTILINE)


def test_few_test_files_import_private_modules() -> None:
    """A test sees what a user sees, or the contract of lanes, or a pure module."""
    assert not [name for name in PURE if name not in FILES and f"{name}.__init__" not in FILES]
    tests = Path(__file__).parents[1]
    found = []
    for path in sorted(tests.rglob("*.py")):
        name = str(path.relative_to(tests))
        imports = "\n".join(map(str.strip, _IMPORTS.findall(path.read_text())))  # parsing all files would take long
        used = {str(module_of(dotted)) for dotted in imported(parse(imports))} - {"None", "__init__"}
        if not name.startswith(SEAMS) and any(not inside(module, PURE) for module in used - PUBLIC):
            found.append(name)
    assert len(found) <= TESTS_OF_PRIVATE_MODULES, found


# --- threads ---------------------------------------------------------------------------------------------

#: What starts a thread. ``asyncio``'s leave what could not be started to be run later, when nobody waits for it.
STARTERS = {
    *("Thread", "ThreadPoolExecutor", "start_new_thread", "start_joinable_thread", "ThreadPool"),
    *("to_thread", "run_in_executor"),
}


def test_no_thread_is_started_outside_of_process_threads() -> None:
    found = []
    for name in FILES:
        if name == "process.threads" or inside(name, {"bench"}):  # the benchmark's own threads serve no member
            continue
        for node in ast.walk(tree_of(name)):
            called = node.func if isinstance(node, ast.Call) else None
            started = getattr(called, "attr", None) or getattr(called, "id", None)
            timer = started == "Timer" and isinstance(called, ast.Attribute)  # threading.Timer
            based = [getattr(base, "attr", None) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if started in STARTERS or timer or "Thread" in based:
                found.append(f"{name}:{getattr(node, 'lineno', 0)}")
    assert not found, f"use threads.start: {found}"


# --- names ---------------------------------------------------------------------------------------------------------

#: Names that send a reader back for the noun: say lease, deadline, transfers.
PRONOUNS = {"found", "its", "left", "mine", "near", "still", "this_one", "what"}


def bound(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """Line and name of each variable, argument and parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            yield node.lineno, node.name


@pytest.mark.parametrize("folder", ["raytorchrpc", "benchmarks", "examples"])
def test_no_variable_is_named_by_a_pronoun(folder: str) -> None:
    named = {
        f"{path.relative_to(PACKAGE.parent)}:{line}: {name}"
        for path in (PACKAGE.parent / folder).rglob("*.py")
        for line, name in bound(parse(path.read_text()))
        if name in PRONOUNS
    }
    assert not named, f"name it for the thing that it holds: {sorted(named)}"


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
    used: set[str] = set()
    own: set[str] = set()
    for tree in (tree_of(name) for name in FILES if inside(name, {"_compat"})):
        used |= mentioned(tree) | {part for dotted in private_imports(tree) for part in dotted.split(".")}
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
    return {name for name in used if private(name) and name.isidentifier()} - own


def test_only_compat_touches_private_names_of_torch_and_ray() -> None:
    names = names_of_compat()
    for name in FILES:
        if not inside(name, {"_compat"}):
            tree = tree_of(name)
            touched = private_imports(tree) | private_attributes(tree) | (mentioned(tree) & names)
            assert not touched, f"{name} touches {touched}"


def test_every_private_name_in_compat_is_named_by_a_test() -> None:
    """A test that says what broke when the name moves; see tests/unit/test_compat.py."""
    tests = Path(__file__).parents[1]
    text = "\n".join((tests / kind / "test_compat.py").read_text() for kind in ("unit", "ray"))
    forgotten = {name for name in names_of_compat() if name not in text}
    assert not forgotten


def test_the_search_for_private_names_finds_them() -> None:
    tree = parse(
        "import torch\nimport torch.distributed.rpc as rpc\nfrom ray._private import state\n"
        "torch._C.f()\nrpc.api._g\nrpc.Options(_h=1)\nself._own\nrpc.__name__"
    )
    assert private_attributes(tree) == {"_C", "_g", "_h"}
    assert private_imports(tree) == {"ray._private.state"}
    assert {"_init_rpc_states", "_actor_id", "_transports", "_private"} <= names_of_compat()


# --- what importing does ---------------------------------------------------------------------------------

WHAT_CHANGES = """
import importlib.util, json, logging, os, signal, sys, threading, warnings
import ray, torch, torch.distributed.rpc, numpy  # what these do is not ours
rdt = importlib.util.find_spec("ray.experimental.rdt") and importlib.import_module("ray.experimental.rdt.util")

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
        "transports": [*rdt.transport_manager_info] if rdt else None,
    }

before, loaded = state(), set(sys.modules)
import raytorchrpc
raytorchrpc.init_group  # loads all that is loaded when it is used
after = state()
found = {name.partition(".")[0] for name in set(sys.modules) - loaded} - sys.stdlib_module_names
ours = [name for name in after["logging"] if name.split(".")[0] == "raytorchrpc"]
quiet = (0, "[]", True, False)
loud = [name for name in ours if after["logging"].pop(name) != quiet]
for name in list(after["logging"]):
    if name not in before["logging"] and after["logging"][name] == quiet:
        del after["logging"][name]  # some other library asked for a logger, and set nothing
print(json.dumps({"changed": [key for key in before if before[key] != after[key]], "loud": loud, "ours": ours,
                  "packages": sorted(name for name in found if not name.startswith("_"))}))
"""


def test_importing_changes_nothing_in_the_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WHAT_CHANGES], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen["ours"], "the package's loggers have other names now"
    assert (seen["changed"], seen["loud"]) == ([], [])
    assert seen["packages"] == ["raytorchrpc"], "it would take longer to import"
    assert ran.stderr == ""


ALONE = """
import contextlib, io, sys
import raytorchrpc
assert "Queue" in dir(raytorchrpc) and raytorchrpc.errors.Empty is raytorchrpc.Empty
from raytorchrpc.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["raytorchrpc", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    assert out.getvalue(), line
print(sorted({"ray", "torch"} & set(sys.modules)))
from raytorchrpc import *
assert set(raytorchrpc.__all__) <= set(globals()) and rdt.TRANSPORT and callable(runtime_env)
print(sorted({"ray", "torch"} & set(sys.modules)))
"""
#: Take 0.1 to 0.3 s of processor time; Ray alone takes 0.5 s, and torch 2.
COMMANDS = ("--version", "--help", "examples list", "dashboard", "manifest raycluster --image a/b:1", "bench --help")


def test_the_package_and_quick_commands_load_neither_ray_nor_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ALONE], input="\n".join(COMMANDS), capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert ran.stdout.splitlines() == ["[]", "['ray', 'torch']"], ran.stderr


AT_ONCE = """
import importlib, sys, threading
import raytorchrpc
sys.modules["raytorchrpc.decorator"] = None
try:
    raytorchrpc.Queue
except ImportError:
    del sys.modules["raytorchrpc.decorator"]
def decorate():
    used.append(importlib.import_module("raytorchrpc.decorator").method)
used = []
threads = [threading.Thread(target=lambda: used.append(raytorchrpc.WeightStore), daemon=True) for _ in range(4)]
threads += [threading.Thread(target=decorate, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
print(len(used), raytorchrpc._has_begun)
"""


def test_threads_load_the_package_at_once_and_after_an_import_that_failed() -> None:
    ran = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert ran.stdout.split() == ["6", "True"], ran.stderr


def test_names_are_loaded_from_where_type_checkers_see_them() -> None:
    from raytorchrpc import _MODULE_OF

    seen = {dotted.rpartition(".")[2]: dotted for dotted in imported(tree_of("__init__"))}
    for name, module in _MODULE_OF.items():
        assert seen[name] == ("raytorchrpc.rdt" if name == "rdt" else f"raytorchrpc.{module}.{name}")
    assert _MODULE_OF.keys() | {name for name in rtr.__all__ if name in vars(rtr)} == set(rtr.__all__) <= seen.keys()
