"""Several hosts on one machine: namespaces that share nothing a process could mistake for one host.

Each host has a network, mounts, processes, shared memory, a name and a boot id of its own. They meet on a bridge
that lies in an outer namespace, so nothing of the machine's own network is touched. Everything is a descendant of
the outer pid namespace's init, which reads a pipe that this process holds: however this process ends, so does it,
and the kernel ends the rest.

Faults are methods of a host, or of the network: a power cut, a pulled cable, a slow wire, a network in two parts.
"""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
#: No single step of building takes longer (seconds).
PATIENCE_S = 20.0

# The shell's own pid as the creator sees it: /proc is still the creator's here.
_OUTER = """
read -r pid rest < /proc/self/stat
trap '' CHLD  # orphans that end are nobody's to wait for
mount --make-rprivate /
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
echo "$pid"
exec cat > /dev/null
"""
# $1 name, $2 boot id, $3 lines of /etc/hosts, then directories to keep though they lie below /tmp.
_HOST = """
read -r pid rest < /proc/self/stat
trap '' CHLD
hostname "$1"
boot_id=$2 names=$3
shift 3
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
number=0
for kept; do
  number=$((number + 1))
  mkdir "/dev/shm/$number"
  mount --bind "$kept" "/dev/shm/$number"
done
mount -t tmpfs tmpfs /tmp
number=0
for kept; do
  number=$((number + 1))
  mkdir -p "$kept"
  mount --bind "/dev/shm/$number" "$kept"
  umount "/dev/shm/$number"
  rmdir "/dev/shm/$number"
done
mkdir /tmp/etc /tmp/home
echo "$boot_id" > /tmp/etc/boot_id
printf '%s' "$names" > /tmp/etc/hosts
: > /tmp/etc/resolv.conf
mount --bind /tmp/etc/boot_id /proc/sys/kernel/random/boot_id
mount --bind /tmp/etc/hosts /etc/hosts
# A name server that cannot be reached costs seconds at every look-up.
if [ -e /etc/resolv.conf ]; then mount --bind /tmp/etc/resolv.conf /etc/resolv.conf; fi
ip link set lo up
echo "$pid"
exec sleep infinity
"""
_KILL = """
import os, select, sys, time
pid = int(sys.argv[1])
end = os.pidfd_open(pid)
now = time.monotonic()
os.kill(pid, 9)
assert select.select([end], [], [], 20)[0]
print(now)
"""


class Unavailable(Exception):
    """This machine lets nobody build hosts here; the text is the kernel's reason."""


class Network:
    """What lies between the hosts: a bridge, and one wire to each of them."""

    def __init__(self, init: int, user: bool) -> None:
        # nsenter without --pid: the pids in what ip is told are ours.
        self.enter = ("nsenter", f"--target={init}", "--net", *_user(user))
        self._bridges = 1
        self._wires = itertools.count(1)

    def wire(self, pid: int) -> str:
        """Lay a wire to the host whose init this is; returns its name at the bridge."""
        name = f"wire-{next(self._wires)}"
        self.ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self.ip("link", "set", name, "master", "bridge", "up")
        return name

    def ip(self, *words: str) -> None:
        """Run ``ip`` here. Raises Unavailable with what it says."""
        _call([*self.enter, "ip", *words])

    def partition(self, *parts: Sequence[Host]) -> None:
        """The hosts of each part reach each other and nobody else; nothing tells them so. Hosts not named stay with
        the first part.
        """
        for number, part in enumerate(parts[1:], start=1):
            if number == self._bridges:
                self.ip("link", "add", f"bridge-{number}", "type", "bridge")
                self.ip("link", "set", f"bridge-{number}", "up")
                self._bridges += 1
            for host in part:
                self.ip("link", "set", host.wire, "master", f"bridge-{number}")

    def heal(self, *hosts: Host) -> None:
        """These are with the rest again."""
        for host in hosts:
            self.ip("link", "set", host.wire, "master", "bridge")


