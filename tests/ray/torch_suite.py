"""Runs torch's own RPC suite between Ray actors that are members of a group.

    python -m tests.ray.torch_suite             # all; a few minutes
    python -m tests.ray.torch_suite PATTERN...  # tests whose name contains one of these

Every test runs in all members at a time, as it does in torch's processes, and has a deadline. A group serves many
tests: ``init_rpc`` and a graceful ``shutdown`` are barriers. What a test leaves behind, or a failure, ends the group
and its actors. A test that fails in a used group has a second chance in a new one, and this one counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from ray.exceptions import RayError

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.group import roster, worker_ids

DEADLINE_S = 90
#: Most tests wait more than they compute.
GROUPS_AT_ONCE = 4
TESTS_PER_GROUP = 40
#: They test init_rpc or shutdown, which a member does not call.
NOT_FOR_MEMBERS = {
    *("test_cannot_infer_backend_from_options", "test_duplicate_name", "test_duplicate_name_2"),
    *("test_dynamic_and_static_init_rpc_together", "test_dynamic_rpc_existing_rank_can_communicate_with_new_rank"),
    "test_dynamic_rpc_new_rank_can_communicated_with_existing_rank",
    *("test_ignore_rref_leak", "test_infer_backend_from_options", "test_init_rpc_twice"),
    *("test_mismatched_type_for_options", "test_pg_init_no_rpc_init"),
    *("test_register_rpc_backend_and_set_and_start_rpc_backend", "test_reinit", "test_rref_leak"),
    *("test_set_and_get_num_worker_threads", "test_shutdown_errors", "test_shutdown_followed_by_rpc"),
    *("test_tensorpipe_options_throw_on_timedelta_timeout", "test_wait_all_workers_timeout", "test_wrong_types"),
}
PASSED = "passed"


class Worker:
    """The actor: one of the suite's processes."""

    def __init__(self, rank: int, world_size: int, faults: Any, folder: str, port: int) -> None:
        from tests.ray import torch_tests

        self.store, self.meetings = dist.TCPStore("127.0.0.1", port, is_master=False), 0
        self.tests, self.rank, self.world_size = torch_tests, rank, world_size
        self.shutdown, self.ended, self.begun = rpc.shutdown, False, False
        if faults is not None:
            self.inject(*faults, folder)

    def inject(self, failing: Any, late: Any, folder: str) -> None:
        """Have raytorchrpc start torch's agent for tests of faults."""
        from torch.distributed.rpc import _testing

        def make(store: Any, name: str, rank: int, _: Any, options: Any, maps: Any, devices: Any) -> Any:
            faulty = _testing.FaultyTensorPipeRpcBackendOptions(
                num_worker_threads=8,
                rpc_timeout=options.rpc_timeout,
                init_method="",
                messages_to_fail=list(failing),
                messages_to_delay=dict(late),
                num_fail_sends=3,
            )
            return _testing.FaultyTensorPipeAgent(store, name, rank, self.world_size, faulty, maps, devices)

        # It takes the number of workers, and then waits for all their names and addresses in a store that they share.
        torch_internals.HashStore = lambda: dist.FileStore(f"{folder}/names", self.world_size)  # type: ignore[assignment, misc]
        torch_internals.TensorPipeAgent = make  # type: ignore[assignment, misc]

    def join(self) -> None:
        """In place of what the suite calls; after init_group."""
        rpc.init_rpc, rpc.shutdown = self.init_rpc, self.barrier_or_shutdown
        rpc.api._ignore_rref_leak = False

    def init_rpc(
        self, name: str, backend: Any = None, rank: int = -1, world_size: Any = None, rpc_backend_options: Any = None
    ) -> None:
        if self.begun or (name, rank, world_size) != (f"worker{self.rank}", self.rank, self.world_size):
            raise unittest.SkipTest(f"starts a group of its own: {name!r}, {rank} of {world_size}")
        self.begun = True
        if rpc_backend_options is not None:
            rpc._set_rpc_timeout(rpc_backend_options.rpc_timeout)
        self.meet()

    def barrier_or_shutdown(self, graceful: bool = True, timeout: float = DEADLINE_S) -> None:
        self.begun = False
        if not graceful:
            self.ended = True
            self.shutdown(graceful=False)
            return
        rpc.api._wait_all_workers(timeout or DEADLINE_S)
        rpc.api._delete_all_user_and_unforked_owner_rrefs()
        self.meet()
        until = time.monotonic() + 10
        while self.owned() and time.monotonic() < until:
            time.sleep(0.01)
        if self.owned():
            raise RuntimeError(f"Leaking RRefs: {self.owned()}")

    def meet(self) -> None:
        """Wait for the other workers, without RPC: messages may be late or fail."""
        self.meetings += 1
        name = f"meeting-{self.meetings}"
        if self.store.add(name, 1) == self.world_size:
            self.store.set(f"{name}-complete", "")
        self.store.wait([f"{name}-complete"], timedelta(seconds=DEADLINE_S))

    def owned(self) -> int:
        return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])

    def reset(self) -> None:
        self.begun = False
        self.tests.reset()
        rpc._set_rpc_timeout(rpc.constants.DEFAULT_RPC_TIMEOUT_SEC)

    def run(self, case: str, method: str, file_name: str) -> tuple[str, bool]:
        """The outcome, and whether this process is as it was before."""
        test = self.tests.CASES[case](method)
        test.rank, test.file_name = self.rank, file_name
        torch.manual_seed(1234)
        try:
            getattr(test, method)()
            outcome = PASSED
        except unittest.SkipTest as skipped:
            outcome = f"skipped: {skipped}"
        except SystemExit as ended:
            outcome = self.tests.SKIPS.get(ended.code, f"exit status {ended.code}") if ended.code else PASSED
        except BaseException:
            outcome = f"failed in worker {self.rank}: {traceback.format_exc()}"
        with contextlib.suppress(AssertionError, ValueError):
            dist.destroy_process_group()
        return outcome, outcome == PASSED and not self.ended and self.is_clean()

    def is_clean(self) -> bool:
        contexts = torch.distributed.autograd._get_debug_info()["num_autograd_contexts"]  # type: ignore[attr-defined]
        return not self.owned() and not int(contexts)


