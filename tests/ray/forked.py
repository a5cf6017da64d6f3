"""An actor that forks, and what its children do; for the tests of forks."""

from __future__ import annotations

import gc
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import raytorchrpc as rtr
from tests.ray.actors import Latch, Peer

_PATIENCE_S = 50.0


def in_child(function: Callable[[], Any]) -> Any:
    """Run ``function`` in a forked child of this process; returns what it returned, raises what it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            try:
                outcome = (True, function())
            except BaseException as error:
                outcome = (False, error)
            with open(writing, "wb") as pipe:
                pickle.dump(outcome, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with open(reading, "rb") as pipe:
            if not select.select([pipe], [], [], _PATIENCE_S)[0]:
                raise TimeoutError("the forked child says nothing")
            fine, value = pickle.load(pipe)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    if not fine:
        raise value
    return value


def refusal(attempt: Callable[[], Any]) -> str:
    try:
        return f"no error: {attempt()!r}"
    except rtr.NotAMember as error:
        return str(error)


class Squares(torch.utils.data.Dataset[int]):
    """A data set whose items say what happens to a call made by a DataLoader's worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, bool]:
        return index * index, "forked from member" in refusal(lambda: rtr.rpc_sync("b").double(index))


class Forker(Peer):
    """Forks in its methods."""

    def attempts(self) -> list[str]:
        """What a child gets for whatever it tries, while calls of the parent are under way."""
        futures = [rtr.rpc_async("b").double(number) for number in range(20)]
        group = rtr.get_group()

        def child() -> list[str]:
            group.shutdown()
            return [
                refusal(lambda: rtr.rpc_sync("b").double(1)),
                refusal(lambda: rtr.rpc_async("b").double(1)),
                refusal(rtr.current_member),
                refusal(rtr.get_group),
                refusal(lambda: futures[0].wait() if futures[0].done() else "not done"),
                refusal(lambda: futures[1].add_done_callback(print)),
            ]

        seen: list[str] = in_child(child)
        assert [future.wait() for future in futures] == [2 * number for number in range(20)]
        return seen

    def forget(self, times: int) -> None:
        """Children that drop and collect all they inherited of the parent's calls, and then end."""
        for _ in range(times):
            future = rtr.rpc_async("b").double(torch.ones(1_000_000))

            def child() -> None:
                nonlocal future
                del future
                gc.collect()

            in_child(child)
            assert torch.equal(future.wait(), torch.full((1_000_000,), 2.0))

    def written_by_child(self) -> tuple[float, float]:
        """The sums of a tensor that came through shared memory: as a child has written it, and as it is here."""
        tensor = rtr.rpc_sync("b").double(torch.ones(1_000_000))
        shared: float = in_child(lambda: float(tensor.fill_(7).sum()))
        return shared, float(tensor.sum())

    def load(self) -> list[list[Any]]:
        loader = torch.utils.data.DataLoader(
            Squares(), num_workers=2, batch_size=None, multiprocessing_context="fork", timeout=_PATIENCE_S
        )
        return list(loader)

    def leave_child(self, latch: Latch) -> int:
        """A child that lives until the latch opens, whatever becomes of this process."""
        pid = os.fork()
        if not pid:
            try:
                latch.pass_through()
            finally:
                os._exit(0)
        return pid

    @rtr.method(concurrent=True)
    def die(self, latch: Latch) -> None:
        """Leave a child behind, and end as if killed."""
        self.leave_child(latch)
        os.kill(os.getpid(), 9)

    def inherited_by_command(self) -> list[str]:
        """The sockets and other kernel objects that a command finds open which gets all that it can get."""
        code = (
            "import os\n"
            "for fd in os.listdir('/proc/self/fd'):\n"
            "    try: print(os.readlink('/proc/self/fd/' + fd))\n"
            "    except OSError: pass"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code], close_fds=False, stdout=subprocess.PIPE, check=True, text=True
        )
        return [line for line in ran.stdout.splitlines() if line.startswith(("socket:", "anon_inode:", "/memfd:"))]
