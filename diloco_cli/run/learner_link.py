"""The learner's side of the wire, in background threads, so that training never waits for the network.

Owns: two channels to the syncer (control, bulk), encoding what goes out, decoding what comes in, heartbeats, and coming
back when the channels are lost. Must not: decide anything of the protocol (core.learner does).
Called by: run.learner_main and run.ranks on rank 0.

Threads: one receiver per channel, one outbox per channel, one encoder, one for heartbeats. What comes in waits in
`inbox`; nothing else is shared. A connection that ends arrives there as Lost, once; reconnect() then makes another one
in the background, which arrives as Connected. A learner that has trained before says Returning on it before anything
else, and sends contributions only when the syncer has answered.
Memory: per fragment at most one merged version in the inbox, one that is being received, and one contribution that
waits to be sent (in lock-step: that has no answer yet); buffers are used again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import queue
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco_cli import __version__
from diloco_cli.config.schema import Config
from diloco_cli.core import faults
from diloco_cli.core.fragments import Layout, fingerprint
from diloco_cli.core.types import SendFragment
from diloco_cli.errors import DilocoError, EnvironmentNotReady
from diloco_cli.run.buffers import BufferPool, view
from diloco_cli.run.channel import Channel
from diloco_cli.run.connecting import connect
from diloco_cli.run.credentials import Credentials
from diloco_cli.run.links import LinkFault, RateMeter, make_shaper
from diloco_cli.run.outbox import Outbox
from diloco_cli.run.secure import ChannelClosed
from diloco_cli.wire.codecs import DRIFT_WIRES, ErrorFeedback, decode, encode, encoded_bytes
from diloco_cli.wire.frames import MAX_HEADER_BYTES, ProtocolError
from diloco_cli.wire.messages import (
    ContributionMsg,
    EvaluateMsg,
    FaultMsg,
    FinishMsg,
    Goodbye,
    Hello,
    Installed,
    MergedMsg,
    Message,
    PullMsg,
    Reject,
    Report,
    Returning,
    SnapshotMsg,
    StopMsg,
    Validation,
    Welcome,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Merged:
    """A merged fragment that has arrived: float32 [numel] on the CPU; hand it back with link.release()."""

    message: MergedMsg
    values: Tensor
    arrived_s: float


@dataclass(slots=True)
class Lost:
    """The connection is over. ours: by a failure on this side, so that another one would not help."""

    reason: str
    ours: bool = False


@dataclass(slots=True)
class Connected:
    """There is a new connection, on which nothing was said yet."""


class Inbox:
    """What has come in and is not taken yet. Of a fragment only the newest version waits: a training loop that is busy
    for long, with an evaluation say, must not pile up models. Thread-safe; get() raises queue.Empty like a Queue's.
    """

    def __init__(self, release: Callable[[Merged], None]) -> None:
        self._release = release
        self._waiting: OrderedDict[object, Incoming] = OrderedDict()
        self._changed = threading.Condition()

    def put(self, message: Incoming) -> None:
        """Add a message; a merged fragment takes the place of an older version of it."""
        replaced: Incoming | None = None
        with self._changed:
            if isinstance(message, Merged):
                fragment = message.message.fragment
                replaced = self._waiting.get(fragment)
                if isinstance(replaced, Merged) and replaced.message.version >= message.message.version:
                    replaced = message
                else:
                    self._waiting[fragment] = message
            else:
                self._waiting[object()] = message
            self._changed.notify()
        if isinstance(replaced, Merged):
            self._release(replaced)

    def get(self, timeout: float) -> Incoming:
        """The oldest message, waiting up to `timeout` seconds for one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout):
                raise queue.Empty
            return self._waiting.popitem(last=False)[1]

    def get_nowait(self) -> Incoming:
        """The oldest message, if there is one."""
        return self.get(0.0)


Incoming = (
    Merged | Lost | Connected | Welcome | PullMsg | FinishMsg | EvaluateMsg | StopMsg | Reject | SnapshotMsg | FaultMsg
)
_TO_INBOX = Welcome | PullMsg | FinishMsg | EvaluateMsg | StopMsg | Reject | SnapshotMsg | FaultMsg
# Between two attempts to reach a syncer that is away.
RETRY_S, MAX_RETRY_S = 0.1, 2.0
RECONNECT_TIMEOUT_S = 5.0