class Result(NamedTuple):
    name: str
    outcome: str
    """``passed``, ``skipped``, or what went wrong."""
    detail: str
    """Why it was skipped, or where it failed."""
    seconds: float


_names: dict[str, str] = {}
"""torch's names of the actors, as the suite has them."""


class Group:
    """Actors that are members of a group, as long as no test spoils them."""

    def __init__(self, world_size: int, faults: Any, folder: Path) -> None:
        self.tests = 0
        folder.mkdir(parents=True)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        make, port = ray.remote(Worker).options(num_cpus=0), self.store.port
        self.actors: list[Any] = [
            make.remote(rank, world_size, faults, str(folder), port) for rank in range(world_size)
        ]
        _names.update({ray_internals.actor_id_of(actor): f"worker{rank}" for rank, actor in enumerate(self.actors)})
        self.group: Any = None
        try:
            # Agents with faults wait for each other when they start.
            when: Any = "when needed" if faults is None else "at once"
            self.group = rtr.init_group(self.actors, name=folder.name, config=rtr.GroupConfig(torchrpc=when))
            self.ask("join")
        except BaseException:
            self.end()
            raise

    def ask(self, method: str, *args: Any, timeout: float = DEADLINE_S) -> list[Any]:
        return ray.get([getattr(actor, method).remote(*args) for actor in self.actors], timeout=timeout)  # type: ignore[no-any-return]

    def run(self, case: str, method: str, file_name: str) -> tuple[str, bool]:
        """The outcome, and whether the group can serve another test."""
        self.tests += 1
        until, clean, skipped = time.monotonic() + DEADLINE_S, True, ""
        try:
            self.ask("reset")
            running = [actor.run.remote(case, method, file_name) for actor in self.actors]
            while running:
                done, running = ray.wait(running, timeout=max(0.0, until - time.monotonic()))
                if not done:
                    return f"did not end within {DEADLINE_S} s", False
                outcome, clean_there = ray.get(done[0])
                clean &= clean_there
                if outcome.startswith("skipped"):
                    skipped = outcome
                elif outcome != PASSED:
                    return outcome, False  # the other workers wait for this one
        except (RayError, TimeoutError) as error:
            return f"ended a process: {error}", False
        return skipped or PASSED, clean

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            self.group.shutdown(timeout=1)


