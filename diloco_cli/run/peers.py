"""The syncer's connections: learners with their two channels, from Hello to the end.

Owns: who is connected, the checks at the door (version, layout, name), receivers and outboxes. Decides nothing of the
protocol: what comes in is handed to the actor. All methods run in the actor's thread unless they say otherwise.
Called by: run.syncer_main.

Theory: a learner is one *session*, a control and a bulk channel that say the same session under the same proved name.
Between the two it is *half open*: one session per name, without threads, for at most network.connect_timeout. Receivers
start when both are there, so nothing that a learner says is taken before it has passed all checks. From then on it
costs at most MAX_UNDELIVERED control messages, what the payload store allows, and what its outboxes hold.
Whatever breaks the protocol ends that session alone, with one line on the tape that says why.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco_cli import __version__
from diloco_cli.config.schema import Config
from diloco_cli.core.fragments import Layout, fingerprint, first_difference
from diloco_cli.run.buffers import view
from diloco_cli.run.channel import Channel
from diloco_cli.run.global_model import PayloadStore
from diloco_cli.run.links import LinkShaper
from diloco_cli.run.outbox import Outbox
from diloco_cli.run.secure import ChannelClosed
from diloco_cli.wire.codecs import encoded_bytes
from diloco_cli.wire.frames import ProtocolError
from diloco_cli.wire.messages import ContributionMsg, Hello, MergedMsg, Message, Reject, Returning

if TYPE_CHECKING:
    from diloco_cli.run.syncer_main import Syncer

# How often arriving bulk bytes are passed on as a sign of life.
ALIVE_INTERVAL_S = 0.5
# Control messages of one learner that wait for the actor; its receiver reads no more until some are taken.
MAX_UNDELIVERED = 256
# Rejected sessions and offences that are remembered, so that each is on the tape once.
MAX_REMEMBERED = 1024
MAX_TEXT = 300


@dataclass(slots=True)
class Peer:
    """One learner process, known by its session."""

    name: str
    session: str
    attempt: int = 0
    returns: bool = False
    """It has trained before in this session, and says where it stands before anything else (Returning)."""
    announced: bool = False
    """The actor knows of it: what it sends counts, and it is spoken to."""
    channels: dict[str, Channel] = field(default_factory=dict)
    outboxes: dict[str, Outbox] = field(default_factory=dict)
    deadline_s: float = 0.0
    """time.monotonic() until which both channels must be there."""
    goodbye: str = ""
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MAX_UNDELIVERED))


class Peers:
    """All learners' connections."""

    def __init__(self, cfg: Config, layout: Layout, store: PayloadStore, syncer: Syncer) -> None:
        self._cfg = cfg
        self._layout = layout
        self._fingerprint = fingerprint(layout)
        self._store = store
        self._syncer = syncer
        self._joined: dict[str, Peer] = {}
        self._half: OrderedDict[str, Peer] = OrderedDict()
        self._rejected: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._bytes_up_before: dict[str, int] = {}
        self._cut_off_until_s: dict[str, float] = {}
        self.shapers: dict[str, LinkShaper] = {}

    def names(self) -> list[str]:
        """Learners that have joined and are connected, sorted."""
        return sorted(self._joined)

    def announced(self) -> list[str]:
        """Of these, the ones that the core knows of, sorted."""
        return sorted(name for name, peer in self._joined.items() if peer.announced)

    # ---- the door ----------------------------------------------------------------------------------

    def connected(self, channel: Channel, hello: Hello) -> None:
        """A channel has proved its name and said Hello."""
        if time.monotonic() < self._cut_off_until_s.get(channel.peer, 0.0):
            channel.close("its link is cut on purpose")
            return
        reason = self._objection(channel, hello)
        if reason:
            self._reject(channel, hello, reason)
            return
        peer = self._half.get(channel.peer)
        if peer is None or (peer.session, peer.attempt) != (hello.session, hello.attempt):
            if peer is not None:
                self._drop_half(peer, "replaced by a newer connection")
            deadline_s = time.monotonic() + self._cfg.network.connect_timeout_s
            peer = Peer(channel.peer, hello.session, hello.attempt, hello.returns, deadline_s=deadline_s)
            self._half[channel.peer] = peer
        peer.channels[hello.kind] = channel
        if len(peer.channels) == 2:
            del self._half[channel.peer]
            self._join(peer)

    def _objection(self, channel: Channel, hello: Hello) -> str:
        """Why this connection may not take part; empty if it may."""
        if channel.peer not in self._syncer.core.chips:
            return f"this run has no island {channel.peer}"
        if hello.version != __version__:
            return f"diloco {hello.version[:40]} at the island, {__version__} at the syncer"
        if hello.layout_hash != self._layout.hash:
            differs = "the model's layout differs: "
            # The other connection of the same session may have told more than this one does.
            known = self._rejected.get((channel.peer, hello.session), "")
            return known if known.startswith(differs) else differs + self._difference(hello)
        if self._syncer.core.is_expelled(hello.session):
            return "it was taken out for bad contributions; another process of this island may come"
        other = self._joined.get(channel.peer)
        same = other is not None and other.session == hello.session
        if same and other is not None and hello.attempt <= other.attempt:
            return "a third connection of the same session"
        if other is not None and not same and self._is_fresh(other):
            return f"{channel.peer} is connected already, from {other.channels['control'].address}"
        half = self._half.get(channel.peer)
        told = half is not None and (half.session, half.attempt) == (hello.session, hello.attempt)
        if told and half is not None and hello.kind in half.channels:
            return f"a second {hello.kind} connection of the same session"
        return ""

    def _difference(self, hello: Hello) -> str:
        """The first difference of two layouts. What the learner says of its own may be any JSON."""
        try:
            where = first_difference(self._fingerprint, hello.layout) if hello.layout else ""
        except (KeyError, IndexError, TypeError, ValueError, RecursionError):
            where = ""
        return where or "the hashes are not the same"

    def _is_fresh(self, peer: Peer) -> bool:
        """Whether it was heard of within two heartbeats, on any channel."""
        newest_s = max(c.last_received_s for c in peer.channels.values())
        return time.monotonic() - newest_s < 2 * self._cfg.sync.heartbeat_interval_s

    def _reject(self, channel: Channel, hello: Hello, reason: str) -> None:
        reason = printable(reason)
        if self._rejected.get((channel.peer, hello.session)) != reason:
            self._record_rejected(channel, hello.session, reason)

        def say() -> None:
            try:
                channel.send(Reject(reason=reason))
                channel.flush(2.0)
            except ChannelClosed:
                pass
            channel.close(reason)

        threading.Thread(target=say, name="reject", daemon=True).start()

    def _record_rejected(self, channel: Channel, session: str, reason: str) -> None:
        """On the tape once for each learner and reason, however often it is tried."""
        said_before = any(name == channel.peer and said == reason for (name, _), said in self._rejected.items())
        self._rejected[(channel.peer, session)] = reason
        if len(self._rejected) > MAX_REMEMBERED:
            self._rejected.popitem(last=False)
        if not said_before:
            self._syncer.record("rejected", {"learner": channel.peer, "address": channel.address, "reason": reason})

    def _join(self, peer: Peer) -> None:
        if peer.name in self._joined:
            self._drop(self._joined[peer.name], "replaced by a newer connection")
        self._joined[peer.name] = peer
        for kind, channel in peer.channels.items():
            peer.outboxes[kind] = Outbox(channel)
            target = self._receive_control if kind == "control" else self._receive_bulk
            threading.Thread(target=target, args=(peer, channel), name=f"{kind}-{peer.name}", daemon=True).start()
        if not peer.returns:
            peer.announced = True
            self._syncer.on_joined(peer)

    @property
    def due_s(self) -> float:
        """When drop_overdue() must be called next (time.monotonic())."""
        return next(iter(self._half.values())).deadline_s if self._half else float("inf")

    def drop_overdue(self, now_s: float) -> None:
        """Close connections whose other half did not come in time."""
        for peer in list(self._half.values()):
            if peer.deadline_s > now_s:
                return
            missing = "control" if "bulk" in peer.channels else "bulk"
            reason = f"no {missing} connection within {self._cfg.network.connect_timeout_s:g} s"
            self._record_rejected(next(iter(peer.channels.values())), peer.session, reason)
            self._drop_half(peer, reason)

    def _drop_half(self, peer: Peer, reason: str) -> None:
        del self._half[peer.name]
        for channel in peer.channels.values():
            channel.close(reason)

    def cut_off(self, name: str, until_s: float) -> None:
        """A failure on purpose: no new connection of this island passes until then."""
        self._cut_off_until_s[name] = until_s

    @property
    def bytes_up_before(self) -> dict[str, int]:
        """Bytes received from each island over connections that are over."""
        return self._bytes_up_before

    # ---- sending -----------------------------------------------------------------------------------

    def tell(self, name: str, message: Message) -> None:
        """Queue a control message; nothing happens if the learner is gone."""
        if (peer := self._joined.get(name)) and peer.announced:
            peer.outboxes["control"].put(message)

    def send_fragment(self, name: str, message: MergedMsg, payload: memoryview) -> None:
        """Queue a merged fragment; an older version that still waits in the queue is replaced."""
        if (peer := self._joined.get(name)) and peer.announced:
            peer.outboxes["bulk"].put(message, payload, key=message.fragment)

    # ---- the end of a connection -------------------------------------------------------------------

    def disconnect(self, name: str, reason: str) -> None:
        """Close a learner's connections, and tell the actor that it left."""
        if peer := self._joined.get(name):
            self._drop(peer, reason)
            self._syncer.on_left(name, reason)

    def forget(self, name: str) -> None:
        """Close a learner's connections, which its process's end has closed or will."""
        if peer := self._joined.get(name):
            self._drop(peer, "its process ended")

    def close(self) -> None:
        """Close everything, after what is queued has been sent or a moment has passed."""
        for peer in list(self._joined.values()):
            peer.outboxes["control"].close(flush_s=0.5)
            self._drop(peer, "the run is over")
        for peer in list(self._half.values()):
            self._drop_half(peer, "the run is over")

    def _drop(self, peer: Peer, reason: str) -> None:
        self._joined.pop(peer.name, None)
        for channel in peer.channels.values():
            up = self._bytes_up_before
            up[peer.name] = up.get(peer.name, 0) + channel.bytes_received
            channel.close(reason)
        for outbox in peer.outboxes.values():
            outbox.close()

    def _lost(self, peer: Peer, reason: str) -> None:
        """A receiver found its channel closed."""
        if self._joined.get(peer.name) is peer:
            self._drop(peer, reason)
            if peer.announced:
                self._syncer.on_left(peer.name, printable(peer.goodbye or reason))

    def bytes_by_island(self) -> dict[str, dict[str, int]]:
        """Encrypted bytes up and down of every island, over all its connections."""
        result = {}
        for name in sorted({*self._syncer.core.chips, *self._bytes_up_before}):
            peer = self._joined.get(name)
            now_up = sum(c.bytes_received for c in peer.channels.values()) if peer else 0
            shaper = self.shapers.get(name)
            result[name] = {
                "up": self._bytes_up_before.get(name, 0) + now_up,
                "down": shaper.bytes_sent if shaper else 0,
            }
        return result

    # ---- receivers (threads of their own) ------------------------------------------------------------

    def _receive_control(self, peer: Peer, channel: Channel) -> None:
        def refuse(message: Message, num_bytes: int) -> memoryview | None:
            raise ProtocolError(f"{type(message).__name__} with {num_bytes} bytes on the control connection")

        try:
            while True:
                message, _ = channel.receive(refuse)
                self._hand_over(peer, channel, message)
        except (ChannelClosed, ProtocolError) as error:
            reason = str(error)
            self._syncer.post(lambda: self._lost(peer, reason))

    def _hand_over(self, peer: Peer, channel: Channel, message: Message) -> None:
        """Give the actor a control message, waiting while too many of this learner's lie there."""
        while not peer.room.acquire(timeout=1.0):
            if channel.closed:
                raise ChannelClosed("closed while its messages waited")
        self._syncer.post(lambda: self._deliver(peer, message))

    def _deliver(self, peer: Peer, message: Message) -> None:
        peer.room.release()
        if self._joined.get(peer.name) is not peer:
            return
        if not peer.announced:
            if not isinstance(message, Returning):
                return  # it was sent before we knew where it stands
            peer.announced = True
        self._syncer.on_message(peer, message)

    def _receive_bulk(self, peer: Peer, channel: Channel) -> None:
        torch.set_num_threads(1)  # this thread's own: receivers of many learners must not each take all cores
        receiver = _BulkReceiver(self, peer, channel)
        try:
            while True:
                receiver.receive_one()
        except (ChannelClosed, ProtocolError) as error:
            reason = str(error)
            receiver.abandon()
            self._syncer.post(lambda: self._lost(peer, reason))

    def check_contribution(self, message: Message, num_bytes: int) -> ContributionMsg:
        """Refuse, before any byte of it is taken, what can not be a contribution of this run. Any thread."""
        if not isinstance(message, ContributionMsg) or message.fragment >= len(self._layout):
            raise ProtocolError(f"unexpected {type(message).__name__}")
        numel = self._layout.fragments[message.fragment].numel
        wire = self._cfg.network.wire_up.value
        if (message.wire, message.numel, message.num_parts) != (wire, numel, 1):
            raise ProtocolError(f"fragment {message.fragment} as {message.numel} x {message.wire[:20]}")
        if num_bytes != encoded_bytes(numel, wire):
            raise ProtocolError(f"fragment {message.fragment} in {num_bytes} bytes")
        return message

    def take_buffer(self, peer: Peer, num_bytes: int) -> Tensor:
        """Memory for a payload. Any thread."""
        return self._store.take_buffer(peer.name, num_bytes)

    def give_back(self, peer: Peer, buffer: Tensor) -> None:
        """A payload that did not arrive whole. Any thread."""
        self._store.give_back(peer.name, buffer)

    def contribution_arrived(self, peer: Peer, message: ContributionMsg, buffer: Tensor) -> None:
        """Look at the values here, in the receiver's thread, then hand the contribution to the actor."""
        handle, problem = self._store.put(peer.name, buffer, message.fragment)

        def deliver() -> None:
            if self._joined.get(peer.name) is peer and peer.announced:
                self._syncer.on_contribution(peer.name, message, handle, problem)
            else:
                # A later session of the same learner must not answer for it.
                self._store.free(handle)

        self._syncer.post(deliver)

    def alive(self, peer: Peer) -> None:
        """Bulk bytes are arriving. Any thread."""
        self._syncer.post(lambda: self._syncer.on_alive(peer.name))


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """What a peer says, as it may stand in a log or on a screen: short, on one line, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


class _BulkReceiver:
    """Takes contributions off one bulk channel, each straight into its buffer."""

    def __init__(self, peers: Peers, peer: Peer, channel: Channel) -> None:
        self._peers = peers
        self._peer = peer
        self._channel = channel
        self._buffer: Tensor | None = None
        self._alive_s = 0.0

    def receive_one(self) -> None:
        message, _ = self._channel.receive(self._allocate, self._progress)
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise ProtocolError(f"unexpected {type(message).__name__} on the bulk connection")
        assert isinstance(message, ContributionMsg)
        self._peers.contribution_arrived(self._peer, message, buffer)

    def abandon(self) -> None:
        """The connection ended within a payload."""
        if self._buffer is not None:
            self._peers.give_back(self._peer, self._buffer)
            self._buffer = None

    def _allocate(self, message: Message, num_bytes: int) -> memoryview:
        self._peers.check_contribution(message, num_bytes)
        self._buffer = self._peers.take_buffer(self._peer, num_bytes)
        return view(self._buffer)

    def _progress(self, _num_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._alive_s > ALIVE_INTERVAL_S:
            self._alive_s = now_s
            self._peers.alive(self._peer)
