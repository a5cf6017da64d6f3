"""Ray's worker script for ``local_ray``: has a process that is warm already fork, which takes a tenth of the CPU time.

A raylet runs this file in place of Ray's worker script. The first such process becomes the raylet's template (see
``worker_template``). Every such process sends its arguments, environment and standard streams to the template and
exits; the template forks, and the fork runs Ray's worker script. So every actor still has a new process of its own.
Workers with a runtime environment start as Ray starts them.

It imports only what Python has loaded or built in: there are hundreds of these processes, and ``socket`` or ``json``
takes longer than the start of Python.
"""

import marshal
import os
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET
from _socket import socket as Socket


def _main() -> None:
    if _has_runtime_env():
        from worker_template import ray_script  # type: ignore[import-not-found]  # beside this file

        os.execv(sys.executable, [sys.executable, ray_script(), *sys.argv[1:]])
    address = f"\0warm-workers-{os.environ['RAY_RAYLET_PID']}".encode()
    while True:
        sock = Socket(AF_UNIX)
        try:
            sock.connect(address)
        except ConnectionRefusedError:
            _start_template(address)
        else:
            _send_request(sock)
            return


def _has_runtime_env() -> bool:
    """Its variables, and its interpreter, may be read by torch and the C library as they are loaded."""
    hashes = [int(option.split("=", 1)[1]) for option in sys.argv if option.startswith("--runtime-env-hash=")]
    return any(hashes)


def _start_template(address: bytes) -> None:
    """Unless another worker of this raylet has just done so."""
    listener = Socket(AF_UNIX)
    try:
        listener.bind(address)
        listener.listen(128)
        if os.fork() == 0:
            os.setsid()
            os.set_inheritable(listener.fileno(), True)
            template = os.path.join(os.path.dirname(__file__), "worker_template.py")
            os.execv(sys.executable, [sys.executable, template, str(listener.fileno())])
    except OSError:
        pass
    finally:
        listener.close()


def _send_request(sock: Socket) -> None:
    """Returns when the template has forked."""
    leads_group = os.getpgrp() == os.getpid()
    request = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd(), leads_group))
    streams = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
    sock.sendmsg([len(request).to_bytes(4, "big")], [(SOL_SOCKET, SCM_RIGHTS, streams)])
    sock.sendall(request)
    sock.recv(1)


if __name__ == "__main__":
    _main()
