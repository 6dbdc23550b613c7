"""The syncer's connections: learners with their two channels, from Hello to the end.

Owns: who is connected, the checks at the door (version, layout, name), receivers and outboxes. Decides nothing of the
protocol: what comes in is handed to the actor. All methods run in the actor's thread unless they say otherwise.
Called by: run.syncer_main.
"""

from __future__ import annotations

import threading
import time
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
from diloco_cli.wire.messages import ContributionMsg, Hello, MergedMsg, Message, Reject

if TYPE_CHECKING:
    from diloco_cli.run.syncer_main import Syncer

# How often arriving bulk bytes are passed on as a sign of life.
ALIVE_INTERVAL_S = 0.5


@dataclass(slots=True)
class Peer:
    """One learner process, known by its session."""

    name: str
    session: str
    channels: dict[str, Channel] = field(default_factory=dict)
    outboxes: dict[str, Outbox] = field(default_factory=dict)
    joined: bool = False
    goodbye: str = ""


class Peers:
    """All learners' connections."""

    def __init__(self, cfg: Config, layout: Layout, store: PayloadStore, syncer: Syncer) -> None:
        self._cfg = cfg
        self._layout = layout
        self._fingerprint = fingerprint(layout)
        self._store = store
        self._syncer = syncer
        self._joined: dict[str, Peer] = {}
        self._half: dict[str, Peer] = {}
        self._bytes_up_before: dict[str, int] = {}
        self.shapers: dict[str, LinkShaper] = {}

    def names(self) -> list[str]:
        """Learners that have joined and are connected, sorted."""
        return sorted(self._joined)

    # ---- the door ----------------------------------------------------------------------------------

    def connected(self, channel: Channel, hello: Hello) -> None:
        """A channel has proved its name and said Hello."""
        reason = self._objection(channel, hello)
        if reason:
            self._reject(channel, hello, reason)
            return
        peer = self._half.setdefault(hello.session, Peer(channel.peer, hello.session))
        if hello.kind in peer.channels:
            self._reject(channel, hello, f"a second {hello.kind} connection of the same session")
            return
        peer.channels[hello.kind] = channel
        peer.outboxes[hello.kind] = Outbox(channel)
        target = self._receive_control if hello.kind == "control" else self._receive_bulk
        threading.Thread(target=target, args=(peer, channel), name=f"{hello.kind}-{peer.name}", daemon=True).start()
        if len(peer.channels) == 2:
            del self._half[hello.session]
            self._join(peer)

    def _objection(self, channel: Channel, hello: Hello) -> str:
        """Why this connection may not take part; empty if it may."""
        if channel.peer not in self._cfg.island_names():
            return f"this run has no island {channel.peer}"
        if hello.version != __version__:
            return f"diloco {hello.version} at the island, {__version__} at the syncer"
        if hello.layout_hash != self._layout.hash:
            where = first_difference(self._fingerprint, hello.layout) if hello.layout else ""
            return f"the model's layout differs: {where or 'the hashes are not the same'}"
        other = self._joined.get(channel.peer)
        if other is not None and other.session != hello.session and self._is_fresh(other):
            return f"{channel.peer} is connected already, from {other.channels['control'].address}"
        return ""

    def _is_fresh(self, peer: Peer) -> bool:
        """Whether it was heard of within two heartbeats, on any channel."""
        newest_s = max(c.last_received_s for c in peer.channels.values())
        return time.monotonic() - newest_s < 2 * self._cfg.sync.heartbeat_interval_s

    def _reject(self, channel: Channel, hello: Hello, reason: str) -> None:
        self._syncer.record("rejected", {"learner": hello.island, "address": channel.address, "reason": reason})

        def say() -> None:
            try:
                channel.send(Reject(reason=reason[:1000]))
                channel.flush(2.0)
            except ChannelClosed:
                pass
            channel.close(reason)

        threading.Thread(target=say, name="reject", daemon=True).start()

    def _join(self, peer: Peer) -> None:
        if peer.name in self._joined:
            self._drop(self._joined[peer.name], "replaced by a newer connection")
        peer.joined = True
        self._joined[peer.name] = peer
        self._syncer.on_joined(peer)

    # ---- sending -----------------------------------------------------------------------------------

    def tell(self, name: str, message: Message) -> None:
        """Queue a control message; nothing happens if the learner is gone."""
        if peer := self._joined.get(name):
            peer.outboxes["control"].put(message)

    def send_fragment(self, name: str, message: MergedMsg, payload: memoryview) -> None:
        """Queue a merged fragment; an older version that still waits in the queue is replaced."""
        if peer := self._joined.get(name):
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
            for channel in peer.channels.values():
                channel.close("the run is over")

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
        self._half.pop(peer.session, None)
        if self._joined.get(peer.name) is peer:
            self._drop(peer, reason)
            self._syncer.on_left(peer.name, peer.goodbye or reason)
        elif not peer.joined:
            for channel in peer.channels.values():
                channel.close(reason)

    def bytes_by_island(self) -> dict[str, dict[str, int]]:
        """Encrypted bytes up and down of every island, over all its connections."""
        result = {}
        for name in self._cfg.island_names():
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
                self._syncer.post(lambda m=message: self._deliver(peer, m))  # type: ignore[misc]
        except (ChannelClosed, ProtocolError) as error:
            reason = str(error)
            self._syncer.post(lambda: self._lost(peer, reason))

    def _deliver(self, peer: Peer, message: Message) -> None:
        if self._joined.get(peer.name) is peer:
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
        self._syncer.post(lambda: self._syncer.on_contribution(peer.name, message, handle, problem))

    def alive(self, peer: Peer) -> None:
        """Bulk bytes are arriving. Any thread."""
        self._syncer.post(lambda: self._syncer.on_alive(peer.name))


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
