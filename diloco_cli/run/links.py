"""Emulated links: when bytes leave one side of an island's link and arrive at the other, and how fast that looks.

    LinkRule     the rule, without a clock
    LinkShaper   the rule on a real clock, for all connections that share one direction of an island's link
    DelayLine    bytes under way: they have departed, but not arrived
    RateMeter    a growing byte counter as bits per second

Theory: the sender emulates. A rate makes a chunk wait before it departs, and latency and jitter before it is written to
the socket; the real link's own rate and latency come on top. No root, no tc, and each island's links are its own.
Owns: the emulation. Must not: know of sockets, TLS or messages. Called by: run.channel, run.syncer_main,
run.learner_link.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diloco_cli.config.schema import LinkDirection

CHUNK_BYTES = 256 * 1024
MIN_CHUNK_BYTES = 4 * 1024
# Credit a link may save up while idle or while its sender's thread gets no core.
BURST_S = 0.02
# Bytes under way on a link without a rate limit but with latency; a limited link holds rate * latency.
DELAY_LINE_BYTES = 64 * 1024 * 1024
PACKET_BYTES = 1460

Chunk = memoryview | bytes | bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault:
    """A link that is worse until `until_s`: cut, or with another rate, latency (None: as before) and loss."""

    until_s: float
    cut: bool = False
    rate_bps: float | None = None
    latency_s: float | None = None
    loss: float = 0.0


class LinkRule:
    """When a chunk handed over at a given time leaves the sender and arrives at the other end. No clock in here.

    A virtual queue: a chunk departs when all before it have, plus its own bits / rate. An idle link keeps up to
    BURST_S of credit, so over any window of W seconds at most rate * (W + BURST_S) plus one chunk departs.
    Release = departure + latency + U(0, jitter), never before that of an earlier chunk: order is kept.

    While a LinkFault lasts, its figures take the place of these. Within a cut nothing departs. A chunk of n packets,
    each lost with probability p, is a round trip late with probability 1 - (1-p)^n, as it is sent again.

    Args:
        rate_bps: bits per second, None for unlimited.
        latency_s, jitter_s: seconds.
        seed: of jitter and loss.
    """

    def __init__(self, rate_bps: float | None, latency_s: float = 0.0, jitter_s: float = 0.0, seed: int = 0) -> None:
        self.rate_bps = rate_bps
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self._random = random.Random(seed)
        self._busy_until = float("-inf")
        self._last_release = float("-inf")
        self.fault: LinkFault | None = None

    def reserve(self, now_s: float, num_bytes: int) -> tuple[float, float]:
        """Take the link's next free time for `num_bytes`; returns (depart_s, release_s)."""
        rate_bps, latency_s, loss = self.rate_bps, self.latency_s, 0.0
        if self.fault is not None and now_s < self.fault.until_s:
            if self.fault.cut:
                now_s = self.fault.until_s
            else:
                rate_bps = self.fault.rate_bps or rate_bps
                latency_s = latency_s if self.fault.latency_s is None else self.fault.latency_s
                loss = self.fault.loss
        if rate_bps is None:
            depart = now_s
        else:
            start = max(self._busy_until, now_s - BURST_S)
            self._busy_until = start + num_bytes * 8 / (rate_bps * (1.0 - loss))
            depart = max(self._busy_until, now_s)
        late_s = self._random.uniform(0.0, self.jitter_s) if self.jitter_s > 0 else 0.0
        if loss and self._random.random() > (1.0 - loss) ** math.ceil(num_bytes / PACKET_BYTES):
            late_s += 2 * latency_s
        self._last_release = max(self._last_release, depart + latency_s + late_s)
        return depart, self._last_release


