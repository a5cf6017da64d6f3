"""The programs in the README and in docs/ run as they are printed, in a Ray that starts quickly.

A fence marked ``python`` is a complete program and is run; ``py`` marks a fragment. A fragment is compiled, and uses
only names that it or an earlier fence of the page defines; in that case the page says that it goes on.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import shlex
import symtable
from pathlib import Path
from typing import NamedTuple

import pytest
import ray

import raytorchrpc as rtr
from tests.programs import run_program
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
from tests.releases import obstacle

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


class Block(NamedTuple):
    where: str
    language: str
    code: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(f"{page.relative_to(ROOT)}:{line}", match["language"], match["code"]))
    return found


# The README's runs each time, in the Ray of all tests; the others are slow, and each starts a Ray of its own.
PROGRAMS = [
    pytest.param(block, id=block.where, marks=() if block.where.startswith("README") else pytest.mark.slow)
    for block in blocks()
    if block.language == "python"
]


def test_the_readme_has_a_program() -> None:
    assert any(block.language == "python" and block.where.startswith("README.md") for block in blocks())


def run_code(code: str, folder: Path, *before: str, **environ: str) -> tuple[int, str]:
    program = folder / "program.py"
    program.write_text(code, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYTORCHRPC_"))}
    env = {**kept, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), **environ}
    ran = run_program(*before, str(program), cwd=folder, env=env, timeout=250)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("block", PROGRAMS)
def test_a_program_runs_as_it_is(cluster: None, block: Block, tmp_path: Path) -> None:
    if "objectref=True" in block.code and (missed := obstacle("objectrefs")):
        pytest.skip(missed)
    if block.where.startswith("README"):
        of_this_ray = {
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            # Older releases leave it alone.
            **({"RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"]} if "RAY_AUTH_MODE" in os.environ else {}),
        }
        code, output = run_code(block.code, tmp_path, **of_this_ray)
    else:
        code, output = run_code(block.code, tmp_path, "-m", "tests.ray.local_ray")
    assert code == 0, f"{block.where}\n{output}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["calls", "tensors"])
def test_a_page_pasted_as_one_program_ends_quietly(page: str, tmp_path: Path) -> None:
    """In a Ray as ``ray.init()`` starts it, with a log monitor that shows what the actors print."""
    where = f"docs/howto/{page}.md:"
    snippets = [block.code for block in blocks() if block.language == "py" and block.where.startswith(where)]
    code, output = run_code("\n\n".join(snippets), tmp_path)
    assert code == 0 and not re.search(r"Error|Traceback|\[W\d", output), output


def names(code: str) -> tuple[set[str], set[str]]:
    """What a snippet uses without defining it, and what it defines."""
    table = symtable.symtable(code, "snippet", "exec")
    defined = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
    used, todo = set(), [table]
    while todo:
        scope = todo.pop()
        todo += scope.get_children()
        used |= {
            each.get_name()
            for each in scope.get_symbols()
            if each.is_referenced() and (scope is table or each.is_global())
        }
    return used - defined - set(dir(builtins)), defined


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_snippet_defines_what_it_uses_or_says_what_it_continues(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    one_program = re.search(r"snippets (on this page )?form one program", text)
    known: set[str] = set()
    for match in _FENCE.finditer(text):
        if match["language"] not in ("py", "python"):
            continue
        where = f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}"
        compile(match["code"], where, "exec")
        free, defined = names(match["code"])
        assert free <= known, f"{where} uses {sorted(free - known)}, which nothing above it defines"
        above = text[: match.start()].removesuffix("<!-- run -->\n").removesuffix("<!-- run gpu -->\n").rstrip()
        paragraph = above.rpartition("\n\n")[2]
        goes_on = one_program or re.search(r"\babove\b|\bcontinues?\b", paragraph)
        assert not free or goes_on, f"{where} uses {sorted(free)} of an earlier snippet and does not say so"
        known |= defined


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    outside = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for match in _LINK.finditer(outside):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        aim = (page.parent / target) if target else page
        assert aim.is_file(), f"{page.name} points to {target}"
        # The site has docs/ alone.
        assert page.parent == ROOT or aim.resolve().is_relative_to(ROOT / "docs"), f"{page.name} points to {target}"
        assert not anchor or anchor in _anchors(aim), f"{page.name} points to {match['target']}"


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


#: Runs each command in this one process, and prints its exit code and what it printed. A command that starts a process
#: of its own would take seconds.
_RUN_EACH = """
import contextlib, io, json, runpy, sys, warnings
warnings.filterwarnings("ignore", "Tip", FutureWarning)  # as in pyproject.toml
for module, arguments in json.load(sys.stdin):
    sys.argv[:] = [module, *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def commands() -> list[list[str]]:
    """The pages' commands that this library provides, but for ``bench``, ``demo`` and ``doctor --cluster``, which have
    tests of their own (``test_doctor``).
    """
    found = []
    for page in PAGES:
        for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
            lines = match["code"].replace("\\\n", "").splitlines() if match["language"] == "console" else []
            words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
            found += [each for each in words if each[:1] == ["raytorchrpc"] and each[1] not in ("bench", "demo")]
            found += [each for each in words if each[:2] == ["python", "-m"] and each[2].startswith("raytorchrpc")]
    return [each for each in found if "--cluster" not in each]


def test_every_command_of_a_page_runs(spawn: Spawn, tmp_path: Path) -> None:
    learner = spawn(Peer, name="learner")
    collector = spawn(Peer, name="collector", namespace="jobs")
    (tmp_path / "copy" / "proc").mkdir(parents=True)
    given = []
    for words in dict.fromkeys(map(tuple, commands())):
        module, words = (words[2], words[3:]) if words[0] == "python" else ("raytorchrpc.cli", words[1:])
        arguments = [ray.get_runtime_context().gcs_address if word == "10.0.0.1:6379" else word for word in words]
        arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
        if arguments[:1] == ["top"]:  # without --once it would run until Ctrl-C
            arguments = [*(word for word in arguments if word != "--once"), "--once", "--interval=0.1"]
        if arguments[:1] == ["manifest"] and "--auth" not in arguments and obstacle("token"):
            arguments = [*arguments, "--auth=disabled"]
        given.append((module, arguments))
    assert {"doctor", "manifest", "top"} <= {arguments[0] for _, arguments in given if arguments}
    with rtr.init_group([learner, collector], name="learners", detached=True):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        ran = run_program("-c", _RUN_EACH, cwd=tmp_path, env=env, input=json.dumps(given), timeout=120)
    assert ran.returncode == 0, ran.stderr
    for (_, arguments), line in zip(given, ran.stdout.splitlines(), strict=True):
        code, out, err = json.loads(line)
        # The doctor may find a problem here.
        assert code in ((0,) if arguments[:1] in (["top"], ["manifest"]) else (0, 1)) and not err, (arguments, out, err)
        assert out or "--output" in arguments, arguments