class Host:
    """One host. Commands run in it as root of it, in the repository, with this interpreter's programs first."""

    def __init__(
        self, name: str, address: str, boot: Callable[[], subprocess.Popen[str]], network: Network, user: bool
    ) -> None:
        """``boot``: starts its init, which says its pid once it is ready."""
        self.name, self.address, self.network = name, address, network
        self._boot, self._user = boot, user
        self.switch_on()

    def switch_on(self) -> None:
        """For the first time, or after ``power_off``: with nothing running, empty memory and a boot id of its own."""
        self._process = self._boot()
        self._init = _pid(self._process)
        self.wire = self.network.wire(self._init)
        spaces = ["--net", "--mount", "--pid", "--ipc", "--uts", *_user(self._user)]
        self._enter = ["nsenter", f"--target={self._init}", *spaces, "sh", "-c", 'cd "$0" && exec "$@"', str(REPO)]
        self.run(["ip", "address", "add", f"{self.address}/24", "dev", "eth0"])
        self.run(["ip", "link", "set", "eth0", "up"])

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """A command that goes on, with pipes for stdin, stdout and stderr (text). It ends with the host at the latest.

        It leads a process group of its own, which ``stop`` ends.
        """
        pipe = subprocess.PIPE
        everything = _environment() | dict(env or {})
        return subprocess.Popen(
            [*self._enter, *command],
            env=everything,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )

    def run(self, command: Sequence[str], timeout_s: float = 30.0, env: Mapping[str, str] | None = None) -> str:
        """What the command wrote to stdout. Raises AssertionError with all it wrote if it fails or takes too long."""
        process = self.start(command, env)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            stop(process)
            out, err = process.communicate(timeout=PATIENCE_S)
            raise AssertionError(f"{self.name}: {command} took over {timeout_s:g} s\n{out}\n{err}") from None
        assert process.returncode == 0, f"{self.name}: {command} ended with {process.returncode}\n{out}\n{err}"
        return out

    def sent_bytes(self) -> int:
        """What this host has put on the wire so far, headers included."""
        for line in self.run(["cat", "/proc/net/dev"]).splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == "eth0":
                return int(figures.split()[8])
        raise AssertionError(f"{self.name} has no eth0")

    def power_off(self) -> float:
        """Every process of it ends at once and unasked; its end of the wire goes with it.

        As the kernel closes the sockets, peers may still hear of it. If they are to hear nothing at all, pull the cable
        first. Returns when (``time.monotonic``, which all hosts of a machine share).
        """
        began = time.monotonic()
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
            self._process.wait(PATIENCE_S)
        return began

    def kill(self, pid: int) -> float:
        """SIGKILL to one process of it, by its pid there; returns when, once the kernel has closed all it had open."""
        return float(self.run([sys.executable, "-ISc", _KILL, str(pid)]))

    def pull_cable(self) -> float:
        """Nothing leaves or reaches it any more, and nobody is told; returns when."""
        began = time.monotonic()
        self.network.ip("link", "set", self.wire, "down")
        return began

    def plug_in(self) -> None:
        """Undo ``pull_cable``."""
        self.network.ip("link", "set", self.wire, "up")

    def limit_rate(self, megabits: int) -> None:
        """Its wire carries so many megabits a second, in each direction. Raises Unavailable where the kernel cannot."""
        limit = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms"]
        if shutil.which("tc") is None:
            raise Unavailable("a slow wire: there is no program 'tc' (package iproute2)")
        _call([*self.network.enter, "tc", "qdisc", "replace", "dev", self.wire, *limit])
        _call([*self._enter, "tc", "qdisc", "replace", "dev", "eth0", *limit])


