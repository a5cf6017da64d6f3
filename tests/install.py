"""Installs the library as a user does, in an empty environment, and tries it there: ``make install-check``.

    python tests/install.py --torch torch==2.13.0 --package dist/raytorchrpc.whl --extras cli,doctor

Installs torch alone, then the sources or a wheel; imports every module and runs the README's program outside the
sources. Then installs each extra, tries it and removes it again, so that no extra relies on another's packages.
Needs only Python; pip's own configuration says where packages come from. Exits with status 1 at the first failure.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_HELP = (
    "import runpy, sys; sys.argv = ['raytorchrpc', '--help']; runpy.run_module('raytorchrpc.cli', run_name='__main__')"
)
#: By extra, what has to work with it. Large ones are tried only where they are named.
TRIALS = {
    "cli": [
        _HELP,
        "import raytorchrpc.manifest",
        "from raytorchrpc.cli.app import app; app(['examples', 'copy', 'parameter_server'])",
        "import parameter_server",
    ],
    "demo": ["import raytorchrpc.cli.demo, sklearn.datasets"],
    "doctor": ["import pynvml, raytorchrpc.doctor.collector"],
    "bench": ["import raytorchrpc.bench.plots, raytorchrpc.cli.bench, matplotlib"],
    "jobs": ["from ray.job_submission import JobSubmissionClient"],
    "data": ["import ray.data"],
    "serve": ["from ray import serve; from starlette.responses import StreamingResponse"],
    "atari": ["import ale_py, gymnasium, matplotlib, numpy"],
    "llm": ["from transformers import LlamaConfig, LlamaForCausalLM"],
    "tls": ["from raytorchrpc.lanes.common.protection import make_identity; assert make_identity('group')"],
    "peers": ["import monarch.actor, raytorchrpc.cli.bench"],
    "nixl": ["from raytorchrpc._compat.nixl_package import nixl_package; assert nixl_package()"],
}
WHATEVER_IS_THERE = "import importlib, pkgutil, raytorchrpc\n" + (
    "for found in pkgutil.walk_packages(raytorchrpc.__path__, 'raytorchrpc.'):\n"
    "    if not found.name.startswith(('raytorchrpc.cli', 'raytorchrpc.bench', 'raytorchrpc.manifest', "
    "'raytorchrpc.integrations.')) "
    "and not found.name.endswith('__main__'):\n"
    "        importlib.import_module(found.name)\n"
    "print('imported', raytorchrpc.__file__)"
)


class Environment:
    """A new virtual environment in ``folder``; programs run there, so nothing is imported from the sources."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        self._python = str(folder / "venv" / "bin" / "python")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY", "PYTHON", "VIRTUAL"))}
        self._variables = {**kept, "RAY_USAGE_STATS_ENABLED": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(self, what: str, *command: str, timeout_s: float = 900) -> str:
        """Returns what the Python program printed; ends this one if it fails."""
        started = time.monotonic()
        ran = subprocess.run(
            [self._python, *command],
            cwd=self._folder,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        print(f"[install-check] {what}: {time.monotonic() - started:.0f} s", flush=True)
        if ran.returncode:
            sys.exit(f"{ran.stdout}\n[install-check] FAILED: {what}")
        return ran.stdout

    def install(self, what: str) -> None:
        self.run(f"pip install {what}", "-m", "pip", "install", "-q", what)

    def packages(self) -> set[str]:
        listed = self.run("what is installed", "-m", "pip", "list", "--format=freeze")
        return {line.partition("==")[0] for line in listed.splitlines() if "==" in line}


def readme_program() -> str:
    """The first complete program of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, "README.md has no program"
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--torch", default="torch", help="the torch to install first, as pip takes it")
    parser.add_argument("--package", type=Path, default=ROOT, help="what to install: the sources, or a wheel")
    parser.add_argument("--extras", default=",".join(TRIALS.keys() - {"nixl", "peers"}), help="which to try")
    options = parser.parse_args()
    extras = [extra for extra in TRIALS if extra in options.extras.split(",")]
    with tempfile.TemporaryDirectory(prefix="rtr-") as folder:
        environment = Environment(Path(folder))
        environment.install(options.torch)
        environment.install(str(options.package.resolve()))
        (Path(folder) / "program.py").write_text(readme_program(), encoding="utf-8")
        where = environment.run("import every module that needs no extra", "-c", WHATEVER_IS_THERE)
        assert str(ROOT / "raytorchrpc") not in where, where
        environment.run("the README's program", "program.py", timeout_s=180)
        plain = environment.packages() if extras else set()
        for extra in extras:
            environment.install(f"{options.package.resolve()}[{extra}]")
            for trial in TRIALS[extra]:
                environment.run(trial, "-c", trial, timeout_s=180)
            if added := environment.packages() - plain:
                environment.run(
                    f"remove what {extra} has brought", "-m", "pip", "uninstall", "-q", "-y", *sorted(added)
                )
    print(f"[install-check] works: {options.torch}, extras: {', '.join(extras) or 'none'}")


if __name__ == "__main__":
    main()