class LinkShaper:
    """One direction of one island's link, shared by the connections that go over it. Thread-safe.

    Each sending thread has one chunk of `chunk_bytes` (2 ms of the rate) reserved at a time, so a small message
    waits for about one chunk of each other sender and no more. `bytes_sent` grows as chunks depart: what a
    dashboard should derive rates from.
    """

    def __init__(
        self, rate_bps: float | None = None, latency_s: float = 0.0, jitter_s: float = 0.0, seed: int = 0
    ) -> None:
        self._rule = LinkRule(rate_bps, latency_s, jitter_s, seed)
        self._lock = threading.Lock()
        self._bytes_sent = 0
        self.limited = rate_bps is not None
        self.delayed = latency_s > 0 or jitter_s > 0
        self.chunk_bytes = CHUNK_BYTES
        self.delay_line_bytes = DELAY_LINE_BYTES
        if rate_bps is not None:
            self.chunk_bytes = _chunk_bytes(rate_bps)
            self.delay_line_bytes = int(rate_bps / 8 * (latency_s + jitter_s + 2 * BURST_S)) + 4 * CHUNK_BYTES

    @property
    def passes(self) -> bool:
        """Whether chunks need not be reserved at all: no limit, no delay, and nothing is wrong."""
        return not (self.limited or self.delayed or self._rule.fault)

    def set_fault(self, fault: LinkFault | None) -> None:
        """From now on the link is as the fault says, while it lasts."""
        with self._lock:
            self._rule.fault = fault

    @property
    def bytes_sent(self) -> int:
        """Bytes (encrypted, as on the wire) that have departed since the start."""
        return self._bytes_sent

    def reserve(self, num_bytes: int) -> tuple[float, float]:
        """(depart_s, release_s) on time.monotonic()'s clock for a chunk handed over now."""
        with self._lock:
            return self._rule.reserve(time.monotonic(), num_bytes)

    def departed(self, num_bytes: int) -> None:
        """Count bytes that were reserved and whose departure time has come."""
        with self._lock:
            self._bytes_sent += num_bytes


class DelayLine:
    """Chunks that have departed but not arrived: written to the socket when their time comes, by a thread.

    Invariant: holds at most `limit_bytes` and one chunk. `error` is what the first failed write raised.
    """

    def __init__(self, write: Callable[[Chunk], None], limit_bytes: int, name: str) -> None:
        self._write = write
        self._limit = limit_bytes
        self._chunks: deque[tuple[float, Chunk]] = deque()
        self._held = 0
        self._closed = False
        self.error: OSError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, release_s: float, data: Chunk) -> bool:
        """Hand over a chunk; waits while a peer that reads slowly has filled the line. False when the line is over."""
        with self._changed:
            while self._held > self._limit and not self._closed and self.error is None:
                self._changed.wait()
            if self._closed or self.error is not None:
                return False
            self._chunks.append((release_s, data))
            self._held += len(data)
            self._changed.notify_all()
            return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written; False when it took longer."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._closed, timeout_s)
            return not self._held and self.error is None

    def close(self) -> None:
        """Drop what has not arrived. Unblocks put()."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread's end, after close()."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while (data := self._next()) is not None:
            try:
                self._write(data)
            except OSError as error:
                with self._changed:
                    self.error = error
                    self._chunks.clear()
                    self._held = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._held -= len(data)
                self._changed.notify_all()

    def _next(self) -> Chunk | None:
        with self._changed:
            while not self._closed:
                if not self._chunks:
                    self._changed.wait()
                    continue
                wait = self._chunks[0][0] - time.monotonic()
                if wait <= 0:
                    return self._chunks.popleft()[1]
                self._changed.wait(wait)
        return None


class RateMeter:
    """Turns a growing byte counter into bits per second over a sliding window.

    The window is at least `window_s` long once that much time has passed, so a burst that a link let pass after a
    pause is not shown as more than the link's rate.
    """

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, total_bytes: int) -> float | None:
        """Take a reading; returns bits per second, None before a whole window has passed."""
        points = self._points
        points.append((now_s, total_bytes))
        while len(points) > 2 and now_s - points[1][0] >= self._window_s:
            points.popleft()
        since_s, before = points[0]
        if now_s - since_s < self._window_s:
            return None
        return 8.0 * (total_bytes - before) / (now_s - since_s)


def make_shaper(direction: LinkDirection, seed: int) -> LinkShaper:
    """The sender's emulation of one direction of an island's link."""
    rate_bps = None if math.isinf(direction.rate_bps) else direction.rate_bps
    return LinkShaper(rate_bps, direction.latency_s, direction.jitter_s, seed)


def _chunk_bytes(rate_bps: float) -> int:
    """2 ms of the rate; at least 4 KiB, unless even that would take the link for more than 20 ms."""
    least = min(MIN_CHUNK_BYTES, rate_bps * 0.02 / 8)
    return int(min(max(rate_bps * 0.002 / 8, least, 64), CHUNK_BYTES))