def stop(process: subprocess.Popen[str]) -> None:
    """End a command of ``Host.start`` and what it started, unless that left its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The next line of its stdout. Raises AssertionError, with its stderr, if none comes; it is ended then."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    if line := process.stdout.readline() if ready else "":
        return line
    stop(process)
    out, err = process.communicate(timeout=PATIENCE_S)
    raise AssertionError(f"no line within {timeout_s:g} s, or the end\n{out}\n{err}")


@contextmanager
def hosts(
    count: int, keep: Sequence[Path] = (), *, user: bool | None = None, own_name: str | None = None
) -> Iterator[tuple[Host, ...]]:
    """``count`` hosts on one bridge, named ``host-1`` and so on; gone when the block ends, or this process.

    ``keep``: directories below /tmp that every host is to see; the others' /tmp is their own. The repository and the
    interpreter are kept anyway. ``user``: whether to use a user namespace, which needs no root; None tries without one
    first. ``own_name``: what each host's /etc/hosts says of its own name, as Debian's installer writes 127.0.1.1; None
    for its address on the wire. Raises Unavailable where the kernel, or a missing program, does not let it.
    """
    for program in ("ip", "nsenter", "unshare", "mount"):
        if shutil.which(program) is None:
            raise Unavailable(f"several hosts: there is no program {program!r} (packages util-linux, iproute2)")
    outer, init, in_user = _outer((False, True) if user is None else (user,))
    made: list[subprocess.Popen[str]] = [outer]
    try:
        addresses = {f"host-{number}": f"10.77.0.{number}" for number in range(1, count + 1)}
        network = Network(init, in_user)
        into = [*network.enter, "--mount", "--pid"]
        fresh = ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork"]
        kept = [str(path) for path in dict.fromkeys((REPO, *_interpreter(), *keep)) if path.is_relative_to("/tmp")]
        built = []
        for name, address in addresses.items():
            known = addresses | ({name: own_name} if own_name else {})
            names = "".join(f"{where} {who}\n" for who, where in {"localhost": "127.0.0.1", **known}.items())

            def boot(name: str = name, names: str = names) -> subprocess.Popen[str]:
                what = [name, str(uuid.uuid4()), names, *kept]
                made.append(_popen([*into, *fresh, "sh", "-euc", _HOST, "sh", *what], stdin=subprocess.DEVNULL))
                return made[-1]

            built.append(Host(name, address, boot, network, in_user))
        yield tuple(built)
    finally:
        assert outer.stdin is not None
        outer.stdin.close()  # its init ends, and every process in its pid namespace and in those within
        for process in made:
            process.wait(PATIENCE_S)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def _user(user: bool) -> list[str]:
    """For nsenter, which would otherwise set groups: not allowed without root."""
    return ["--user", "--preserve-credentials"] if user else []


def _outer(ways: Sequence[bool]) -> tuple[subprocess.Popen[str], int, bool]:
    """The namespace around all hosts: its process, its init's pid, and whether it took a user namespace.

    ``ways``: whether to use one, to be tried in this order.
    """
    reasons = []
    for user in ways:
        mapped = ["--user", "--map-root-user"] if user else []
        process = _popen(["unshare", *mapped, "--net", "--mount", "--pid", "--fork", "sh", "-euc", _OUTER])
        try:
            return process, _pid(process), user
        except Unavailable as unavailable:
            reasons.append(("in a user namespace: " if user else "") + str(unavailable))
            assert process.stdin is not None
            process.stdin.close()
    raise Unavailable("several hosts: " + "; ".join(reasons))


def _popen(command: Sequence[str], stdin: int = subprocess.PIPE) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def _pid(process: subprocess.Popen[str]) -> int:
    """What an init says once it is ready. Raises Unavailable with what it says instead."""
    try:
        return int(read_line(process, PATIENCE_S))
    except AssertionError as error:
        raise Unavailable("; ".join(str(error).split("\n")[2:]).strip("; ") or "no answer") from None


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise Unavailable(f"several hosts: {' '.join(command[-8:])}: {done.stderr.strip()}")


def _interpreter() -> tuple[Path, ...]:
    return Path(sys.prefix), Path(sys.base_prefix)


def _environment() -> dict[str, str]:
    """Nothing of this machine's Ray, and no home that hosts would share."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY", "PYTEST"))}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return kept | {"PATH": programs, "PYTHONPATH": str(REPO), "HOME": "/tmp/home", "RAY_USAGE_STATS_ENABLED": "0"}
