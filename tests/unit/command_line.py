"""The command ``raytorchrpc`` in the process of a test."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from raytorchrpc.cli import main


class Ran(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def exit_code_of(*arguments: str) -> int:
    """Run the command with these arguments."""
    with mock.patch.object(sys, "argv", ["raytorchrpc", *arguments]):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def run(*arguments: str) -> Ran:
    """Run the command, and keep what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code_of(*arguments)
    return Ran(code, out.getvalue(), err.getvalue())
