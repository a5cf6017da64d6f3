"""What an attacker without the secret does between two members: relays their bytes, and changes some on the way."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

#: Given what the connecting end sent, what the accepting end gets instead.
Tamper = Callable[[bytes], bytes]


class Relay:
    """Listens in place of somebody, and passes everything on to another listener. Close it in the end."""

    def __init__(self, family: int, listen_at: Any, target: Any) -> None:
        """Addresses as ``socket.bind`` and ``socket.connect`` take them."""
        self._family, self._target = family, target
        self._listener = socket.socket(family)
        try:
            self._listener.bind(listen_at)
        except OSError:
            self._listener.close()
            raise
        self._listener.listen()
        self.address: Any = self._listener.getsockname()
        self.tamper: Tamper | None = None
        """Applied to each piece that the connecting ends send from now on."""
        self.rewrite: Tamper | None = None
        """Likewise, of the accepting ends."""
        self.relayed = threading.Event()
        """Set once the accepting end has answered something."""
        self._socks: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(self._family)
                self._socks += [near, far]
                if self._closed:
                    self.close()
                far.connect(self._target)
                threading.Thread(target=self._forward, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._forward, args=(far, near, False), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, outward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                change = self.tamper if outward else self.rewrite
                sink.sendall(data if change is None else change(data))
                if not outward:
                    self.relayed.set()
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in (self._listener, *self._socks):
            sock.close()


class NngPath:
    """Stands between members of the nng lane over TCP: at the address where connections are asked for, and on each
    connection that is then made, since the answer that says where it is made is on the way as well."""

    def __init__(self, target: str) -> None:
        """``target``: URL at which the member is asked for connections."""
        self._wires: list[Relay] = []
        self._asked = Relay(socket.AF_INET, ("127.0.0.1", 0), _split(target))
        self._asked.rewrite = self._redirect
        self.url = "tcp://{}:{}".format(*self._asked.address)
        self._tamper: Tamper | None = None

    def _redirect(self, answer: bytes) -> bytes:
        found = re.search(rb"tcp://127\.0\.0\.1:(\d+)", answer)
        if found is None:
            return answer
        wire = Relay(socket.AF_INET, ("127.0.0.1", 0), ("127.0.0.1", int(found[1])))
        while len(str(wire.address[1])) != len(found[1]):  # the answer says how long it is
            wire.close()
            wire = Relay(socket.AF_INET, ("127.0.0.1", 0), ("127.0.0.1", int(found[1])))
        wire.tamper = self._tamper
        self._wires.append(wire)
        return answer.replace(found[0], b"tcp://127.0.0.1:%d" % wire.address[1])

    def set_tamper(self, tamper: Tamper | None) -> None:
        self._tamper = tamper
        for wire in self._wires:
            wire.tamper = tamper

    def close(self) -> None:
        for relay in (self._asked, *self._wires):
            relay.close()


def _split(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)
