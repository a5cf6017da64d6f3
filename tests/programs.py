"""Python programs that start as forks of one that has imported torch, Ray and raytorchrpc: a tenth of the CPU time.

A program is given as to Python: ``-c CODE``, ``-m MODULE`` or a file, and its arguments. Only a test of how Python
starts, of what importing does, or of what is read once in a process, such as Ray's mode of authentication, starts
Python itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
_STREAMS = (0, 1, 2)


class Program:
    """One that runs, in a session of its own; with the attributes and methods of ``subprocess.Popen`` used here.

    ``stdout``: a descriptor that takes the place of a pipe.
    """

    def __init__(
        self, *command: str, cwd: Path = ROOT, env: dict[str, str] | None = None, stdout: int | None = None
    ) -> None:
        self.args = command
        (stdin, put), (out_get, out), (err_get, err), (ended, end) = (os.pipe() for _ in range(4))
        request = pickle.dumps((command, str(cwd), dict(os.environ if env is None else env)))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(_template())
            socket.send_fds(sock, [len(request).to_bytes(4, "big")], [stdin, stdout or out, err, end])
            sock.sendall(request)
            self.pid = int.from_bytes(sock.recv(4), "big")
        for fd in (stdin, out, err, end):
            os.close(fd)
        self.stdin, self.stdout, self.stderr = os.fdopen(put, "w"), os.fdopen(out_get), os.fdopen(err_get)
        self._ended = os.fdopen(ended, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = int.from_bytes(self._ended.read(4), "big", signed=True)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.poll() or 0

    def communicate(self, input: str = "", timeout: float | None = None) -> tuple[str, str]:
        """May be called again, and then returns what has come since."""
        if not self.stdin.closed:
            with suppress(BrokenPipeError), self.stdin:
                self.stdin.write(input)
        texts = {self.stdout: b"", self.stderr: b""}
        waiting = [stream for stream in texts if not stream.closed]
        while waiting:
            readable = select.select(waiting, [], [], timeout)[0]
            if not readable:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for stream in readable:
                part = os.read(stream.fileno(), 1 << 16)
                texts[stream] += part
                if not part:
                    waiting.remove(stream)
        self.wait(timeout)
        return texts[self.stdout].decode(), texts[self.stderr].decode()

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_program(
    *command: str,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    stdout: int | None = None,
    input: str = "",
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; ``timeout``: seconds after which it is killed."""
    program = Program(*command, cwd=cwd, env=env, stdout=stdout)
    try:
        out, err = program.communicate(input, timeout)
    finally:
        program.kill()
    assert program.returncode is not None
    return subprocess.CompletedProcess(command, program.returncode, out, err)


# --- the template ----------------------------------------------------------------------------------------------------


@functools.cache
def _template() -> str:
    """Where it listens; it ends with this process."""
    address = f"\0programs-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(16)
        fd, (ends, end) = listener.fileno(), os.pipe()
        command = [sys.executable, "-m", "tests.programs", str(fd), str(ends)]
        template = subprocess.Popen(command, cwd=ROOT, pass_fds=[fd, ends], env={**os.environ, "OMP_NUM_THREADS": "1"})
        os.close(ends)

    def stop() -> None:
        os.close(end)
        template.wait()

    atexit.register(stop)
    return address


def _serve(listener: socket.socket, ends: int) -> list[str]:
    """Returns in each program, with its command. Forks for every request until ``ends`` is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while ends not in select.select([listener, ends], [], [])[0]:
        sock, _ = listener.accept()
        length, fds, _, _ = socket.recv_fds(sock, 4, len(_STREAMS) + 1)
        with sock.makefile("rb") as stream:
            command, directory, environment = pickle.loads(stream.read(int.from_bytes(length, "big")))
        *streams, end = fds
        if os.fork() == 0:  # a process that waits for the program, whose parent it is
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)  # also where these tests run in the background
                for number, fd in zip(_STREAMS, streams, strict=True):
                    os.dup2(fd, number)
                sock.close()  # else the number, which is another's by then, would be closed as the object goes
                listener.close()
                os.closerange(3, 1024)
                os.chdir(directory)
                os.environ.clear()
                os.environ.update(environment)
                return list(command)
            sock.sendall(pid.to_bytes(4, "big"))
            os.closerange(0, end)
            os.write(end, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]).to_bytes(4, "big", signed=True))
            os._exit(0)
        sock.close()
        for fd in fds:
            os.close(fd)
    os._exit(0)


def _run(command: list[str]) -> None:
    """As Python does it."""
    how, main = command[0], ModuleType("__main__")
    sys.modules["__main__"] = main
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.getcwd() if how.startswith("-") else os.path.dirname(how), *filter(None, added)]
    sys.argv[:] = command[1 if how == "-m" else 0 :] if how != "-c" else ["-c", *command[2:]]
    if how == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    code, name = (command[1], "<string>") if how == "-c" else (Path(how).read_text(encoding="utf-8"), how)
    vars(main).update({"__builtins__": __builtins__} if how == "-c" else {"__file__": how})
    exec(compile(code, name, "exec"), vars(main))


def _import() -> None:
    import pydantic.type_adapter  # noqa: F401
    import ray._private.node
    import ray.util.client  # noqa: F401
    import torch.distributed.rpc  # noqa: F401

    import raytorchrpc

    raytorchrpc.GroupConfig()  # loads what checks settings
    gc.collect()
    gc.freeze()


def _main() -> Any:
    listener, ends = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _import()
    sys.path[:] = [path for path in sys.path if Path(path) != ROOT]  # each program says where it looks
    return _run(_serve(listener, ends))


if __name__ == "__main__":
    _main()