class _Connection:
    """Two channels to the syncer with the threads that serve them, from Hello to whatever ends them.

    talks: something may be said on it; contributes: contributions may be sent.
    """

    def __init__(self, link: SyncerLink, hello: Callable[[str], Hello], timeout_s: float) -> None:
        self._link = link
        self.lost_because = ""
        self.talks = self.contributes = not hello("control").returns
        self.control = connect(link.address, link.credentials, link.shaper, hello("control"), timeout_s)
        try:
            self.bulk = connect(link.address, link.credentials, link.shaper, hello("bulk"), timeout_s)
        except BaseException:
            self.control.close()
            raise
        self.control_out = Outbox(self.control, on_error=self.lose)
        self.bulk_out = Outbox(self.bulk, on_error=self.lose)
        targets = (self._receive_control, self._receive_bulk)
        self.threads = [threading.Thread(target=t, name=t.__name__, daemon=True) for t in targets]
        for thread in self.threads:
            thread.start()

    @property
    def bytes_received(self) -> int:
        """Bytes on the wire, of both channels."""
        return self.control.bytes_received + self.bulk.bytes_received

    def lose(self, reason: str, *, ours: bool = False) -> None:
        """It is over, whatever the reason. From any thread; only the first time counts."""
        self._link.connection_lost(self, reason, ours=ours)

    def cut_off(self, reason: str) -> None:
        """Close both channels without waiting for anything."""
        self.control.close(reason)
        self.bulk.close(reason)

    def close(self, reason: str) -> None:
        """End all threads."""
        self.bulk_out.close()
        self.control_out.close()
        self.cut_off(reason)
        for thread in self.threads:
            thread.join(timeout=5.0)

    def _receive_control(self) -> None:
        self._receive_loop(self.control, _no_payload)

    def _receive_bulk(self) -> None:
        torch.set_num_threads(1)  # this thread's own; decoding must not take the training's cores
        self._receive_loop(self.bulk, self._link.allocate)

    def _receive_loop(self, channel: Channel, allocate: Callable[[Message, int], memoryview | None]) -> None:
        try:
            while True:
                message, payload = channel.receive(allocate)
                arrived_s = time.monotonic()
                if isinstance(message, MergedMsg):
                    assert payload is not None
                    self._link.inbox.put(Merged(message, self._link.decoded(message, payload), arrived_s))
                elif isinstance(message, _TO_INBOX):
                    self._link.inbox.put(message)
        except (ChannelClosed, ProtocolError) as error:
            self.lose(str(error))
        except Exception as error:
            log.exception("receiving failed")
            self.lose(f"receiving failed: {type(error).__name__}: {error}", ours=True)


