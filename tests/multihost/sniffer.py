"""Reads all packets of the host it runs on, and says whether some words were among them: ``python sniffer.py WORDS``.

Says "listening" once it does, and after a line of input "seen" or "not seen".
"""

from __future__ import annotations

import select
import socket
import sys

_ALL = 3  # ETH_P_ALL


def main(words: bytes) -> None:
    found, before = False, b""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        print("listening", flush=True)
        while True:
            readable, _, _ = select.select([wire, sys.stdin], [], [])
            if wire in readable:
                packet = wire.recv(1 << 17)
                found = found or words in packet or words in before[-len(words) :] + packet
                before = packet
            else:  # nothing is left to read
                print("seen" if found else "not seen", flush=True)
                return


if __name__ == "__main__":
    main(sys.argv[1].encode())
