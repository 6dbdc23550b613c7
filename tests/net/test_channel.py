"""Channels over real sockets: bytes, links, bounds, damage and ends."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from contextlib import suppress
from queue import Queue

import pytest
from net_helpers import WAIT_S, Server, contribution, hello, wait_until

from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.run import credentials
from diloco_cli.run.channel import Channel
from diloco_cli.run.connecting import connect, parse_address
from diloco_cli.run.links import LinkShaper
from diloco_cli.run.listener import Listener
from diloco_cli.run.outbox import Outbox
from diloco_cli.run.secure import ChannelClosed
from diloco_cli.wire.frames import ProtocolError
from diloco_cli.wire.messages import Goodbye, Heartbeat, MergedMsg, PullMsg, Welcome


def nothing(_message, _size):
    raise AssertionError("no payload expected")


class Receiving(threading.Thread):
    """Receives until the channel ends; keeps what came, when, and how it ended."""

    def __init__(self, channel: Channel, keep: bool = True) -> None:
        super().__init__(daemon=True)
        self.channel, self.keep = channel, keep
        self.got: Queue = Queue()
        self.progress: list[tuple[float, int]] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            while True:
                message, payload = self.channel.receive(
                    lambda _message, size: memoryview(bytearray(size)),
                    lambda count: self.progress.append((time.monotonic(), count)),
                )
                self.got.put((message, payload if self.keep else None, time.monotonic()))
        except (ChannelClosed, ProtocolError) as error:
            self.error = error

    def next(self):
        return self.got.get(timeout=WAIT_S)


def test_messages_and_payloads_both_ways(server):
    ours, theirs = server.pair()
    assert (ours.peer, theirs.peer) == ("syncer", "island-0")
    payload = os.urandom(3_000_001)
    here, there = Receiving(ours), Receiving(theirs)
    sender = threading.Thread(target=lambda: [ours.send(contribution(4), payload), ours.send(Goodbye(reason="ü"))])
    sender.start()
    merged = MergedMsg(fragment=1, version=2, wire="int8", numel=5, taken=True, global_step=3)
    theirs.send(merged, payload[:5])
    theirs.send(Welcome(settings={"tau": 2, "nested": [1, None]}, global_step=0, versions=[0] * 5000))
    sender.join()
    assert there.next()[:2] == (contribution(4), payload)
    assert there.next()[:2] == (Goodbye(reason="ü"), None)
    assert here.next()[:2] == (merged, payload[:5])
    assert here.next()[0].versions == [0] * 5000
    assert theirs.bytes_received > len(payload)


def test_a_payload_lands_in_the_buffer_that_allocate_gave(server):
    ours, theirs = server.pair()
    buffer = bytearray(1 << 20)
    asked = []

    def allocate(message, size):
        asked.append((message, size))
        return memoryview(buffer)

    payload = os.urandom(1 << 20)
    sender = threading.Thread(target=ours.send, args=(contribution(1 << 20), payload))
    sender.start()
    _, received = theirs.receive(allocate)
    sender.join()
    assert received.obj is buffer
    assert buffer == payload
    assert asked == [(contribution(1 << 20), 1 << 20)]


def test_64_mib_arrive_whole(server):
    ours, theirs = server.pair()
    payload = os.urandom(1 << 20) * 64
    there = Receiving(theirs)
    ours.send(contribution(len(payload)), payload)
    assert there.next()[1] == payload


def test_a_payload_can_be_skipped_or_refused(server):
    ours, theirs = server.pair()
    payload = bytes(700_000)
    sender = threading.Thread(target=lambda: [ours.send(contribution(4), payload), ours.send(Heartbeat())])
    sender.start()
    assert theirs.receive(lambda _message, _size: None) == (contribution(4), None)
    assert theirs.receive(nothing) == (Heartbeat(), None)
    sender.join()

    def refuse(_message, size):
        raise ProtocolError(f"{size} bytes do not fit")

    sender = threading.Thread(target=_send_until_closed, args=(ours, bytes(1 << 26)))
    sender.start()
    with pytest.raises(ProtocolError, match="do not fit"):
        theirs.receive(refuse)
    assert theirs.closed
    sender.join(timeout=WAIT_S)
    assert not sender.is_alive()


def test_a_buffer_of_another_size_is_never_written_beyond(server):
    ours, theirs = server.pair()
    ours.send(contribution(8), b"12345678")
    with pytest.raises(ProtocolError, match="8 bytes where 4"):
        theirs.receive(lambda _message, _size: memoryview(bytearray(4)))


# ---- links


def worst_window(progress: list[tuple[float, int]], window_s: float) -> float:
    """Most bytes in any window of that length that starts with an arrival."""
    worst, total, start = 0, 0, 0
    for now, count in progress:
        total += count
        while progress[start][0] < now - window_s:
            total -= progress[start][1]
            start += 1
        worst = max(worst, total)
    return worst


def test_rate_is_kept_on_average_and_in_any_second(server):
    """Two channels share a link of 200 Mbit/s with latency; together they get that, neither more nor less."""
    rate = 200e6
    shaper = LinkShaper(rate, latency_s=0.02)
    ends = [server.pair(shaper=shaper) for _ in range(2)]
    receivers = [Receiving(theirs, keep=False) for _, theirs in ends]
    payload = bytes(4_000_000)
    counter: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            counter.append((time.monotonic(), shaper.bytes_sent))

    threads = [threading.Thread(target=watch)]
    threads += [
        threading.Thread(target=lambda c=ours: [c.send(contribution(4), payload) for _ in range(5)]) for ours, _ in ends
    ]
    start, before = time.monotonic(), shaper.bytes_sent
    for thread in threads:
        thread.start()
    arrived = [receiver.next()[2] for receiver in receivers for _ in range(5)]
    stop.set()
    for thread in threads:
        thread.join()
    elapsed = max(arrived) - start - 0.02
    average = (shaper.bytes_sent - before) * 8 / elapsed
    assert average == pytest.approx(rate, rel=0.05)
    # What a dashboard computes: the counter's growth over a second, from any moment on.
    for now, count in counter:
        earlier = [c for t, c in counter if t <= now - 1.0]
        if earlier:
            assert (count - earlier[-1]) * 8 <= rate * 1.1


def test_latency_is_added_and_does_not_cost_throughput(server):
    shaper = LinkShaper(400e6, latency_s=0.04, jitter_s=0.005, seed=1)
    ours, theirs = server.pair(shaper=shaper)
    there = Receiving(theirs)
    for _ in range(3):
        start = time.monotonic()
        ours.send(PullMsg(fragment=0))
        assert there.next()[2] - start >= 0.04
    # 20 payloads of 0.5 MB take 10 ms each on the link: were latency paid for each, it would be a second.
    start = time.monotonic()
    for fragment in range(20):
        ours.send(contribution(4, fragment), bytes(500_000))
    arrived = [there.next() for _ in range(20)]
    assert [message.fragment for message, _, _ in arrived] == list(range(20)), "jitter must keep the order"
    assert 0.18 <= arrived[-1][2] - start <= 0.5


def test_control_passes_bulk_on_the_same_link(server):
    """While a payload takes a second of the link, a message on the other connection waits for chunks, not for it."""
    shaper = LinkShaper(40e6)
    bulk, _bulk_end = server.pair(shaper=shaper)
    control, control_end = server.pair(shaper=shaper)
    bulk_receiver, there = Receiving(_bulk_end), Receiving(control_end)
    sender = threading.Thread(target=bulk.send, args=(contribution(4), bytes(5_000_000)))
    sender.start()
    wait_until(lambda: len(bulk_receiver.progress) > 3)
    waits = []
    for _ in range(10):
        start = time.monotonic()
        control.send(Heartbeat())
        waits.append(there.next()[2] - start)
    assert sender.is_alive(), "the payload was meant to be on its way still"
    sender.join()
    assert sorted(waits)[5] < 0.05


# ---- bounds


@pytest.mark.parametrize("latency_s", [0.0, 0.01])
def test_a_peer_that_does_not_read_costs_one_payload_per_key(server, latency_s):
    ours, theirs = server.pair(shaper=LinkShaper(None if not latency_s else 1e9, latency_s))
    outbox = Outbox(ours)
    payload = bytes(20_000_000)
    ended: list[tuple[str, int]] = []
    for number in range(1000):
        outbox.put(
            MergedMsg(fragment=number % 4, version=number, wire="float32", numel=1, taken=False, global_step=0),
            payload,
            key=number % 4,
            on_sent=lambda n=number: ended.append(("sent", n)),
            on_dropped=lambda n=number: ended.append(("dropped", n)),
        )
        if number == 0:
            wait_until(lambda: outbox.waiting == 0)
        assert outbox.waiting <= 4
    assert len(ended) >= 1000 - 6
    there = Receiving(theirs, keep=False)
    versions = [there.next()[0].version for _ in range(5)]
    assert versions[0] == 0, "the one under way is not replaced"
    assert sorted(versions[1:]) == [996, 997, 998, 999]
    assert outbox.close(flush_s=WAIT_S)
    assert sorted(n for _, n in ended) == list(range(1000)), "every item ends exactly once"


def test_an_outbox_that_overflows_closes_its_channel(server):
    ours, _theirs = server.pair()
    failed: Queue[str] = Queue()
    outbox = Outbox(ours, max_items=8, on_error=failed.put)
    outbox.put(contribution(4), bytes(1 << 26))
    wait_until(lambda: outbox.waiting == 0)
    assert [outbox.put(Heartbeat()) for _ in range(9)] == [True] * 8 + [False]
    assert "does not read" in failed.get(timeout=WAIT_S)
    assert ours.closed
    assert not outbox.put(Heartbeat())
    assert not outbox.close()


def test_outbox_flushes_through_the_delay_line(server):
    ours, theirs = server.pair(shaper=LinkShaper(None, latency_s=0.1))
    there = Receiving(theirs)
    outbox = Outbox(ours)
    for _ in range(5):
        outbox.put(Goodbye(reason="done"))
    assert outbox.close(flush_s=WAIT_S)
    ours.close()
    assert [there.next()[0] for _ in range(5)] == [Goodbye(reason="done")] * 5


# ---- ends and damage


@pytest.mark.parametrize("latency_s", [0.0, 0.01])
def test_close_unblocks_sender_and_receiver(server, latency_s):
    ours, _theirs = server.pair(shaper=LinkShaper(1e9 if latency_s else None, latency_s))
    errors: Queue[Exception] = Queue()

    def blocked(action) -> None:
        try:
            action()
        except ChannelClosed as error:
            errors.put(error)

    threads = [
        threading.Thread(target=blocked, args=(lambda: ours.send(contribution(4), bytes(200_000_000)),)),
        threading.Thread(target=blocked, args=(lambda: ours.receive(nothing),)),
    ]
    for thread in threads:
        thread.start()
    stalled = -1
    while stalled != ours._shaper.bytes_sent:  # until the unread socket is full
        stalled = ours._shaper.bytes_sent
        time.sleep(0.2)
    ours.close("enough")
    for thread in threads:
        thread.join(timeout=WAIT_S)
        assert not thread.is_alive()
    assert [str(errors.get()) for _ in threads] == ["enough"] * 2


def test_close_unblocks_a_wait_for_a_slow_link(server):
    ours, _theirs = server.pair(shaper=LinkShaper(1e6))
    thread = threading.Thread(target=_send_until_closed, args=(ours, bytes(10_000_000)))
    thread.start()
    wait_until(lambda: ours._shaper.bytes_sent > 10_000)
    ours.close()
    thread.join(timeout=WAIT_S)
    assert not thread.is_alive()


def test_a_send_that_comes_after_tls_has_ended_is_told_as_closed(server):
    """close() in one thread may say TLS's goodbye just before the send of another."""
    ours, _theirs = server.pair()
    ours._tls.close_notify()
    with pytest.raises(ChannelClosed):
        ours.send(Heartbeat())


