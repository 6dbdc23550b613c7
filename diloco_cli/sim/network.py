"""Links in virtual time: one direction of one island's link, by the rule of run.links without its chunks as events.

Owns: when a message that is sent now arrives. Must not: know what messages mean. Called by: sim.world.

Theory (run/links.py is what this repeats). A direction is a virtual queue: bytes depart when all before them have, plus
their own bits / rate; an idle link keeps up to BURST_S of credit. Two connections share it, control and bulk, each
sending one message at a time in chunks of 2 ms of the rate, and take turns chunk by chunk. So a control message waits
for what is left of the bulk chunk under way, and delays the rest of the bulk by its own length. Here a bulk message is
one event at the end of its last chunk, which is moved when control messages went in between.

Arrival = departure + latency + U(0, jitter), never before an earlier arrival. Of the chunks of a bulk message the last
ones count, as each may be the latest.

A degraded link has another rate and latency meanwhile. With a loss p the rate is 1 - p of it, and a chunk of n packets
is a round trip late with probability 1 - (1-p)^n.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diloco_cli.sim.engine import ARRIVAL, Engine

# The same figures as in run.links and run.secure; tests/sim holds them against each other.
BURST_S = 0.02
CHUNK_BYTES = 256 * 1024
MIN_CHUNK_BYTES = 4 * 1024
SEAL_BYTES = 21
PACKET_BYTES = 1460
MAX_JITTER_DRAWS = 8


def chunk_bytes(rate_bps: float) -> int:
    """2 ms of the rate; at least 4 KiB, unless even that would take the link for more than 20 ms."""
    if math.isinf(rate_bps):
        return CHUNK_BYTES
    least = min(MIN_CHUNK_BYTES, rate_bps * 0.02 / 8)
    return int(min(max(rate_bps * 0.002 / 8, least, 64), CHUNK_BYTES))


@dataclass(slots=True)
class _Bulk:
    """A bulk message: `end_s` is when its last byte departs, once it is in service."""

    num_bytes: int
    deliver: Callable[..., None]
    args: tuple[Any, ...]
    began_s: float = 0.0
    end_s: float = 0.0
    done: bool = field(default=False)


class SimLink:
    """One direction of one island's link for one session; open() begins another session, which loses what is on it.

    Attributes:
        bytes_sent: bytes that have departed, all sessions together.
    """

    def __init__(
        self, engine: Engine, rate_bps: float, latency_s: float, jitter_s: float, chance: random.Random
    ) -> None:
        assert rate_bps > 0
        self._engine = engine
        self.rate_bps = rate_bps
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self._healthy = (rate_bps, latency_s)
        self._loss = 0.0
        self._was_degraded = False
        self._chance = chance
        self._chunk_bytes = chunk_bytes(rate_bps)
        self._chunk_s = self._chunk_bytes * 8 / rate_bps
        self._session = 0
        self.bytes_sent = 0
        self._busy_until_s = -math.inf
        self._control_until_s = -math.inf
        self._last_arrival_s = -math.inf
        self._cut_until_s = -math.inf
        self._waiting: OrderedDict[object, _Bulk] = OrderedDict()
        self._current: _Bulk | None = None

    # ---- sending ----

    def control(self, num_bytes: int, deliver: Callable[..., None], *args: Any) -> None:
        """Send a small message on the control connection, after those before it."""
        now_s = max(self._engine.clock.now_s, self._cut_until_s)
        length_s = num_bytes * 8 / self.rate_bps
        begin_s = max(now_s, self._control_until_s)
        bulk = self._current
        if bulk is not None and bulk.end_s > begin_s:
            depart_s = self._chunk_end_s(bulk, begin_s) + length_s
            bulk.began_s += length_s
            bulk.end_s += length_s
            self._busy_until_s = bulk.end_s
        else:
            self._busy_until_s = max(self._busy_until_s, begin_s - BURST_S) + length_s
            depart_s = max(self._busy_until_s, begin_s)
        self._control_until_s = depart_s
        self.bytes_sent += num_bytes
        self._deliver_at(self._arrival_s(depart_s, num_bytes), deliver, args)

    def bulk(self, key: object, num_bytes: int, deliver: Callable[..., None], *args: Any) -> None:
        """Send a message on the bulk connection. One that still waits under the same key is replaced in its place."""
        chunks = math.ceil(num_bytes / self._chunk_bytes)
        message = _Bulk(num_bytes + SEAL_BYTES * chunks, deliver, args)
        if self._chunk_s == 0.0 and not self.is_cut(self._engine.clock.now_s):
            # Unlimited: it departs at once, before what is sent after it.
            self.bytes_sent += message.num_bytes
            self._deliver_at(self._arrival_s(self._engine.clock.now_s, message.num_bytes), deliver, args)
            return
        self._waiting[key] = message
        if self._current is None:
            self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting:
            self._current = None
            return
        _, message = self._waiting.popitem(last=False)
        begin_s = max(self._engine.clock.now_s, self._cut_until_s)
        # A control message on its way goes first.
        start_s = max(self._busy_until_s, begin_s - BURST_S)
        message.end_s = start_s + message.num_bytes * 8 / self.rate_bps
        message.began_s = start_s
        self._busy_until_s = message.end_s
        self._current = message
        self._engine.at(max(message.end_s, begin_s), ARRIVAL, self._departed, message, self._session)

    def _departed(self, message: _Bulk, session: int) -> None:
        if session != self._session or message.done:
            return
        now_s = self._engine.clock.now_s
        if message.end_s > now_s:
            # Control messages, or a cut, went in between.
            self._engine.at(message.end_s, ARRIVAL, self._departed, message, session)
            return
        message.done = True
        self.bytes_sent += message.num_bytes
        self._deliver_at(self._arrival_s(now_s, message.num_bytes), message.deliver, message.args)
        self._begin_next()

    def _chunk_end_s(self, bulk: _Bulk, now_s: float) -> float:
        """When the bulk chunk under way at `now_s` has departed."""
        if self._chunk_s <= 0.0:
            return now_s
        chunks = math.ceil((now_s - bulk.began_s) / self._chunk_s)
        return min(max(now_s, bulk.began_s + chunks * self._chunk_s), bulk.end_s)

    def _arrival_s(self, depart_s: float, num_bytes: int) -> float:
        arrival_s = depart_s + self.latency_s
        if self.jitter_s > 0:
            for i in range(min(MAX_JITTER_DRAWS, 1 + num_bytes // self._chunk_bytes)):
                left_s = depart_s - i * self._chunk_s
                arrival_s = max(arrival_s, left_s + self.latency_s + self._chance.uniform(0.0, self.jitter_s))
        if self._loss > 0:
            packets = math.ceil(min(num_bytes, self._chunk_bytes) / PACKET_BYTES)
            all_arrive = (1.0 - self._loss) ** packets
            for i in range(min(MAX_JITTER_DRAWS, 1 + num_bytes // self._chunk_bytes)):
                if self._chance.random() > all_arrive:
                    # Sent, missed, sent again.
                    arrival_s = max(arrival_s, depart_s - i * self._chunk_s + 3 * self.latency_s)
        if self.jitter_s > 0 or self._was_degraded:
            arrival_s = max(arrival_s, self._last_arrival_s)
            self._last_arrival_s = arrival_s
        return arrival_s

    def _deliver_at(self, when_s: float, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._engine.at(max(when_s, self._cut_until_s), ARRIVAL, self._arrive, self._session, deliver, args)

    def _arrive(self, session: int, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if session != self._session:
            return
        now_s = self._engine.clock.now_s
        if now_s < self._cut_until_s:
            self._engine.at(self._cut_until_s, ARRIVAL, self._arrive, session, deliver, args)
            return
        deliver(*args)

    # ---- faults ----

    def is_cut(self, now_s: float) -> bool:
        """Whether nothing gets through at this time."""
        return now_s < self._cut_until_s

    def cut(self, until_s: float) -> None:
        """Nothing departs or arrives until then; what is on the way arrives afterwards, in order."""
        now_s = self._engine.clock.now_s
        lost_s = max(0.0, until_s - max(now_s, self._cut_until_s))
        self._cut_until_s = max(self._cut_until_s, until_s)
        if (bulk := self._current) is not None and bulk.end_s > now_s:
            bulk.began_s += lost_s
            bulk.end_s += lost_s
        if self._busy_until_s > now_s:
            self._busy_until_s += lost_s

    def degrade(self, rate_bps: float | None, latency_s: float | None, loss: float) -> None:
        """From now on the link has these figures; None: its own."""
        own_bps, own_s = self._healthy
        self.latency_s = own_s if latency_s is None else latency_s
        self._loss = loss
        self._was_degraded = True
        self._set_rate((own_bps if rate_bps is None else rate_bps) * (1.0 - loss))

    def restore(self) -> None:
        """The link is its own again."""
        self.degrade(None, None, 0.0)

    def _set_rate(self, rate_bps: float) -> None:
        """What has not departed yet does so at the new rate."""
        now_s, before_bps, self.rate_bps = self._engine.clock.now_s, self.rate_bps, rate_bps
        self._chunk_s = self._chunk_bytes * 8 / rate_bps
        # Limited to unlimited takes no time; the reverse finds nothing that has not departed.
        times = 1.0 if math.isinf(before_bps) else before_bps / rate_bps
        base_s = max(now_s, self._cut_until_s)
        if self._busy_until_s > base_s:
            self._busy_until_s = base_s + (self._busy_until_s - base_s) * times
        if (bulk := self._current) is not None and bulk.end_s > base_s:
            bulk.end_s = base_s + (bulk.end_s - base_s) * times
            bulk.began_s = base_s
            self._engine.at(bulk.end_s, ARRIVAL, self._departed, bulk, self._session)

    def close(self) -> None:
        """The connections over this link are closed: what is on it, or waits for it, is lost."""
        self._session += 1
        self._waiting.clear()
        self._current = None
        self._busy_until_s = min(self._busy_until_s, self._engine.clock.now_s)
        self._control_until_s = -math.inf
