"""Processes with one lane each, and what runs in them. A module of its own, so that they import it by name."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from ray import cloudpickle
from typing_extensions import Self

from raytorchrpc.calls.payload import PendingTensors, read_into
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import Copies, Export, Message, MessageLane, PeerAddress, Pending, Reply, TensorLane
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.acceptor import listener_identity
from raytorchrpc.lanes.common.handshake import Credentials, Identity, SessionKeys
from raytorchrpc.lanes.common.protection import make_identity
from raytorchrpc.lanes.cuda_ipc.lane import CudaIpcLane
from raytorchrpc.lanes.nccl.carrier import carrier as nccl_carrier
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.lanes.nixl.lane import NixlLane
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.torchrpc.agent import AgentSpec, process_agent
from raytorchrpc.process.guard import process_guard
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES, Shape, as_copyable
from raytorchrpc.topology.endpoint import Endpoint
from tests.conformance.pipes import PipeCarrier
from tests.polling import wait_until

PATIENCE_S = 20.0
SECRET = b"s" * 32
#: Kinds of lanes that encrypt, where the extra tls is installed.
ENCRYPTED = ["socket over tls", "nng over tls"] if importlib.util.find_spec("cryptography") else []
#: The message lanes that are tried in several ways, by what follows their name; the others are tried as they are.
_WAYS = {"socket": ("over unix", "over tcp"), "nng": ("over ipc", "over tcp")}


def rows(*, out_of_band: bool) -> list[registry.Lane]:
    """The lanes for tensors alone or those for messages, of this package and of what else is installed. One is both."""
    others = [name for name in registry.names() if registry.foreign([name])]
    lanes = (*registry.LANES, *map(registry.lane, others))
    return [row for row in lanes if row.out_of_band == out_of_band or (out_of_band and row.rrefs)]


def message_kinds() -> list[str]:
    """What the suite for message lanes runs on."""
    return [" ".join((row.name, way)).strip() for row in rows(out_of_band=False) for way in _WAYS.get(row.name, ("",))]


#: Inherited by the processes of a test: all members of a group have the same.
TLS = bytes.fromhex(os.environ.setdefault("CONFORMANCE_TLS", make_identity("conformance").hex())) if ENCRYPTED else None


def prepare_agent(name: str, rank: int) -> None:
    spec = AgentSpec(f"rtr:{name}", rank + 1, "lo", "127.0.0.1", ("uv",), ("basic",), 4, 60.0, {}, ())
    process_agent().prepare(spec)
    process_guard().start(iter)  # all are members here


def unasked() -> Endpoint:
    raise AssertionError("no lane here asks what its process is")


class Node:
    """One member: a lane, and a server that does what a request's header says."""

    def __init__(self, kind: str, name: str, rank: int, secret: bytes = SECRET, across_users: bool = False) -> None:
        self.kind, self.name = kind, name
        tls = TLS if kind.endswith("over tls") else None
        self.credentials = Credentials(secret, rank, across_users=across_users, tls=tls)
        self.lane: MessageLane = self._make(kind, name, rank)
        self.held: list[Reply] = []
        self.arrived = threading.Semaphore(0)
        self.meeting = threading.Barrier(2)
        self.served: list[Message] = []
        self.peer_address: Any = None
        self.address = self.lane.open(self.serve, self._spawn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.lane.close()

    def call(self, what: str, timeout_s: float = PATIENCE_S, peer: str = "b", payload: bytes = b"") -> Message:
        """The answer of a peer that the lane was connected to."""
        return answer(self.lane.call(peer, Message((what,), EMPTY._replace(payload=payload)), timeout_s))

    def meet(self, peer: str, address: Any) -> Self:
        self.lane.connect([PeerAddress(peer, address)])
        return self

    def _make(self, kind: str, name: str, rank: int) -> MessageLane:
        if kind == "torchrpc":
            prepare_agent(name, rank)
        by_tcp = frozenset({"a", "b", "c"}) if self.is_tcp else frozenset()
        host = "127.0.0.1" if by_tcp else None
        setup = LaneSetup(name, self.credentials, GroupConfig(), unasked, host, by_tcp)
        made = setup.make(registry.lane(kind.split()[0]))
        assert isinstance(made, MessageLane)
        return made

    @property
    def is_tcp(self) -> bool:
        return self.kind.endswith(("over tcp", "over tls"))

    @property
    def identity(self) -> Identity:
        """Whom those who connect to it expect."""
        family = socket.AF_INET if self.is_tcp else socket.AF_UNIX
        return listener_identity(self.kind.split()[0], self.credentials, self.address, family)

    def prove(self, stream: socket.socket) -> SessionKeys:
        """Prove to be a member to this one, from the other end of a connection to it."""
        stranger = Credentials(SECRET)
        return handshake.run(
            stream, handshake.offer(SECRET, stranger.peer(stranger.instance, "a test"), self.identity), PATIENCE_S
        )

    def _spawn(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def serve(self, message: Message, reply: Reply) -> Callable[[], None] | None:
        what = message.header[0]

        def send(answer: Message) -> None:
            with suppress(PeerLost):  # the caller has gone, as a member's server finds as well
                reply(answer)

        if what == "echo":
            send(Message(message.header, message.body))
        elif what == "work":
            return lambda: send(Message(message.header, message.body))
        elif what == "hold":
            self.held.append(reply)
            self.arrived.release()
        elif what == "meet":  # each waits for the other: done only if both run at once
            return lambda: (self.meeting.wait(PATIENCE_S), send(Message(message.header, EMPTY)))[-1]
        elif what == "overwrite":
            for tensor in message.body.tensors:
                tensor.fill_(7)
            send(Message(("overwritten",), message.body))
        elif what == "keep":
            self.served.append(message)
            send(Message(("kept",), EMPTY))
        elif what == "sink":  # take a large one, and tell whether it came whole
            whole = all(is_huge(tensor) for tensor in message.body.tensors)
            send(Message(("sunk", whole, len(message.body.payload), sum(message.body.payload[-3:])), EMPTY))
        elif what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise AssertionError(what)
        return None


EMPTY = Encoded(b"", (), (), 0)

_node: Node | None = None


def node() -> Node:
    assert _node is not None
    return _node


def become(uid: int) -> None:
    """Run as another user from now on."""
    GroupConfig()  # imports what checks settings, from a folder that the other user may not be able to read
    os.setgid(uid)
    os.setuid(uid)


def begin(kind: str, name: str, rank: int, secret: bytes = SECRET, across_users: bool = False) -> Any:
    global _node
    _node = Node(kind, name, rank, secret, across_users)
    return _node.address


def own_address() -> Any:
    return node().address


def connect(peer: str, address: Any) -> None:
    node().peer_address = address
    node().lane.connect([PeerAddress(peer, address)])


def served_payloads() -> list[bytes]:
    return [bytes(message.body.payload) for message in node().served]


def send(
    what: str, *tensors: torch.Tensor, peer: str = "b", payload: bytes = b"", timeout_s: float = PATIENCE_S
) -> Pending:
    message = Message((what, 1.5, (2, "three")), Encoded(payload, list(tensors), (), 0))
    return node().lane.call(peer, message, timeout_s)


def answer(pending: Pending, patience_s: float = PATIENCE_S) -> Message:
    assert pending.wait(patience_s), "no answer"
    return pending.take()


def ask(what: str, *tensors: torch.Tensor, peer: str = "b", payload: bytes = b"") -> Message:
    return answer(send(what, *tensors, peer=peer, payload=payload))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit (NaN too), in type and shape."""
    fresh = torch.contiguous_format  # one element may lie with any stride, and counts as contiguous
    raw = [as_copyable(tensor).clone(memory_format=fresh).view(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def independent(tensors: list[torch.Tensor]) -> bool:
    """Whether each of these tensors is as if nothing else had arrived with it, as what pickle restores."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if (
            storage.nbytes() != tensor.nbytes
            or tensor.storage_offset()
            or len(pickle.dumps(tensor)) > tensor.nbytes + 2000
        ):
            return False
    versions = [tensor._version for tensor in tensors]
    tensors[0].add_(1)
    if [tensor._version for tensor in tensors] != [versions[0] + 1, *versions[1:]]:
        return False
    for tensor in tensors:
        before = tensor.flatten()[:2].clone()
        tensor.resize_(2 * tensor.numel())
        if not torch.equal(tensor[: len(before)], before):
            return False
        tensor.untyped_storage().resize_(0)
    return True


#: Every dtype of this torch release that a lane may meet. A quantized tensor never gets there: it is pickled.
ALL_DTYPES = [dtype for name, dtype in sorted(DTYPES.items()) if not name.startswith("q")]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits; the same for the same arguments, in every process."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = dtype.itemsize * math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].clone().view(dtype).view(shape)


def huge(gibibytes: float) -> torch.Tensor:
    """Where it went wrong would show: at which multiple of 2 GiB, for one."""
    return torch.arange(int(gibibytes * 2**30) // 4, dtype=torch.int32)


def is_huge(tensor: torch.Tensor) -> bool:
    """Whether it is what ``huge`` made; looks at it piece by piece, to take no memory."""
    step = 1 << 24
    return all(
        torch.equal(piece, torch.arange(number * step, number * step + len(piece), dtype=torch.int32))
        for number, piece in enumerate(tensor.split(step))
    )


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in RAM, what it shares included."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def release_held(count: int) -> None:
    """Answer what is held, once that many requests are."""
    for _ in range(count):
        assert node().arrived.acquire(timeout=PATIENCE_S)
    held, node().held = node().held, []
    for reply in held:
        reply(Message(("released",), EMPTY))


def shared_mappings() -> list[str]:
    """What this process has mapped that has a name but is no program text: memfds, files in /dev/shm, deleted files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
    return sorted(path for path in paths if "memfd:" in path or path.startswith("/dev/") or path.endswith("(deleted)"))


def everything_open() -> tuple[Any, ...]:
    """All that this process could leave behind: threads, descriptors, mappings, files in shared memory."""
    files = [name for name in os.listdir("/dev/shm") if "raytorchrpc" in name or f"_{os.getpid()}_" in name]
    return (*open_things(), shared_mappings(), files)


def open_things() -> tuple[set[str], set[str]]:
    """This process's threads, once those that connect have ended, and what its descriptors are."""
    wait_until(lambda: not any(thread.name.endswith("-connect") for thread in threading.enumerate()), PATIENCE_S)
    threads = {thread.name for thread in threading.enumerate()}
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            continue  # that of the listing itself
    return threads, descriptors


def forkserver() -> ForkServerContext:
    """Starts processes that have imported torch and this module. A process has one fork server: all tests use this."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.conformance.preloaded"])
    return context


class Process:
    """A process that runs functions, one at a time: those of a module in its own module, others as copies."""

    def __init__(self) -> None:
        context = forkserver()
        self._mine, its = context.Pipe()
        self.process = context.Process(target=_main, args=(its,), daemon=True)
        self.process.start()
        its.close()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._mine.send_bytes(cloudpickle.dumps((function, args)))

    def result(self) -> Any:
        assert self._mine.poll(120), "the process does not answer"
        value, error = self._mine.recv()
        if error is not None:
            raise AssertionError(f"in the other process:\n{error}")
        return value

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.result()

    def kill(self) -> None:
        """Safe to repeat."""
        if not self._mine.closed:
            self.process.kill()
            self.process.join(60)
            self._mine.close()
            self.process.close()


def in_process(body: Callable[[], None]) -> Callable[[Process], None]:
    """Make a test of a function that runs in a process of its own, the fixture ``process``."""

    def in_its_process(process: Process) -> None:
        process.run(body)

    return in_its_process


def _main(pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


# --- lanes for tensors alone -----------------------------------------------------------------------------------


class TensorNode:
    """One member with a tensor lane, what it exported and what it keeps of what it fetched."""

    def __init__(self, lane: TensorLane, device: str, carrier: MessageLane | None = None) -> None:
        """``carrier``: the lane for messages that the lane is ``beside``, if it is."""
        self.lane, self.device, self.carrier = lane, device, carrier
        self.exports: list[Export] = []
        self.kept: dict[str, Any] = {}
        self.at_open: set[str] = set()
        """The descriptors of this process once the lane was open."""


_tensors: TensorNode | None = None


def tensors() -> TensorNode:
    assert _tensors is not None
    return _tensors


#: What UCX runs on, for CPU tensors: its own choice, which copies within the host, or a wire alone.
NIXL_SETTINGS = {"nixl": {}, "nixl over tcp": {"TLS": "tcp", "NET_DEVICES": "lo"}}
#: Those that need GPUs.
GPU_LANES = ("cuda_ipc", "nccl", "nixl on cuda")


def open_tensors(kind: str, capacity: int = 256 << 20, gpu: int = 0, rank: int = 0, timeout_s: float = 60) -> Any:
    """``gpu``: the only one that this process shall see, as under Ray."""
    global _tensors
    if kind == "nccl by pipes":
        _tensors = TensorNode(nccl_lane(rank, timeout_s, PipeCarrier(f"device {rank}")), "cpu")
    elif kind in NIXL_SETTINGS:
        _tensors = TensorNode(NixlLane(capacity, (), timeout_s, NIXL_SETTINGS[kind]), "cpu")
    elif kind in GPU_LANES:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        torch.cuda.init()
        lanes: dict[str, Callable[[], TensorLane]] = {
            "cuda_ipc": lambda: CudaIpcLane((0,)),
            "nccl": lambda: nccl_lane(rank, timeout_s),
            "nixl on cuda": lambda: NixlLane(capacity, (0,), timeout_s, {}),
        }
        _tensors = TensorNode(lanes[kind](), "cuda")
    elif kind == "torchrpc":
        prepare_agent("ab"[rank], rank)
        setup = LaneSetup("ab"[rank], Credentials(SECRET, rank), GroupConfig(rpc_timeout_s=timeout_s), unasked)
        carrier = setup.make(registry.lane(kind))
        assert isinstance(carrier, MessageLane) and carrier.beside is not None
        _tensors = TensorNode(carrier.beside, "cpu", carrier)
    else:
        _tensors = TensorNode(cpu_lane(kind, capacity, rank), "cpu")
    opened = _tensors.lane.open()
    if _tensors.carrier is not None:
        opened = _tensors.carrier.open(lambda message, reply: None, lambda work: None)
    _tensors.at_open = open_things()[1]
    return opened


def cpu_lane(name: str, capacity: int, rank: int = 0) -> TensorLane:
    config = GroupConfig(shm_bytes=capacity, copy_threads=2)
    lane = LaneSetup("ab"[rank], Credentials(SECRET, rank), config, unasked).make(registry.lane(name))
    assert isinstance(lane, TensorLane)
    return lane


def nccl_lane(
    rank: int, timeout_s: float = 60, carrier: PipeCarrier | None = None, secret: bytes = SECRET, tcp: bool = False
) -> NcclLane:
    name, names = "abcdef"[rank], frozenset("abcdef")
    host, by_tcp = ("127.0.0.1", names) if tcp else (None, frozenset[str]())
    setup = LaneSetup(name, Credentials(secret, rank), GroupConfig(), unasked, host, by_tcp)
    get = nccl_carrier if carrier is None else lambda: carrier
    return NcclLane(name, (0,), lambda: setup.control_lane("nccl"), timeout_s=timeout_s, get_carrier=get)


def meet(peer: str, address: Any) -> None:
    (tensors().carrier or tensors().lane).connect([PeerAddress(peer, address)])


def export(made: Sequence[torch.Tensor], peer: str = "b") -> tuple[Any, list[Shape]]:
    """Lay them out; returns what the receiver is told."""
    exported = tensors().lane.export(made, peer, {0: 0})
    tensors().exports.append(exported)
    return exported.descriptor, [(tensor.dtype, tuple(tensor.shape)) for tensor in made]


def read(sent: tuple[Any, list[Shape]], copies: Copies) -> None:
    """Make copies as a member does: those that the lane leaves, it makes itself."""
    descriptor, shapes = sent
    runs = tuple((DTYPE_NAMES[dtype], shape, 1) for dtype, shape in shapes)
    read_into(EMPTY, [PendingTensors(tensors().lane, "a", ("", None, runs, descriptor))], copies)


def close_tensors() -> None:
    global _tensors
    tensors().exports.clear()
    tensors().kept.clear()
    tensors().lane.close()
    if (carrier := tensors().carrier) is not None:
        carrier.close()
        process_agent().rest()
        process_guard().stop(iter)
    _tensors = None
