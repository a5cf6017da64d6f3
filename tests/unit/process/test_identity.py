"""What tells a process from all others."""

from __future__ import annotations

import os

from raytorchrpc.calls.scope import is_of_this_process, new_token
from raytorchrpc.process import this_process


def told_by_a_fork() -> tuple[str, str]:
    """A forked child's ``this_process.unique``, and a token that it makes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, f"{this_process.unique} {new_token()}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        unique, token = file.read().split()
    os.waitpid(child, 0)
    return unique, token


def test_a_forked_child_is_another_process() -> None:
    mine, (one, token), (other, _) = this_process.unique, told_by_a_fork(), told_by_a_fork()
    assert len({mine, one, other}) == 3
    assert token.startswith(one)
    assert not is_of_this_process(token)
    assert is_of_this_process(new_token())
