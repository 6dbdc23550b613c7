"""The real syncer's door and its learners' manners: whatever one client does, the others go on merging.

One run for most of these tests: that it is still merging at the end, with finite parameters, is part of each.
"""

from __future__ import annotations

import pickle
import re
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from door_runs import Client, GoodLearner, SyncerRun, disconnected
from net_helpers import WAIT_S, wait_until

from diloco_cli.core.fragments import fingerprint
from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.run import credentials
from diloco_cli.run.peers import MAX_UNDELIVERED
from diloco_cli.run.secure import ChannelClosed
from diloco_cli.run.settings import KEPT_VERSIONS
from diloco_cli.wire.frames import encode_frame
from diloco_cli.wire.messages import (
    EvaluateMsg,
    Goodbye,
    Heartbeat,
    Hello,
    Installed,
    MergedMsg,
    PullMsg,
    Reject,
    Report,
    Validation,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[SyncerRun]:
    run = SyncerRun(tmp_path_factory.mktemp("door") / "run")
    learners = [GoodLearner(run, name) for name in ("island-0", "island-1")]
    for name in ("island-2", "island-3"):  # the run starts when all have been there
        with Client(run, name) as client:
            client.join()
        run.has_exited(name)
    run.goes_on_merging()
    yield run
    run.close()
    for learner in learners:
        learner.join(timeout=WAIT_S)
        assert learner.error is None
    assert run.error is None
    assert run.seen("finish")[0]["status"] == "stopped"
    assert all(torch.isfinite(t).all() for t in run.syncer.model.tensors().values())
    assert run.syncer.store.num_held <= 2 * run.syncer.store._limit


@pytest.fixture
def run(shared: SyncerRun) -> Iterator[SyncerRun]:
    assert shared.error is None
    yield shared
    for name in ("island-2", "island-3"):
        wait_until(lambda name=name: name not in shared.syncer.peers.names())
    shared.goes_on_merging(1)
    joined = [e["learner"] for e in shared.seen("join") if e["learner"] in ("island-0", "island-1")]
    assert sorted(joined) == ["island-0", "island-1"], "the good learners never had to come back"


def once(run: SyncerRun, event: str, since: int, pattern: str) -> dict:
    """The one event of its kind since then; its reason matches."""
    run.wait_for(event, since)
    run.goes_on_merging(1)
    [found] = run.seen(event, since)
    assert re.search(pattern, found["reason"]), found
    return found


# ---- at the door


def test_an_island_of_another_runs_authority(run, tmp_path):
    since = run.now()
    credentials.make_authority(tmp_path / "keys")
    own = credentials.issue(tmp_path / "keys", "island-0").own
    stranger = credentials.Credentials("island-0", own, run.run.keys / "ca.pem")
    for _ in range(3):
        client = Client(run, "island-0", keys=stranger)
        with suppress(EnvironmentNotReady):
            client.dial("control")
        client.close()
    found = once(run, "refused_connection", since, "TLS handshake failed")
    assert found["address"].startswith("127.0.0.1:")
    assert not run.seen("join", since)


def test_a_certificate_of_one_island_that_says_it_is_another(run):
    since = run.now()
    with Client(run, "island-0", keys=credentials.load(run.run.keys, "island-1")) as client:
        client.dial("control")
        wait_until(disconnected(client))
    once(run, "refused_connection", since, "says it is 'island-0', but its certificate is of 'island-1'")


def rejected(run: SyncerRun, client: Client, pattern: str) -> str:
    """Both connections are told why, and the tape has it once, however often it is tried."""
    since = run.now()
    for _ in range(2):
        for kind in ("control", "bulk"):
            client.dial(kind)
        reasons = {client.hears(Reject).reason for _ in range(2)}
        wait_until(disconnected(client))
        client.close()
        client.ended.clear()
        assert len(reasons) == 1
    found = once(run, "rejected", since, pattern)
    assert found["learner"] == client.name
    assert {found["reason"]} == reasons
    assert not run.seen("join", since)
    return found["reason"]


def test_an_island_that_the_run_does_not_have(run):
    rejected(run, Client(run, "island-9"), "this run has no island island-9")


def test_another_version(run):
    rejected(run, Client(run, "island-2", version="99.0\x1b[2J\n" + "x" * 5000), "diloco 99.0.*at the island")
    assert all(e["reason"].isprintable() and len(e["reason"]) < 400 for e in run.seen("rejected"))


def test_another_layout_is_named_by_its_first_difference(run):
    theirs = fingerprint(run.layout)
    name, shape, _ = theirs["tensors"][1]
    theirs["tensors"][1] = [name, [7, *shape[1:]], theirs["tensors"][1][2]]
    reason = rejected(run, Client(run, "island-2", session="layout", layout=theirs, layout_hash="other"), "layout")
    assert name in reason
    assert str(tuple(shape)) in reason
    assert str((7, *shape[1:])) in reason


@pytest.mark.parametrize(
    "layout",
    [{"tensors": 5}, {"tensors": [[]], "fragments": 1}, {"x": 1}, {"tensors": [["a\x1b", "b", {}]], "fragments": []}],
)
def test_a_layout_that_is_none_is_rejected_and_stops_nothing(run, layout):
    with Client(run, "island-2", session=str(layout), layout=layout, layout_hash="garbage") as client:
        client.dial("control")
        assert "layout differs" in client.hears(Reject).reason
        wait_until(disconnected(client))


def test_a_name_in_use(run):
    since = run.now()
    with Client(run, "island-0") as client:
        client.dial("control")
        assert "island-0 is connected already, from 127.0.0.1:" in client.hears(Reject).reason
        wait_until(disconnected(client))
    once(run, "rejected", since, "connected already")
    assert not run.seen("leave", since)


def test_control_without_bulk_is_dropped_in_time(run):
    since = run.now()
    with Client(run, "island-2", session="half") as client:
        client.dial("control")
        wait_until(disconnected(client))
    once(run, "rejected", since, "no bulk connection within 2 s")
    assert not run.seen("join", since)


def test_a_session_belongs_to_its_name(run):
    """The other half of island-2's session can not come from island-3."""
    since = run.now()
    with Client(run, "island-2", session="same") as one, Client(run, "island-3", session="same") as other:
        one.dial("control")
        other.dial("bulk")
        run.goes_on_merging()
        assert not run.seen("join", since)
        one.dial("bulk")
        assert run.wait_for("join", since)["learner"] == "island-2"
        other.dial("control")
        run.wait_for("join", since, learner="island-3")
        with Client(run, "island-2", session="same") as third:
            third.dial("control")
            assert "third connection" in third.hears(Reject).reason
        assert len(run.seen("join", since)) == 2


def test_a_half_open_session_makes_way_for_a_newer_one(run):
    """A learner process that died between its two connections, and its successor."""
    since = run.now()
    with Client(run, "island-2", session="old") as old, Client(run, "island-2", session="new") as new:
        old.dial("control")
        wait_until(lambda: "island-2" in run.syncer.peers._half)
        new.join()
        wait_until(disconnected(old))
        assert len(run.seen("join", since)) == 1
        assert not run.syncer.peers._half


def test_a_thousand_idle_connections(run):
    since = run.now()
    enough = resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2500
    idle = [socket.create_connection(run.address) for _ in range(1000 if enough else 200)]
    with Client(run, "island-2", session="behind them") as client:
        client.join()
    run.wait_for("leave", since, learner="island-2")
    assert run.syncer.listener.num_pending <= 64
    assert len(run.seen("refused_connection", since)) <= 3
    for sock in idle:
        sock.close()


def test_the_door_takes_a_megabyte_of_anything(run):
    with socket.create_connection(run.address) as sock, suppress(OSError):
        sock.sendall(bytes(range(256)) * 4096)
        while sock.recv(65536):
            pass


# ---- members that break the protocol: that session ends, with one line that says why


def send_raw(client: Client, kind: str, data: bytes) -> None:
    """Bytes inside TLS, past all rules of our own side."""
    channel = client.channels[kind]
    with suppress(OSError, ChannelClosed):
        channel._sock.sendall(channel._tls.encrypt(data))


def announced(num_bytes: int, message_type: int = 13) -> bytes:
    return struct.pack(">4sBBHIQI", b"DLCO", 1, message_type, 0, 2, num_bytes, 0) + b"{}"


def contribute(**fields) -> Callable[[Client], None]:
    return lambda client: client.channels["bulk"].send(client.contribution(**fields), client.payload())


OFFENCES: dict[str, tuple[Callable[[Client], None], str]] = {
    "numel": (contribute(numel=7), "fragment 0 as 7 x float32"),
    "wire": (contribute(wire="bfloat16"), "x bfloat16"),
    "part": (contribute(part=0, num_parts=2), "fragment 0 as"),
    "unknown fragment": (contribute(fragment=1000), "unexpected ContributionMsg"),
    "length": (
        lambda c: c.channels["bulk"].send(c.contribution(), c.payload()[:-4]),
        r"fragment 0 in \d+ bytes",
    ),
    "10**15 bytes": (lambda c: send_raw(c, "bulk", announced(10**15)), "payload of 1000000000000000 bytes"),
    "10**12 bytes": (
        lambda c: send_raw(c, "bulk", encode_frame(13, {}, 10**12)),
        "unknown or missing field",
    ),
    "no contribution": (
        lambda c: c.channels["bulk"].send(
            MergedMsg(fragment=0, version=1, wire="float32", numel=2, taken=False, global_step=0), bytes(8)
        ),
        "unexpected MergedMsg",
    ),
    "control on bulk": (lambda c: c.channels["bulk"].send(Heartbeat()), "unexpected Heartbeat on the bulk"),
    "bulk on control": (
        lambda c: c.channels["control"].send(c.contribution(), c.payload()),
        "ContributionMsg with .* bytes on the control",
    ),
    "version to come installed": (
        lambda c: c.channels["control"].send(
            Installed(fragment=0, version=10**9, tokens=1, steps=1, step=1, waited_s=0.0)
        ),
        "installed something that does not exist",
    ),
    "fragment installed that is none": (
        lambda c: c.channels["control"].send(
            Installed(fragment=10**9, version=0, tokens=1, steps=1, step=1, waited_s=0.0)
        ),
        "installed something that does not exist",
    ),
    "the syncer's own message": (lambda c: c.channels["control"].send(PullMsg(fragment=0)), "unexpected PullMsg"),
    "evaluate": (lambda c: c.channels["control"].send(EvaluateMsg()), "unexpected EvaluateMsg"),
    "a second hello": (
        lambda c: c.channels["control"].send(Hello(kind="control", **c.hello)),
        "unexpected Hello",
    ),
    "no frame": (lambda c: send_raw(c, "control", bytes(range(256))), "not a diloco frame"),
    "pickle": (lambda c: send_raw(c, "control", pickle.dumps({"a": 1}) * 20), "not a diloco frame"),
    "no json": (
        lambda c: send_raw(c, "control", struct.pack(">4sBBHIQI", b"DLCO", 1, 4, 0, 4, 0, 0xDEBB20E3) + b"\xff{}!"),
        "header does not match|not JSON",
    ),
    "unknown type": (lambda c: send_raw(c, "control", encode_frame(99, {})), "unknown message type 99"),
    "mistyped": (
        lambda c: send_raw(c, "control", encode_frame(7, {"reason": {"deep": [1]}})),
        "Goodbye.reason",
    ),
    "negative": (
        lambda c: send_raw(c, "control", encode_frame(8, {"fragment": -1})),
        "PullMsg.fragment",
    ),
}


@pytest.mark.parametrize("offence", OFFENCES)
def test_an_offence_ends_that_session_alone(run, offence):
    act, pattern = OFFENCES[offence]
    since = run.now()
    with Client(run, "island-2", session=offence) as client:
        client.join()
        with suppress(ChannelClosed):
            act(client)
        wait_until(disconnected(client))
    found = once(run, "leave", since, pattern)
    assert found["learner"] == "island-2"
    assert not run.seen("contribution", since, learner="island-2")


@pytest.mark.parametrize(
    ("value", "fields", "pattern"),
    [
        (float("nan"), {}, "it contains NaN"),
        (float("inf"), {}, "it contains infinity"),
        (float("-inf"), {}, "it contains infinity"),
        (0.0, {"base_version": 10**9}, "it starts from version 1000000000, the newest is"),
        (0.0, {"base_version": 0}, "it starts from version 0, which is no longer known"),
    ],
    ids=["nan", "inf", "-inf", "version to come", "version long gone"],
)
def test_a_contribution_that_may_not_be_merged_is_refused_and_the_learner_stays(run, value, fields, pattern):
    wait_until(lambda: min(run.syncer.core.versions) > KEPT_VERSIONS)
    since = run.now()
    with Client(run, "island-2", session=pattern) as client:
        client.join()
        client.channels["bulk"].send(client.contribution(**fields), client.payload(value))
        found = once(run, "refused", since, pattern)
        assert (found["learner"], found["fragment"]) == ("island-2", 0)
        assert not run.seen("leave", since)
        assert run.held_by("island-2") == 0
    run.wait_for("leave", since, learner="island-2")


def test_what_a_learner_says_is_kept_short_and_printable(run):
    since = run.now()
    with Client(run, "island-2", session="goodbye") as client:
        client.join()
        client.channels["control"].send(Goodbye(reason="\x1b[31mred\n" + "x" * 10_000))
        # When this is on the tape the goodbye was taken, too; the end of bulk must not overtake it here.
        client.channels["control"].send(Validation(step=1, loss=1.0, bigram=None, tokens=1, final=False))
        run.wait_for("evaluation", since, learner="island-2")
    reason = run.wait_for("leave", since, learner="island-2")["reason"]
    assert reason.startswith("?[31mred?xx")
    assert len(reason) == 300


def test_a_validation_that_nobody_asked_for_is_not_the_runs_result(run):
    since = run.now()
    with Client(run, "island-2", session="validation") as client:
        client.join()
        client.channels["control"].send(Validation(step=1, loss=0.0, bigram=None, tokens=1, final=True))
        run.wait_for("evaluation", since, learner="island-2")
    assert run.syncer._validation is None
    run.wait_for("leave", since, learner="island-2")


# ---- members that cost too much


class Stopped:
    """Holds the syncer's actor, so that what the receivers may pile up can be counted without a race."""

    def __init__(self, run: SyncerRun) -> None:
        self._run = run
        self._go = threading.Event()
        self._held = threading.Event()

    def __enter__(self) -> Stopped:
        self._run.syncer.post(lambda: (self._held.set(), self._go.wait(WAIT_S)))
        assert self._held.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()


def test_a_flood_of_contributions_that_nobody_asked_for(run):
    since = run.now()
    limit = run.syncer.store._limit
    most = 0

    def flood(client: Client) -> None:
        with suppress(ChannelClosed):
            for number in range(800):
                client.channels["bulk"].send(client.contribution(number % 3), client.payload(0.0, number % 3))

    with Client(run, "island-2", session="flood") as client:
        client.join()
        with Stopped(run):
            sender = threading.Thread(target=flood, args=(client,))
            sender.start()
            wait_until(lambda: run.held_by("island-2") == limit)
            received = run.syncer.peers._joined["island-2"].channels["bulk"].bytes_received
        while sender.is_alive():
            most = max(most, run.held_by("island-2"))
            sender.join(timeout=0.002)
        run.goes_on_merging()
    assert most <= limit
    assert received < (limit + 2) * max(4 * f.numel + 1000 for f in run.layout.fragments)
    run.wait_for("leave", since, learner="island-2")
    wait_until(lambda: run.held_by("island-2") == 0)


def test_a_flood_of_control_messages(run):
    since = run.now()
    report = Report(step=1, tokens=1, step_time_s=None, metrics={}, phases={f"phase-{i}": 1.0 for i in range(100)})

    def flood(client: Client) -> None:
        with suppress(ChannelClosed):
            for _ in range(3000):
                client.channels["control"].send(report)

    with Client(run, "island-2", session="reports") as client:
        client.join()
        peer = run.syncer.peers._joined["island-2"]
        with Stopped(run):
            before = run.syncer.mailbox.qsize()
            sender = threading.Thread(target=flood, args=(client,))
            sender.start()
            wait_until(lambda: peer.room._value == 0)
            # Those of the good learners come on top.
            assert run.syncer.mailbox.qsize() - before <= 3 * MAX_UNDELIVERED
        sender.join(timeout=WAIT_S)
        assert not sender.is_alive()
    run.wait_for("leave", since, learner="island-2")
    assert len(run.syncer._figures._phases["island-2"]) <= 32


def test_a_learner_that_does_not_read_costs_a_version_of_each_fragment(run):
    since = run.now()
    with Client(run, "island-2", session="deaf") as client:
        client.dial("control")
        client.dial("bulk", listen=False)
        client.channels["bulk"]._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        run.wait_for("join", since, learner="island-2")
        outbox = run.syncer.peers._joined["island-2"].outboxes["bulk"]
        outbox.channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        wait_until(lambda: outbox.waiting == len(run.layout), 30)
        for _ in range(5):
            run.goes_on_merging(3)
            assert outbox.waiting == len(run.layout)
            kept = [len(versions) for versions in list(run.syncer.model._payloads)]
            assert max(kept) <= KEPT_VERSIONS + 2
    run.wait_for("leave", since, learner="island-2")
