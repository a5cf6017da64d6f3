"""What an attacker without the secret does between two members: relays their bytes, and changes some on the way."""

from __future__ import annotations

import contextlib
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
                tamper = self.tamper  # which the test may take back at any moment
                sink.sendall(tamper(data) if outward and tamper is not None else data)
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