class SyncerLink:
    """Connects on construction; close() at the end.

    Args:
        session: of a learner that goes on from a snapshot, which then returns; None: a new one.
        keep_unanswered: lock-step: contributions are kept until their merge is installed, to be sent once more on
            another connection.

    Raises:
        LostConnection: no syncer there in time.
    """

    def __init__(
        self,
        cfg: Config,
        island: str,
        layout: Layout,
        address: tuple[str, int],
        credentials: Credentials,
        seed: int,
        *,
        session: str | None = None,
        keep_unanswered: bool = False,
    ) -> None:
        self._cfg = cfg
        self._island = island
        self._layout = layout
        self.address = address
        self.credentials = credentials
        self._wire_up = cfg.network.wire_up.value
        self._wire_down = cfg.network.wire_down.value
        self.session = session or uuid.uuid4().hex
        self.returns = session is not None
        """Whether the next connection is of a learner that has trained before."""
        self.inbox = Inbox(self.release)
        self._bytes = BufferPool()
        self._floats = BufferPool()
        self._feedback: dict[int, ErrorFeedback] = {}
        self._base: dict[int, Tensor] = {}
        self._keep_unanswered = keep_unanswered
        self._unanswered: dict[int, tuple[ContributionMsg, Tensor]] = {}
        self._poison_next = False
        self.shaper = make_shaper(cfg.link(island).up, seed)
        self._up_rate = RateMeter()
        self._down_rate = RateMeter()
        self._received_before = 0
        self._closing = False
        self._over: list[_Connection] = []
        """Connections that are lost, and whose threads are not waited for yet."""
        self._state = threading.Lock()
        self._attempt = 0
        self._last_report = Report(step=0, tokens=0, step_time_s=None, metrics={}, phases={})
        self._described: dict[str, Any] = fingerprint(layout)
        if len(json.dumps(self._described)) > MAX_HEADER_BYTES // 2:
            self._described = {}  # the hash still tells that they differ, if not where
        self._connection: _Connection | None = _Connection(self, self._hello(), cfg.network.connect_timeout_s)
        if self.returns:
            self.inbox.put(Connected())
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._heartbeat, name="_heartbeat", daemon=True)
        self._heart.start()
        self._reconnecting: threading.Thread | None = None

    @property
    def _threads(self) -> list[threading.Thread]:
        connection = self._connection
        more = [self._reconnecting] if self._reconnecting is not None else []
        return [*(connection.threads if connection is not None else []), self._heart, *more]

    def _hello(self) -> Callable[[str], Hello]:
        attempt, self._attempt, returns = self._attempt, self._attempt + 1, self.returns

        def hello(kind: str) -> Hello:
            return Hello(
                island=self._island,
                kind=kind,
                layout_hash=self._layout.hash,
                layout=self._described if kind == "control" else {},
                version=__version__,
                session=self.session,
                attempt=attempt,
                returns=returns,
                batch_tokens=self._cfg.batch_tokens(self._island),
            )

        return hello

    # ---- connections that end, and come back -------------------------------------------------------

    def connection_lost(self, connection: _Connection, reason: str, *, ours: bool = False) -> None:
        """Tell the training loop, once. From any thread."""
        with self._state:
            first, connection.lost_because = not connection.lost_because, reason or "lost"
            if self._closing or not first or connection is not self._connection:
                return
            self._connection = None
            self._over.append(connection)
            self._received_before += connection.bytes_received
        connection.cut_off(reason)
        self.inbox.put(Lost(reason, ours))

    def reconnect(self) -> None:
        """After Lost: reach for the syncer until it is there, in the background."""
        self._reconnecting = threading.Thread(target=self._reconnect, name="_reconnect", daemon=True)
        self._reconnecting.start()

    def _close_lost(self) -> None:
        while self._over:
            self._over.pop().close("lost")

    def _reconnect(self) -> None:
        self._close_lost()
        pause_s = RETRY_S
        while not self._stop.wait(pause_s):
            pause_s = min(2 * pause_s, MAX_RETRY_S)
            try:
                connection = _Connection(self, self._hello(), RECONNECT_TIMEOUT_S)
            except (DilocoError, OSError, ChannelClosed) as error:
                log.info("no connection to the syncer yet: %s", str(error).partition("\n")[0])
                continue
            with self._state:
                usable = not self._closing and not connection.lost_because
                if usable:
                    self._connection = connection
            if usable:
                self.inbox.put(Connected())
                return
            connection.close("the learner ends")

    def say_returning(self, message: Returning) -> None:
        """First thing on a new connection of a learner that has trained before."""
        if (connection := self._connection) is not None:
            connection.control_out.put(message)
            connection.talks = True

    def accepted(self) -> None:
        """The syncer knows where we stand: contributions may go; in lock-step those without answer go once more."""
        connection = self._connection
        if connection is None:
            return
        connection.talks = connection.contributes = True
        self._encode(self._send_unanswered)

    def forget_unanswered(self) -> None:
        """We were let in anew: nobody waits for what was sent before."""
        self._encode(self._unanswered.clear)

    def _send_unanswered(self) -> None:
        for fragment, (message, payload) in sorted(self._unanswered.items()):
            self._put_bulk(fragment, message, payload, lambda: None)

    def apply_fault(self, fault: FaultMsg) -> None:
        """A failure on purpose, on this side of the link."""
        if fault.kind == faults.CORRUPT:
            self._poison_next = fault.payload == "nan"
            if fault.payload == "bytes" and (connection := self._connection) is not None:
                connection.bulk.spoil_next()
            return
        self.shaper.set_fault(
            LinkFault(
                until_s=time.monotonic() + fault.duration_s,
                cut=fault.kind == faults.PARTITION,
                rate_bps=fault.rate_bps,
                latency_s=fault.latency_s,
                loss=fault.loss,
            )
        )

    # ---- snapshots -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next connection of this session needs: residuals, bases, contributions without answer. Copies."""
        return self._encoder.submit(
            lambda: {
                "session": self.session,
                "feedback": {f: feedback.residual.clone() for f, feedback in self._feedback.items()},
                "base": {f: base.clone() for f, base in self._base.items()},
                "unanswered": {
                    f: {"message": dataclasses.asdict(message), "payload": payload.clone()}
                    for f, (message, payload) in self._unanswered.items()
                },
            }
        ).result()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse, before anything was sent."""
        for f, residual in state["feedback"].items():
            self._feedback[f] = ErrorFeedback(residual.numel())
            self._feedback[f].residual.copy_(residual)
        self._base = dict(state["base"])
        if self._keep_unanswered:
            for f, sent in state["unanswered"].items():
                self._unanswered[f] = (ContributionMsg(**sent["message"]), sent["payload"])

    # ---- what the training loop says ---------------------------------------------------------------

    def report(self, report: Report) -> None:
        """Progress, cheaply; an unsent older report is replaced by the newer one only if nothing is lost by it."""
        self._last_report = report
        self._say(report)

    def installed(self, message: Installed) -> None:
        """A merged fragment was installed."""
        if self._keep_unanswered:
            self._encode(self._answered, message.fragment)
        self._say(message)

    def _answered(self, fragment: int) -> None:
        self._unanswered.pop(fragment, None)

    def validation(self, message: Validation) -> None:
        """A validation loss."""
        self._say(message)

    def _say(self, message: Message) -> None:
        """On control, if there is somebody to hear it."""
        if (connection := self._connection) is not None and connection.talks:
            connection.control_out.put(message)

    def float_buffer(self, fragment: int) -> Tensor:
        """float32 [numel] on the CPU to gather a fragment into; send() takes it over."""
        return self._floats.take(4 * self._layout.fragments[fragment].numel).view(torch.float32)

    def send(self, effect: SendFragment, flat: Tensor) -> None:
        """Encode and send a contribution in the background. `flat` (from float_buffer) is ours from now on."""
        self._encode(self._encode_and_send, effect, flat)

    def remember_base(self, fragment: int, values: Tensor) -> None:
        """Keep what was installed: below bfloat16, drift is measured against it (algorithm.md, Wire types)."""
        if self._wire_up in DRIFT_WIRES:
            copied = values.clone()
            self._encode(self._base.__setitem__, fragment, copied)

    def release(self, merged: Merged) -> None:
        """Give an installed fragment's memory back."""
        self._floats.give(merged.values.view(torch.uint8))

    def link_rates(self, now_s: float) -> dict[str, float]:
        """link_up_bps and link_down_bps over the last second, where known."""
        connection = self._connection
        received = self._received_before + (connection.bytes_received if connection is not None else 0)
        rates = {
            "link_up_bps": self._up_rate.add(now_s, self.shaper.bytes_sent),
            "link_down_bps": self._down_rate.add(now_s, received),
        }
        return {name: rate for name, rate in rates.items() if rate is not None}

    def close(self, reason: str) -> None:
        """Say goodbye, flush for a moment, and end all threads. Idempotent."""
        with self._state:
            self._closing = True
        self._stop.set()
        self._encoder.shutdown(wait=True)
        if (connection := self._connection) is not None:
            if connection.talks:
                connection.control_out.put(Goodbye(reason=reason))
                connection.control_out.close(flush_s=2.0)
            connection.close(reason)
        self._close_lost()
        self._heart.join(timeout=5.0)
        if self._reconnecting is not None and self._reconnecting is not threading.current_thread():
            self._reconnecting.join(timeout=RECONNECT_TIMEOUT_S + 1.0)

    # ---- background --------------------------------------------------------------------------------

    def _encode(self, job: Callable[..., None], *args: object) -> None:
        """Have the encoder do something, after what it was given before."""

        def guarded() -> None:
            try:
                job(*args)
            except Exception as error:
                log.exception("the encoder failed")
                if (connection := self._connection) is not None:
                    connection.lose(f"encoding failed: {type(error).__name__}: {error}", ours=True)

        self._encoder.submit(guarded)

    def _encode_and_send(self, effect: SendFragment, flat: Tensor) -> None:
        numel = flat.numel()
        wire = self._wire_up
        fragment = effect.fragment
        if wire == "float32":
            payload = flat.view(torch.uint8)
            give_back: Callable[[], None] = lambda: self._floats.give(payload)  # noqa: E731
        else:
            payload = self._bytes.take(encoded_bytes(numel, wire))
            if wire in DRIFT_WIRES:
                feedback = self._feedback.setdefault(fragment, ErrorFeedback(numel))
                feedback.encode(flat.sub_(self._base[fragment]), wire, payload)
            else:
                encode(flat, wire, payload)
            self._floats.give(flat.view(torch.uint8))
            give_back = lambda: self._bytes.give(payload)  # noqa: E731
        message = ContributionMsg(
            fragment=fragment,
            base_version=effect.base_version,
            tokens=effect.tokens,
            steps=effect.steps,
            sent_at_step=effect.sent_at_step,
            wire=wire,
            numel=numel,
        )
        if self._poison_next:
            self._poison_next = False
            _poison(payload, wire)
        if self._keep_unanswered:
            self._unanswered[fragment] = (message, payload)
            give_back = lambda: None  # noqa: E731
        self._put_bulk(fragment, message, payload, give_back)

    def _put_bulk(
        self, fragment: int, message: ContributionMsg, payload: Tensor, give_back: Callable[[], None]
    ) -> None:
        connection = self._connection
        if connection is None or not connection.contributes:
            give_back()  # nobody has asked for it, or they will ask again
            return
        connection.bulk_out.put(message, view(payload), key=fragment, on_sent=give_back, on_dropped=give_back)

    def allocate(self, message: Message, num_bytes: int) -> memoryview:
        """Where a merged fragment is received into; refuses anything else."""
        if not isinstance(message, MergedMsg) or message.fragment >= len(self._layout):
            raise ProtocolError(f"unexpected {type(message).__name__}")
        numel = self._layout.fragments[message.fragment].numel
        if (message.wire, message.numel) != (self._wire_down, numel):
            raise ProtocolError(f"fragment {message.fragment} as {message.numel} x {message.wire}")
        if num_bytes != encoded_bytes(numel, message.wire):
            raise ProtocolError(f"fragment {message.fragment} in {num_bytes} bytes")
        pool = self._floats if message.wire == "float32" else self._bytes
        return view(pool.take(num_bytes))

    def decoded(self, message: MergedMsg, payload: memoryview) -> Tensor:
        """float32 [numel] of a received payload."""
        raw = torch.frombuffer(payload, dtype=torch.uint8)
        if message.wire == "float32":
            return raw.view(torch.float32)
        values = self._floats.take(4 * message.numel).view(torch.float32)
        decode(raw, message.wire, message.numel, values)
        self._bytes.give(raw)
        return values

    def _heartbeat(self) -> None:
        """Repeat the last report, without a step time, so that a long step is not taken for a dead learner."""
        while not self._stop.wait(self._cfg.sync.heartbeat_interval_s):
            last = self._last_report
            self._say(Report(step=last.step, tokens=last.tokens, step_time_s=None, metrics={}, phases={}))


def _poison(payload: Tensor, wire: str) -> None:
    """Make the first value of an encoded contribution NaN, in blocked formats by its scale."""
    plain = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if wire in plain:
        payload.view(plain[wire])[0] = float("nan")
    else:
        payload[:4].view(torch.float32)[0] = float("nan")


def _no_payload(message: Message, num_bytes: int) -> memoryview | None:
    raise ProtocolError(f"{type(message).__name__} with a payload of {num_bytes} bytes on the control connection")


def refused(reject: Reject) -> EnvironmentNotReady:
    """The syncer's Reject as an error for people."""
    return EnvironmentNotReady("the syncer refused this learner", why=reject.reason)
