"""Who may connect to a listener that does not ask."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.process import tcp
from tests.polling import wait_until

HERE = ("127.0.0.1", "::1")


def _listen(family: socket.AddressFamily) -> socket.socket:
    return socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    try:
        listening = _listen(request.param)
    except OSError as error:
        pytest.skip(f"no such network here: {error}")
    with listening:
        yield listening


def _admit(server: socket.socket, *texts: str) -> None:
    tcp.admit_only(server, tcp.networks(texts))


def _gets_in(server: socket.socket, source: str | None = None, patience_s: float = 5.0) -> bool:
    try:
        bind = (source, 0) if source else None
        with socket.create_connection(server.getsockname()[:2], timeout=patience_s, source_address=bind) as sock:
            sock.sendall(b"x" * 100_000)
            server.settimeout(patience_s)
            with server.accept()[0] as accepted:
                return accepted.recv(1) == b"x"
    except TimeoutError:
        return False


def test_those_named_get_in_and_send_what_they_like(server: socket.socket) -> None:
    _admit(server, "10.0.0.1", "10.0.0.0/24", "2001:db8::/32", *HERE, "192.168.7.7")
    assert _gets_in(server)


@pytest.mark.parametrize("named", [(), ("10.0.0.1", "2001:db8::/32")], ids=["nobody is named", "others are named"])
def test_others_do_not_until_they_are_admitted(server: socket.socket, named: tuple[str, ...]) -> None:
    _admit(server, *named)
    assert not _gets_in(server, patience_s=0.1)
    _admit(server, "10.0.0.1", *HERE)
    assert _gets_in(server)


@pytest.mark.parametrize("admitted", ["127.0.0.7", "127.0.0.4/30", "0.0.0.0/0"])
def test_by_address_and_by_network(admitted: str) -> None:
    with _listen(socket.AF_INET) as server:
        _admit(server, admitted)
        assert _gets_in(server, "127.0.0.7")
        all_get_in = admitted == "0.0.0.0/0"
        assert _gets_in(server, "127.0.0.8", patience_s=5.0 if all_get_in else 0.1) == all_get_in


def test_a_connection_that_exists_stays() -> None:
    with _listen(socket.AF_INET) as server, socket.create_connection(server.getsockname()) as sock:
        accepted, _ = server.accept()
        with accepted:
            _admit(server, "10.0.0.1")
            sock.sendall(b"still here")
            accepted.settimeout(5)
            assert accepted.recv(100) == b"still here"


def test_one_socket_alone_gets_in(server: socket.socket) -> None:
    with socket.socket(server.family) as named, socket.socket(server.family) as other:
        for sock in (named, other):
            sock.bind((server.getsockname()[0], 0))
            sock.settimeout(0.1 if sock is other else 5.0)
        tcp.admit_one(server, named.getsockname()[:2])
        with pytest.raises(TimeoutError):
            other.connect(server.getsockname()[:2])
        named.connect(server.getsockname()[:2])
        server.accept()[0].close()
    tcp.admit_all(server)
    assert _gets_in(server)


def test_the_port_alone_is_not_enough() -> None:
    with _listen(socket.AF_INET) as server, socket.socket() as named, socket.socket() as other:
        named.bind(("127.0.0.1", 0))
        tcp.admit_one(server, named.getsockname())
        other.bind(("127.0.0.7", named.getsockname()[1]))
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.connect(server.getsockname())


def test_more_networks_than_a_kernel_takes_are_refused_aloud() -> None:
    with _listen(socket.AF_INET) as server:
        many = [f"10.{index >> 7}.{(index & 127) * 2}.1" for index in range(5000)]
        with pytest.raises(OSError, match="instructions"):
            _admit(server, *many)
        assert _gets_in(server)


def test_neighbours_are_told_as_one_network() -> None:
    assert [str(net) for net in tcp.networks(["10.0.0.0", "10.0.0.1", "fe80::1%eth0"])] == [
        "10.0.0.0/31",
        "fe80::1/128",
    ]


def test_what_is_no_network_is_refused_by_the_settings() -> None:
    assert GroupConfig.from_env({"RAYTORCHRPC_TORCHRPC_FROM": "10.0.0.0/8, ::1"}).torchrpc_from == ("10.0.0.0/8", "::1")
    with pytest.raises(ConfigurationError, match=r"'10\.0\.0' is neither an address nor a network"):
        GroupConfig(torchrpc_from=("10.0.0",))


def test_a_socket_that_is_closed_while_the_listeners_are_listed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, open_ = _listen(socket.AF_INET), _listen(socket.AF_INET)

    def sockets() -> Iterator[tuple[int, socket.socket]]:
        for sock in (closed, open_):
            fd = sock.fileno()
            if sock is closed:
                sock.close()
            yield fd, sock

    monkeypatch.setattr(tcp.fork, "own_sockets", sockets)
    with open_:
        assert list(tcp.listening().values()) == [open_.fileno()]


def test_silence_counts_from_the_last_answer_and_not_from_what_is_sent_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def left_ms() -> int:
        tcp.count_silence(here)
        return here.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        assert left_ms() == tcp.SILENCE_S * 1000  # it is probed only after a while
        monkeypatch.setattr(tcp, "_PROBE_AFTER_S", 0)
        monkeypatch.setattr(tcp, "_PROBE_EVERY_S", 0)
        assert wait_until(lambda: 1000 <= left_ms() < tcp.SILENCE_S * 1000 - 100, 30)
        monkeypatch.setattr(tcp, "SILENCE_S", 0)
        assert wait_until(lambda: left_ms() == 1000, 30)
    here, there = socket.socketpair()
    with here, there:
        tcp.count_silence(here)  # of one host: no effect
