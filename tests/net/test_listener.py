"""The syncer's door: whatever comes to it, a good learner gets in and memory and time stay bounded."""

from __future__ import annotations

import os
import pickle
import re
import resource
import socket
import ssl
import struct
import threading

import pytest
from net_helpers import WAIT_S, Server, contribution, hello, wait_until

from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.run import credentials
from diloco_cli.run.connecting import connect
from diloco_cli.run.links import LinkShaper
from diloco_cli.run.secure import ChannelClosed
from diloco_cli.wire.frames import encode_frame
from diloco_cli.wire.messages import Heartbeat, encode_message


def good_learner_works(server: Server) -> None:
    ours, theirs = server.pair()
    sender = threading.Thread(target=ours.send, args=(contribution(4), b"1234"))
    sender.start()
    assert theirs.receive(lambda _message, size: memoryview(bytearray(size)))[1] == b"1234"
    sender.join()


def talk(address: tuple[str, int], data: bytes) -> None:
    """Send raw bytes and wait until the other side hangs up."""
    with socket.create_connection(address, timeout=WAIT_S) as sock:
        try:
            sock.sendall(data)
            while sock.recv(65536):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass


class Exploit:
    """Unpickling this writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_garbage_is_refused_at_once_and_disturbs_nobody(server, tmp_path):
    marker = tmp_path / "marker"
    garbage = {
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "random": bytes(range(256)) * 4096,
        "our own frame without TLS": struct.pack(">4sBBHIQI", b"DLCO", 1, 1, 0, 2, 10**15, 0) + b"{}",
        "sealed chunk": struct.pack(">BI", 0x44, 1 << 31) + bytes(100),
        "pickle": pickle.dumps(Exploit(str(marker))),
        "record with a wrong body": b"\x16\x03\x01\x00\x10" + bytes(16),
    }
    for data in garbage.values():
        talk(server.address, data)
    socket.create_connection(server.address).close()  # a port scan
    good_learner_works(server)
    wait_until(lambda: len(server.refused) >= 3)
    assert not marker.exists()
    assert {address.rpartition(":")[0] for address, _ in server.refused} == {"127.0.0.1"}
    reasons = [reason for _, reason in server.refused]
    assert len(reasons) == len(set(reasons)), "each logged once"
    wait_until(lambda: server.listener.num_pending == 0)


def test_idle_connections_take_64_places_and_go(keys):
    server = Server(keys, deadline_s=1.0)
    idle = []
    for _ in range(200):
        idle.append(socket.create_connection(server.address))
        assert server.listener.num_pending <= 64
    good_learner_works(server)
    wait_until(lambda: server.listener.num_pending == 0, 5.0)
    assert len(server.refused) <= 3
    for sock in idle:
        sock.close()
    server.close()


def test_out_of_file_descriptors_it_goes_on(keys):
    """accept() fails while the process has no descriptor left; afterwards a good learner gets in."""
    server = Server(keys)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket() for _ in range(3)]
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        for sock in waiting:
            sock.connect(server.address)
        wait_until(lambda: any("accept failed" in reason for _, reason in server.refused))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    good_learner_works(server)
    assert sum("accept failed" in reason for _, reason in server.refused) == 1, "said once, not in a loop"
    for sock in waiting:
        sock.close()
    server.close()


def test_wrong_authority_is_refused(server, tmp_path):
    credentials.make_authority(tmp_path / "keys")
    stranger = credentials.issue(tmp_path / "keys", "island-0")
    stranger = credentials.Credentials("island-0", stranger.own, server.keys / "ca.pem")
    try:
        # With TLS 1.3 a client learns only from its first read that its certificate was refused.
        channel = connect(server.address, stranger, LinkShaper(), hello(), 2.0)
        with pytest.raises(ChannelClosed):
            channel.receive(lambda _message, _size: None)
    except EnvironmentNotReady:
        pass
    wait_until(lambda: any("TLS" in reason for _, reason in server.refused))
    assert server.channels.empty()
    good_learner_works(server)


def test_no_certificate_is_refused(server):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(server.keys / "ca.pem")
    talk_tls(server, context, encode_message(hello()))
    wait_until(lambda: bool(server.refused))
    assert server.channels.empty()


def test_the_syncers_own_certificate_is_no_learners(server):
    """A certificate for servers does not open the door as a client."""
    own = credentials.load(server.keys, "syncer")
    try:
        channel = connect(server.address, own, LinkShaper(), hello("syncer"), 2.0)
        channel.close()
    except EnvironmentNotReady:
        pass
    wait_until(lambda: any("TLS" in reason for _, reason in server.refused))
    assert server.channels.empty()


def authenticated_bytes(server: Server, data: bytes) -> None:
    """Send bytes inside TLS as island-0, and wait for the end."""
    talk_tls(server, credentials.load(server.keys, "island-0").context(server=False), data)


def talk_tls(server: Server, context: ssl.SSLContext, data: bytes) -> None:
    """Send bytes inside TLS and wait for the end."""
    with socket.create_connection(server.address, timeout=WAIT_S) as sock, context.wrap_socket(sock) as tls:
        try:
            tls.sendall(data)
            while tls.recv(65536):
                pass
        except (ssl.SSLError, ConnectionError):
            pass


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (encode_message(hello("island-1")), "'island-1'.*'island-0'"),
        (encode_message(Heartbeat()), "expected one Hello"),
        (encode_message(hello()) * 2, "expected one Hello"),
        (encode_frame(1, {"island": "island-0"}), "unknown or missing field"),
        (struct.pack(">4sBBHIQI", b"DLCO", 1, 1, 0, 2, 10**15, 0) + b"{}", "payload of 1000000000000000 bytes"),
        (b"DLCO\x02" + bytes(19), "protocol version 2"),
        (pickle.dumps({"island": "island-0"}), "not a diloco frame"),
    ],
    ids=["another's name", "no hello", "two", "fields missing", "10**15 bytes", "version", "pickle"],
)
def test_a_certificate_alone_is_not_enough(server, data, text):
    authenticated_bytes(server, data)
    wait_until(lambda: bool(server.refused))
    assert re.search(text, server.refused[0][1])
    assert server.channels.empty()
    good_learner_works(server)


def test_a_large_hello_fits(server):
    layout = {f"model.layers.{i}.self_attn.q_proj.weight": [4096, 4096] for i in range(1000)}
    ours = connect(
        server.address, credentials.load(server.keys, "island-0"), LinkShaper(), hello(layout=layout), WAIT_S
    )
    theirs, said = server.channels.get(timeout=WAIT_S)
    server.opened += [ours, theirs]
    assert said.layout == layout


def test_what_follows_the_hello_is_not_lost(server):
    """A client may send its next messages before the server has got round to its Hello."""
    ours = connect(server.address, credentials.load(server.keys, "island-0"), LinkShaper(), hello(), WAIT_S)
    ours.send(Heartbeat())
    ours.send(contribution(4), b"abcd")
    theirs, _ = server.channels.get(timeout=WAIT_S)
    server.opened += [ours, theirs]
    assert theirs.receive(lambda _m, _s: None)[0] == Heartbeat()
    assert theirs.receive(lambda _m, size: memoryview(bytearray(size)))[1] == b"abcd"


def test_an_error_in_the_callback_ends_that_connection_only(keys, caplog):
    calls = []

    def shaper_for(island: str) -> LinkShaper:
        calls.append(island)
        return LinkShaper()

    server = Server(keys, shaper_for=shaper_for)
    take = server.channels.put
    server.channels.put = lambda item: (_ for _ in ()).throw(RuntimeError("bug"))  # type: ignore[method-assign]
    ours = connect(server.address, credentials.load(keys, "island-0"), LinkShaper(), hello(), WAIT_S)
    with pytest.raises(ChannelClosed):
        ours.receive(lambda _message, _size: None)
    server.channels.put = take  # type: ignore[method-assign]
    good_learner_works(server)
    assert calls == ["island-0", "island-0"]
    server.close()


def test_key_files_are_the_owners_alone(keys):
    assert keys.stat().st_mode & 0o777 == 0o700
    files = sorted(path.name for path in keys.iterdir())
    assert files == ["ca-key.pem", "ca.pem", "island-0.pem", "island-1.pem", "syncer.pem"]
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["", "../x", "a/b", "ca", "ca-key", "x" * 65, "-x", "a b"])
def test_names_that_are_no_file_names_get_no_certificate(keys, name):
    with pytest.raises(ValueError, match="cannot be a name"):
        credentials.issue(keys, name)


def test_an_authority_is_made_once(keys):
    before = (keys / "ca.pem").read_bytes()
    credentials.make_authority(keys)
    assert (keys / "ca.pem").read_bytes() == before