Tests = list[tuple[str, str]]


def chunks(patterns: list[str]) -> Iterator[tuple[int, Any, Tests]]:
    """Tests that share a group: its size, the faults of its agents, and the tests."""
    from tests.ray import torch_tests

    shared: dict[int, Tests] = {}
    for case, method, world_size, faults in torch_tests.tests():
        if patterns and not any(pattern in f"{case}.{method}" for pattern in patterns):
            continue
        if faults is None:
            shared.setdefault(world_size, []).append((case, method))
        else:  # messages that were lost leave something behind
            yield world_size, faults, [(case, method)]
    for world_size, tests in shared.items():
        for start in range(0, len(tests), TESTS_PER_GROUP):
            yield world_size, None, tests[start : start + TESTS_PER_GROUP]


def run(world_size: int, faults: Any, tests: Tests, folder: Path, report: Callable[[Result], None]) -> None:
    group: Group | None = None
    for case, method in tests:
        name, start = f"{case}.{method}", time.monotonic()
        outcome = "skipped: it tests init_rpc or shutdown itself"
        while method not in NOT_FOR_MEMBERS:
            if group is None:
                try:
                    group = Group(world_size, faults, folder / f"group-{uuid.uuid4().hex}")
                except (rtr.RayTorchRpcError, RayError) as error:
                    outcome = f"no group: {error}"
                    break
            used = group.tests > 0
            outcome, clean = group.run(case, method, str(folder / uuid.uuid4().hex))
            if used and not clean and outcome != PASSED:
                print(f"{name} in a used group: {outcome}", file=sys.stderr, flush=True)
            if not clean:
                group.end()
                group = None
            if outcome == PASSED or outcome.startswith("skipped") or not used:
                break
        what, _, detail = outcome.partition(":")
        report(Result(name, what, detail.strip(), time.monotonic() - start))
    if group is not None:
        group.end()


def main(patterns: list[str]) -> int:
    os.environ["WARM_WORKERS_IMPORT"] = "tests.ray.torch_tests"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from tests.ray.local_ray import local_ray

    roster._rpc_name = lambda actor_id, probe: _names[str(actor_id)]
    worker_ids.highest_elsewhere = lambda handles: -1  # several groups at a time; no two are joined later
    start = time.monotonic()
    results: list[Result] = []

    def report(result: Result) -> None:
        results.append(result)
        sys.stdout.write(json.dumps(result) + "\n")  # one write: threads report at the same time
        sys.stdout.flush()

    with local_ray(), tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(GROUPS_AT_ONCE) as pool:
        for done in [pool.submit(run, *chunk, Path(folder), report) for chunk in chunks(patterns)]:
            done.result()
    kinds = Counter(result.outcome if result.outcome in (PASSED, "skipped") else "failed" for result in results)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (PASSED, "failed", "skipped"))
    print(f"{counts} in {time.monotonic() - start:.0f} s")
    return 1 if kinds["failed"] else 0


if __name__ == "__main__":
    from tests.ray import torch_suite  # actors import it by this name

    sys.exit(torch_suite.main(sys.argv[1:]))