def test_the_end_of_the_peer_is_told(server):
    ours, theirs = server.pair()
    theirs.close()
    with pytest.raises(ChannelClosed, match="closed by the peer"):
        ours.receive(nothing)


class Proxy:
    """Forwards one connection, except that the client's byte at `position` is flipped, or all from there cut off."""

    def __init__(self, target: tuple[str, int], position: int, *, flip: bool) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.target, self.position, self.flip = target, position, flip
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def close(self) -> None:
        self.thread.join(timeout=WAIT_S)
        assert not self.thread.is_alive(), "both ends are closed, so the proxy must end"
        self.listener.close()

    def _run(self) -> None:
        client, _ = self.listener.accept()
        with client, socket.create_connection(self.target) as server:
            back = threading.Thread(target=self._copy, args=(server, client, None))
            back.start()
            self._copy(client, server, self.position)
            back.join()

    def _copy(self, source: socket.socket, sink: socket.socket, position: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                at = position - passed if position is not None else -1
                if 0 <= at < len(data):
                    if not self.flip:
                        sink.sendall(data[:at])
                        break
                    data[at] ^= 0x10
                passed += len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("flip", [True, False], ids=["one byte flipped", "cut off"])
@pytest.mark.parametrize("position", [3_000, 500_000, 999_990])
def test_a_damaged_or_cut_payload_is_never_delivered(server, keys, flip, position):
    proxy = Proxy(server.address, position, flip=flip)
    ours = connect(proxy.address, credentials.load(keys, "island-0"), LinkShaper(), hello(), WAIT_S)
    theirs, _ = server.channels.get(timeout=WAIT_S)
    server.opened += [ours, theirs]
    sender = threading.Thread(target=_send_until_closed, args=(ours, bytes(1_000_000)))
    sender.start()
    with pytest.raises((ChannelClosed, ProtocolError)):
        theirs.receive(lambda _message, size: memoryview(bytearray(size)))
    assert theirs.closed
    sender.join(timeout=WAIT_S)
    assert not sender.is_alive()
    ours.close()
    proxy.close()


def _send_until_closed(channel: Channel, payload: bytes) -> None:
    try:
        channel.send(contribution(len(payload)), payload)
    except ChannelClosed:
        pass


# ---- dialling


def test_addresses_are_dialled_as_written(keys):
    assert parse_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("host.name:80") == ("host.name", 80)
    for wrong in ("host", ":80", "host:", "host:x", "host:70000"):
        with pytest.raises(ValueError, match="no address"):
            parse_address(wrong)


def test_nobody_there_is_an_error_in_time(keys):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(EnvironmentNotReady, match=f"127.0.0.1:{port} within 0.3 s"):
        connect(f"127.0.0.1:{port}", credentials.load(keys, "island-0"), LinkShaper(), hello(), 0.3)
    assert time.monotonic() - start < 2


def test_a_server_that_is_not_the_syncer_is_refused(keys, tmp_path):
    """Of another run (wrong authority), or an island's key used as a server."""
    credentials.make_authority(tmp_path / "keys")
    credentials.issue(tmp_path / "keys", "syncer")
    impostor = Server(tmp_path / "keys")
    with pytest.raises(EnvironmentNotReady, match="no secure connection"):
        connect(impostor.address, credentials.load(keys, "island-0"), LinkShaper(), hello(), WAIT_S)
    impostor.close()


def test_a_late_listener_is_waited_for(keys):
    """Learners may come before the syncer accepts: they wait in the backlog of the launcher's socket."""
    sock = socket.create_server(("127.0.0.1", 0))
    result: Queue[Channel] = Queue()
    address = sock.getsockname()
    thread = threading.Thread(
        target=lambda: result.put(
            connect(address, credentials.load(keys, "island-1"), LinkShaper(), hello("island-1"), WAIT_S)
        )
    )
    thread.start()
    wait_until(lambda: _backlog(sock))
    handed: Queue = Queue()
    listener = Listener(sock, credentials.load(keys, "syncer"), lambda channel, said: handed.put(channel))
    ours, theirs = result.get(timeout=WAIT_S), handed.get(timeout=WAIT_S)
    assert theirs.peer == "island-1"
    thread.join()
    ours.close()
    theirs.close()
    listener.close()


def _backlog(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])
