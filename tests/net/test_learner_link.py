"""The learner's side of the wire against a real listener: how it ends, what waits in it, and whose memory is whose."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from door_runs import SETTINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from net_helpers import WAIT_S, Server, wait_until

from diloco_cli.config.compose import compose
from diloco_cli.config.schema import Config
from diloco_cli.core.fragments import Layout, TensorSpec, build_layout
from diloco_cli.core.types import Contribution, SendFragment
from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.run import credentials
from diloco_cli.run.buffers import BufferPool
from diloco_cli.run.channel import Channel
from diloco_cli.run.global_model import GlobalModel, PayloadStore
from diloco_cli.run.learner_link import Inbox, Lost, Merged, SyncerLink
from diloco_cli.run.secure import ChannelClosed
from diloco_cli.wire.codecs import encode
from diloco_cli.wire.messages import (
    Goodbye,
    Heartbeat,
    Installed,
    MergedMsg,
    PullMsg,
    Reject,
    Report,
    Validation,
)

TENSORS = [TensorSpec(name, shape, "weight") for name, shape in [("a", (300, 100)), ("b", (200, 100))]]


def layout() -> Layout:
    return build_layout(TENSORS, num_fragments=2, min_fragment_bytes=4096)


@cache
def config(*overrides: str) -> Config:
    return compose([*SETTINGS, *overrides], None)


@contextmanager
def linked(server: Server, *overrides: str) -> Iterator[tuple[SyncerLink, Channel, Channel]]:
    """(link, the syncer's end of control, of bulk); all threads of the link have ended at the end."""
    before = threading.active_count()
    keys = credentials.load(server.keys, "island-0")
    link = SyncerLink(config(*overrides), "island-0", layout(), server.address, keys, seed=0)
    ends = {}
    for _ in range(2):
        channel, said = server.channels.get(timeout=WAIT_S)
        assert said.layout_hash == layout().hash
        ends[said.kind] = channel
    server.opened += ends.values()
    try:
        yield link, ends["control"], ends["bulk"]
    finally:
        link.close("the test is over")
        # On our side all have ended; those of the syncer's end belong to the test.
        assert [t.name for t in threading.enumerate() if t in link._threads] == []
        wait_until(lambda: threading.active_count() <= before)


def merged(fragment: int, version: int, value: float | None = None, **fields) -> tuple[MergedMsg, bytes]:
    numel = layout().fragments[fragment].numel
    right = {"numel": numel, "wire": "float32", "taken": False, "global_step": 0, **fields}
    payload = torch.full((numel,), float(version) if value is None else value).numpy().tobytes()
    return MergedMsg(fragment=fragment, version=version, **right), payload


def drain(link: SyncerLink) -> list[object]:
    found = []
    while True:
        try:
            found.append(link.inbox.get_nowait())
        except queue.Empty:
            return found


def messages_of(channel: Channel) -> list[object]:
    """All messages until the channel ends."""
    got = []
    try:
        while True:
            got.append(channel.receive(lambda _message, size: memoryview(bytearray(size)))[0])
    except ChannelClosed:
        return got


# ---- how it ends


ENDS = {
    "control closed": (lambda control, _bulk: control.close(), "closed by the peer"),
    "bulk closed": (lambda _control, bulk: bulk.close(), "closed by the peer"),
    "wrong numel": (lambda _control, bulk: bulk.send(*merged(0, 1, numel=7)), "fragment 0 as 7 x float32"),
    "wrong wire": (lambda _control, bulk: bulk.send(*merged(0, 1, wire="int8")), "x int8"),
    "wrong length": (lambda _control, bulk: bulk.send(merged(0, 1)[0], b"1234"), "fragment 0 in 4 bytes"),
    "unknown fragment": (
        lambda _control, bulk: bulk.send(
            MergedMsg(fragment=2, version=1, wire="float32", numel=1, taken=False, global_step=0), b"1234"
        ),
        "unexpected MergedMsg",
    ),
    "payload on control": (lambda control, _bulk: control.send(*merged(0, 1)), "on the control connection"),
    "no frame": (lambda control, _bulk: control._sock.sendall(control._tls.encrypt(bytes(64))), "not a diloco frame"),
    "no TLS": (lambda _control, bulk: bulk._sock.sendall(bytes(64)), "not a TLS record"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_error_arrives_as_lost_once_with_its_reason(server, end):
    act, pattern = ENDS[end]
    with linked(server) as (link, control, bulk):
        act(control, bulk)
        lost = link.inbox.get(timeout=WAIT_S)
        assert isinstance(lost, Lost)
        assert re.search(pattern, lost.reason), lost
        control.close()
        bulk.close()
        for thread in link._threads[:2]:
            thread.join(timeout=WAIT_S)
        assert drain(link) == []


def test_a_failure_of_our_own_encoder_arrives_as_lost(server):
    """int8 is drift since what was installed: nothing was."""
    with linked(server, "network.wire_up=int8") as (link, _control, _bulk):
        flat = link.float_buffer(0)
        link.send(SendFragment(fragment=0, base_version=0, tokens=1, steps=1, sent_at_step=1), flat)
        lost = link.inbox.get(timeout=WAIT_S)
        assert isinstance(lost, Lost)
        assert "encoding failed: KeyError" in lost.reason


def test_a_rejection_comes_before_the_loss(server):
    with linked(server) as (link, control, _bulk):
        control.send(Reject(reason="no"))
        control.close()
        assert link.inbox.get(timeout=WAIT_S) == Reject(reason="no")
        assert isinstance(link.inbox.get(timeout=WAIT_S), Lost)


def test_when_the_second_connection_fails_the_first_is_closed(server, monkeypatch):
    from diloco_cli.run import learner_link

    real, dialled = learner_link.connect, []

    def connect(address, credentials, shaper, hello, timeout_s):
        if hello.kind == "bulk":
            raise EnvironmentNotReady("cannot reach the syncer")
        dialled.append(real(address, credentials, shaper, hello, timeout_s))
        return dialled[0]

    monkeypatch.setattr(learner_link, "connect", connect)
    with pytest.raises(EnvironmentNotReady):
        SyncerLink(config(), "island-0", layout(), server.address, credentials.load(server.keys, "island-0"), seed=0)
    assert dialled[0].closed
    server.opened.append(server.channels.get(timeout=WAIT_S)[0])


def test_close_flushes_control_over_a_slow_link_and_ends_all_threads(server):
    """100 ms of latency and 100 kbit/s; a contribution that would take seconds does not hold the goodbye up."""
    with linked(server, "network.latency=100ms", "network.bandwidth=100kbps") as (link, control, bulk):
        link.send(SendFragment(fragment=0, base_version=0, tokens=1, steps=1, sent_at_step=1), link.float_buffer(0))
        said = [
            Report(step=9, tokens=9, step_time_s=0.1, metrics={"loss": 1.0}, phases={}),
            Installed(fragment=0, version=1, tokens=1, steps=1, step=1, waited_s=0.0),
            Validation(step=9, loss=1.0, bigram=2.0, tokens=3, final=True),
        ]
        link.report(said[0])
        link.installed(said[1])
        link.validation(said[2])
        got: list[object] = []
        reader = threading.Thread(target=lambda: got.extend(messages_of(control)))
        reader.start()
        link.close("finished")
        reader.join(timeout=WAIT_S)
        assert [m for m in got if not (isinstance(m, Report) and m.step_time_s is None)] == [
            *said,
            Goodbye(reason="finished"),
        ]
        assert messages_of(bulk) == []
        assert drain(link) == [], "an end that we chose is no loss"
        link.close("again")


def test_heartbeats_repeat_the_last_report_without_a_step_time(server):
    with linked(server, "sync.heartbeat_interval=20ms") as (link, control, _bulk):
        link.report(Report(step=5, tokens=50, step_time_s=0.1, metrics={"loss": 1.0}, phases={"wait": 1.0}))
        while True:
            message, _ = control.receive(lambda _message, _size: None)
            if message.step == 5 and message.step_time_s is None:
                break
        assert message == Report(step=5, tokens=50, step_time_s=None, metrics={}, phases={})


# ---- what waits in it


def test_an_unread_merged_fragment_gives_way_to_a_newer_version(server):
    with linked(server) as (link, control, bulk):
        taken = set()
        take = link._floats.take
        link._floats.take = lambda size: (buffer := take(size), taken.add(buffer.data_ptr()))[0]
        control.send(PullMsg(fragment=0))
        control.send(Heartbeat())
        wait_until(lambda: len(link.inbox._waiting) == 1)
        for version in range(1, 31):
            bulk.send(*merged(0, version))
        bulk.send(*merged(1, 4))
        wait_until(lambda: len(link.inbox._waiting) == 3)
        first, second, third = drain(link)
        assert first == PullMsg(fragment=0)
        assert (second.message.fragment, second.message.version) == (0, 30)
        assert (second.values == 30).all()
        assert (third.message.fragment, third.message.version) == (1, 4)
        link.release(second)
        link.release(third)
        # One waits, one is being received, and the size of the other fragment may be the same.
        assert len(taken) <= 4


inbox_steps = st.lists(st.one_of(st.tuples(st.integers(0, 2), st.integers(1, 5)), st.sampled_from(["pull", "get"])))


@given(inbox_steps)
def test_inbox_holds_the_newest_of_each_fragment_and_loses_nothing(steps):
    released: list[Merged] = []
    inbox = Inbox(released.append)
    put, got, pulls = [], [], 0
    newest: dict[int, int] = {}
    for step in steps:
        if step == "get":
            try:
                message = inbox.get_nowait()
            except queue.Empty:
                continue
            got.append(message)
            if isinstance(message, Merged):
                assert message.message.version == newest.pop(message.message.fragment)
        elif step == "pull":
            inbox.put(PullMsg(fragment=pulls))
            pulls += 1
        else:
            fragment, version = step
            message = Merged(merged(0, version)[0], torch.empty(0), 0.0)
            message.message = MergedMsg(
                fragment=fragment, version=version, wire="float32", numel=1, taken=False, global_step=0
            )
            put.append(message)
            inbox.put(message)
            newest[fragment] = max(version, newest.get(fragment, 0))
    while True:
        try:
            got.append(inbox.get_nowait())
        except queue.Empty:
            break
    assert [m.fragment for m in got if isinstance(m, PullMsg)] == list(range(pulls)), "control keeps its order"
    ended = [id(m) for m in got if isinstance(m, Merged)] + [id(m) for m in released]
    assert sorted(ended) == sorted(map(id, put)), "each is taken or released, once"


# ---- whose memory is whose


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_what_is_sent_is_what_was_given_however_slow_the_reader(server, wire):
    """Buffers come back while others are on their way: no contribution may hold another one's values."""
    with linked(server, f"network.wire_up={wire}") as (link, _control, bulk):
        numel = layout().fragments[0].numel
        link.remember_base(0, torch.zeros(numel))
        got: list[tuple[int, bytes]] = []

        def receive() -> None:
            try:
                while True:
                    message, payload = bulk.receive(lambda _message, size: memoryview(bytearray(size)))
                    got.append((message.tokens, bytes(payload)))
            except ChannelClosed:
                pass

        pointers = set()
        reader = threading.Thread(target=receive)
        for number in range(1, 101):
            flat = link.float_buffer(0)
            pointers.add(flat.data_ptr())
            flat.fill_(float(number))
            link.send(SendFragment(fragment=0, base_version=0, tokens=number, steps=1, sent_at_step=1), flat)
            if number == 50:
                reader.start()
        wait_until(lambda: bool(got) and got[-1][0] == 100)
        link.close("done")
        reader.join(timeout=WAIT_S)
    for tokens, payload in got:
        if wire != "int8":  # with error feedback a payload is its own value only up to what was lost before
            assert payload == bytes(encode(torch.full((numel,), float(tokens)), wire).numpy())
    assert [tokens for tokens, _ in got] == sorted({tokens for tokens, _ in got})


class Live:
    """Memory in use: each piece holds a mark of its own, which nobody else may write over."""

    def __init__(self) -> None:
        self.marked: dict[int, tuple[torch.Tensor, int]] = {}
        self.next = 1

    def add(self, buffer: torch.Tensor) -> int:
        key, self.next = self.next, self.next + 1
        buffer.fill_(key % 120 + 1)
        self.marked[key] = (buffer, key % 120 + 1)
        return key

    def check(self) -> None:
        for buffer, mark in self.marked.values():
            assert (buffer == mark).all(), "two live handles share memory"


pool_steps = st.lists(st.one_of(st.sampled_from([64, 64, 128, 4096]), st.integers(-20, -1)), max_size=60)


@given(pool_steps, st.integers(0, 4))
def test_the_pool_hands_no_buffer_out_twice_while_it_is_in_use(steps, max_kept):
    pool, live = BufferPool(max_kept), Live()
    for step in steps:
        if step > 0:
            buffer = pool.take(step)
            assert buffer.numel() == step
            live.add(buffer)
        elif live.marked:
            keys = sorted(live.marked)
            pool.give(live.marked.pop(keys[step % len(keys)])[0])
        live.check()
    kept = [b for free in pool._free.values() for b in free]
    assert all(len(free) <= max_kept for free in pool._free.values())
    pointers = [b.data_ptr() for b in kept] + [b.data_ptr() for b, _ in live.marked.values()]
    assert len(pointers) == len(set(pointers))


def test_the_pool_uses_buffers_again():
    pool = BufferPool()
    first = pool.take(1 << 20)
    pool.give(first)
    assert pool.take(1 << 20).data_ptr() == first.data_ptr()
    assert pool.take(1 << 20).data_ptr() != first.data_ptr()


store_steps = st.lists(
    st.tuples(st.sampled_from(["take", "put", "give back", "free"]), st.integers(0, 1), st.integers(0, 20)), max_size=60
)


@settings(deadline=None)
@given(store_steps, st.sampled_from(["float32", "bfloat16", "int8"]))
def test_the_store_keeps_live_contributions_apart_and_within_its_limit(steps, wire):
    from diloco_cli.wire.codecs import encoded_bytes

    made = layout()
    cfg = CONFIGS[wire]
    store, receiving, held = PayloadStore(cfg, made), Live(), {}
    owners: dict[int, tuple[str, int]] = {}
    in_use = {"island-0": 0, "island-1": 0}
    for step, fragment, number in steps:
        owner = f"island-{number % 2}"
        keys = sorted(receiving.marked)
        if step == "take" and in_use[owner] < store._limit:
            size = encoded_bytes(made.fragments[fragment].numel, wire)
            key = receiving.add(store.take_buffer(owner, size))
            owners[key] = (owner, fragment)
            in_use[owner] += 1
        elif step == "put" and keys:
            key = keys[number % len(keys)]
            buffer, _ = receiving.marked.pop(key)
            handle, _problem = store.put(owners[key][0], buffer, owners[key][1])
            assert handle not in held
            held[handle] = (owners[key][0], store._held[handle].values, store._held[handle].values.clone())
        elif step == "give back" and keys:
            key = keys[number % len(keys)]
            store.give_back(owners[key][0], receiving.marked.pop(key)[0])
            in_use[owners[key][0]] -= 1
        elif step == "free" and held:
            handle = sorted(held)[number % len(held)]
            store.free(handle)
            in_use[held.pop(handle)[0]] -= 1
        receiving.check()
        for _, values, copy in held.values():
            assert torch.equal(values.view(torch.uint8), copy.view(torch.uint8)), "two live handles share memory"
    assert store.num_held == len(held)


CONFIGS = {wire: config(f"network.wire_up={wire}") for wire in ("float32", "bfloat16", "int8")}


@pytest.mark.parametrize(
    ("wire", "anchor", "needed"),
    [("float32", "base", True), ("float32", "global", False), ("int8", "base", False), ("int8", "global", True)],
)
def test_a_forgotten_version_matters_only_where_its_parameters_are_needed(wire, anchor, needed):
    """A contribution on a slow link may start from a version that its learner has replaced twice since."""
    model = GlobalModel(config(f"network.wire_up={wire}", f"outer.anchor={anchor}"))
    numel = model.layout.fragments[0].numel
    for version in (1, 2, 3):
        model.adopt(0, version, model._encoded(0))
    model.forget(0, set())
    assert model.knows(0, 0) is not needed
    if not needed:
        sent = Contribution(learner="island-0", fragment=0, base_version=0, tokens=1, steps=1, sent_at_step=1, handle=1)
        found = model.merge_input(sent, torch.zeros(numel), is_drift=wire == "int8")
        assert found.base is None


def test_the_store_makes_a_learner_wait_beyond_its_limit_and_no_other():
    store = PayloadStore(CONFIGS["float32"], layout())
    size = 4 * layout().fragments[0].numel
    mine = [store.take_buffer("island-0", size) for _ in range(store._limit)]
    store.take_buffer("island-1", size)
    more: queue.Queue[torch.Tensor] = queue.Queue()
    waiting = threading.Thread(target=lambda: more.put(store.take_buffer("island-0", size)))
    waiting.start()
    waiting.join(timeout=0.1)
    assert more.empty()
    store.give_back("island-0", mine.pop())
    assert more.get(timeout=WAIT_S).numel() == size
    waiting.join()
