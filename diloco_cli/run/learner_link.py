"""The learner's side of the wire, in background threads, so that training never waits for the network.

Owns: two channels to the syncer (control, bulk), encoding what goes out, decoding what comes in, heartbeats.
Must not: decide anything of the protocol (core.learner does). Called by: run.learner_main on rank 0.

Threads: one receiver per channel, one outbox per channel, one encoder, one for heartbeats. What comes in waits in
`inbox`; nothing else is shared. Whatever ends a thread before close() arrives there as Lost, once.
Memory: per fragment at most one merged version in the inbox, one that is being received, and one contribution that
waits to be sent; buffers are used again.
"""

from __future__ import annotations

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
from diloco_cli.core.fragments import Layout, fingerprint
from diloco_cli.core.types import SendFragment
from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.run.buffers import BufferPool, view
from diloco_cli.run.channel import Channel
from diloco_cli.run.connecting import connect
from diloco_cli.run.credentials import Credentials
from diloco_cli.run.links import RateMeter, make_shaper
from diloco_cli.run.outbox import Outbox
from diloco_cli.run.secure import ChannelClosed
from diloco_cli.wire.codecs import DRIFT_WIRES, ErrorFeedback, decode, encode, encoded_bytes
from diloco_cli.wire.frames import MAX_HEADER_BYTES, ProtocolError
from diloco_cli.wire.messages import (
    ContributionMsg,
    EvaluateMsg,
    FinishMsg,
    Goodbye,
    Hello,
    Installed,
    MergedMsg,
    Message,
    PullMsg,
    Reject,
    Report,
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
    """The connection is over."""

    reason: str


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


Incoming = Merged | Lost | Welcome | PullMsg | FinishMsg | EvaluateMsg | StopMsg | Reject


class SyncerLink:
    """Connects on construction; close() at the end.

    Raises:
        EnvironmentNotReady: no syncer there in time, or it refuses us.
    """

    def __init__(
        self, cfg: Config, island: str, layout: Layout, address: tuple[str, int], credentials: Credentials, seed: int
    ) -> None:
        self._cfg = cfg
        self._layout = layout
        self._wire_up = cfg.network.wire_up.value
        self._wire_down = cfg.network.wire_down.value
        self.inbox = Inbox(self.release)
        self._bytes = BufferPool()
        self._floats = BufferPool()
        self._feedback: dict[int, ErrorFeedback] = {}
        self._base: dict[int, Tensor] = {}
        self._shaper = make_shaper(cfg.link(island).up, seed)
        self._up_rate = RateMeter()
        self._down_rate = RateMeter()
        self._closing = False
        self._state = threading.Lock()
        self._last_report = Report(step=0, tokens=0, step_time_s=None, metrics={}, phases={})
        hello = _hello(cfg, island, layout)
        timeout_s = cfg.network.connect_timeout_s
        self._control = connect(address, credentials, self._shaper, hello("control"), timeout_s)
        try:
            self._bulk = connect(address, credentials, self._shaper, hello("bulk"), timeout_s)
        except BaseException:
            self._control.close()
            raise
        self._control_out = Outbox(self._control, on_error=self._lost)
        self._bulk_out = Outbox(self._bulk, on_error=self._lost)
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")
        self._stop = threading.Event()
        targets = (self._receive_control, self._receive_bulk, self._heartbeat)
        self._threads = [threading.Thread(target=t, name=t.__name__, daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    # ---- what the training loop says ---------------------------------------------------------------

    def report(self, report: Report) -> None:
        """Progress, cheaply; an unsent older report is replaced by the newer one only if nothing is lost by it."""
        self._last_report = report
        self._control_out.put(report)

    def installed(self, message: Installed) -> None:
        """A merged fragment was installed."""
        self._control_out.put(message)

    def validation(self, message: Validation) -> None:
        """A validation loss."""
        self._control_out.put(message)

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
        received = self._control.bytes_received + self._bulk.bytes_received
        rates = {
            "link_up_bps": self._up_rate.add(now_s, self._shaper.bytes_sent),
            "link_down_bps": self._down_rate.add(now_s, received),
        }
        return {name: rate for name, rate in rates.items() if rate is not None}

    def close(self, reason: str) -> None:
        """Say goodbye, flush for a moment, and end all threads. Idempotent."""
        with self._state:
            self._closing = True
        self._stop.set()
        self._encoder.shutdown(wait=True)
        self._control_out.put(Goodbye(reason=reason))
        self._control_out.close(flush_s=2.0)
        self._bulk_out.close()
        self._control.close(reason)
        self._bulk.close(reason)
        for thread in self._threads:
            thread.join(timeout=5.0)

    # ---- background --------------------------------------------------------------------------------

    def _encode(self, job: Callable[..., None], *args: object) -> None:
        """Have the encoder do something, after what it was given before."""

        def guarded() -> None:
            try:
                job(*args)
            except Exception as error:
                log.exception("the encoder failed")
                self._lost(f"encoding failed: {type(error).__name__}: {error}")

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
        self._bulk_out.put(message, view(payload), key=fragment, on_sent=give_back, on_dropped=give_back)

    def _receive_control(self) -> None:
        self._receive_loop(self._control, _no_payload)

    def _receive_bulk(self) -> None:
        torch.set_num_threads(1)  # this thread's own; decoding must not take the training's cores
        self._receive_loop(self._bulk, self._allocate)

    def _receive_loop(self, channel: Channel, allocate: Callable[[Message, int], memoryview | None]) -> None:
        try:
            while True:
                message, payload = channel.receive(allocate)
                arrived_s = time.monotonic()
                if isinstance(message, MergedMsg):
                    assert payload is not None
                    self.inbox.put(Merged(message, self._decoded(message, payload), arrived_s))
                elif isinstance(message, Welcome | PullMsg | FinishMsg | EvaluateMsg | StopMsg | Reject):
                    self.inbox.put(message)
        except (ChannelClosed, ProtocolError) as error:
            self._lost(str(error))
        except Exception as error:
            log.exception("receiving failed")
            self._lost(f"receiving failed: {type(error).__name__}: {error}")

    def _allocate(self, message: Message, num_bytes: int) -> memoryview:
        if not isinstance(message, MergedMsg) or message.fragment >= len(self._layout):
            raise ProtocolError(f"unexpected {type(message).__name__}")
        numel = self._layout.fragments[message.fragment].numel
        if (message.wire, message.numel) != (self._wire_down, numel):
            raise ProtocolError(f"fragment {message.fragment} as {message.numel} x {message.wire}")
        if num_bytes != encoded_bytes(numel, message.wire):
            raise ProtocolError(f"fragment {message.fragment} in {num_bytes} bytes")
        pool = self._floats if message.wire == "float32" else self._bytes
        return view(pool.take(num_bytes))

    def _decoded(self, message: MergedMsg, payload: memoryview) -> Tensor:
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
            self._control_out.put(Report(step=last.step, tokens=last.tokens, step_time_s=None, metrics={}, phases={}))

    def _lost(self, reason: str) -> None:
        with self._state:
            was_closing, self._closing = self._closing, True
        if not was_closing:
            self.inbox.put(Lost(reason))


def _no_payload(message: Message, num_bytes: int) -> memoryview | None:
    raise ProtocolError(f"{type(message).__name__} with a payload of {num_bytes} bytes on the control connection")


def _hello(cfg: Config, island: str, layout: Layout) -> Callable[[str], Hello]:
    session = uuid.uuid4().hex
    described: dict[str, Any] = fingerprint(layout)
    if len(json.dumps(described)) > MAX_HEADER_BYTES // 2:
        described = {}  # the hash still tells that they differ, if not where

    def hello(kind: str) -> Hello:
        return Hello(
            island=island,
            kind=kind,
            layout_hash=layout.hash,
            layout=described if kind == "control" else {},
            version=__version__,
            session=session,
            batch_tokens=cfg.batch_tokens(island),
        )

    return hello


def refused(reject: Reject) -> EnvironmentNotReady:
    """The syncer's Reject as an error for people."""
    return EnvironmentNotReady("the syncer refused this learner", why=reject.reason)
