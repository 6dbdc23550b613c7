"""Sending in the background: a bounded queue in which newer items replace older ones, and a thread that empties it.

Owns: the bound on what a peer that reads slowly may cost. Must not: know what messages mean. Called by: run.peers,
run.learner_link.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from diloco_cli.run.channel import Channel
from diloco_cli.run.secure import ChannelClosed, Payload
from diloco_cli.wire.messages import Message

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Item:
    message: Message
    payload: Payload | None
    on_sent: Callable[[], None] | None
    on_dropped: Callable[[], None] | None


class Outbox:
    """Sends for one channel in a thread of its own.

    Invariant: at most `max_items` items wait, and of items put with a key at most one per key: the newer takes the
    older one's place in the queue. So a peer that reads slowly costs one payload per key plus the one under way.
    Every item put ends in exactly one of on_sent (its payload may be reused) and on_dropped (replaced, or the channel
    is over). Both are called from arbitrary threads and must be quick.

    Args:
        channel: closed when sending fails or too much waits; its receiver thread then learns of it.
        on_error: called once with the reason when sending fails.
        max_items: above this the peer is taken for dead and the channel is closed.
    """

    def __init__(
        self, channel: Channel, *, on_error: Callable[[str], None] | None = None, max_items: int = 1024
    ) -> None:
        self.channel = channel
        self._on_error = on_error
        self._max_items = max_items
        self._items: OrderedDict[object, _Item] = OrderedDict()
        self._sending = False
        self._closing = False
        self._lost = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"outbox-{channel.peer}", daemon=True)
        self._thread.start()

    def put(
        self,
        message: Message,
        payload: Payload | None = None,
        *,
        key: object = None,
        on_sent: Callable[[], None] | None = None,
        on_dropped: Callable[[], None] | None = None,
    ) -> bool:
        """Queue a message, never blocking. False (and on_dropped) when the channel is over or the queue is full."""
        item = _Item(message, payload, on_sent, on_dropped)
        dropped: _Item | None = None
        overflow = False
        with self._changed:
            slot = key if key is not None else object()
            if self._closing or self.channel.closed:
                dropped = item
            elif slot in self._items:
                dropped, self._items[slot] = self._items[slot], item
            elif len(self._items) >= self._max_items:
                dropped, overflow, self._lost = item, True, True
            else:
                self._items[slot] = item
            self._changed.notify_all()
        if overflow:
            self.channel.close(f"{self.channel.peer} does not read: {self._max_items} messages wait")
        if dropped is not None and dropped.on_dropped is not None:
            dropped.on_dropped()
        return dropped is not item

    @property
    def waiting(self) -> int:
        """Items in the queue, without the one under way."""
        return len(self._items)

    def close(self, flush_s: float = 0.0) -> bool:
        """Stop, after waiting up to `flush_s` for what is queued. True when all of it was sent. Closes no channel
        that was flushed; one that is stuck is closed, since its thread cannot be stopped otherwise."""
        deadline = time.monotonic() + flush_s
        with self._changed:
            if flush_s > 0:
                self._changed.wait_for(lambda: self.channel.closed or not (self._items or self._sending), flush_s)
            flushed = not (self._items or self._sending or self._lost)
            self._closing = True
            self._changed.notify_all()
        if flushed:
            flushed = self.channel.flush(max(deadline - time.monotonic(), 0.0))
        else:
            # Its thread may be stuck in a send, which nothing else would end.
            self.channel.close("not flushed in time")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        return flushed

    def _run(self) -> None:
        while (item := self._take()) is not None:
            try:
                self.channel.send(item.message, item.payload)
            except ChannelClosed as error:
                self._fail(item, str(error))
                return
            except Exception as error:
                log.exception("sending to %s failed", self.channel.peer)
                self._fail(item, f"internal error: {error}")
                return
            if item.on_sent is not None:
                item.on_sent()
            with self._changed:
                self._sending = False
                self._changed.notify_all()
        self._drop_rest()

    def _take(self) -> _Item | None:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closing)
            if self._closing:
                return None
            self._sending = True
            return self._items.popitem(last=False)[1]

    def _fail(self, item: _Item, reason: str) -> None:
        self.channel.close(reason)
        if item.on_dropped is not None:
            item.on_dropped()
        with self._changed:
            was_closing, self._closing, self._sending = self._closing, True, False
            self._lost = True
        self._drop_rest()
        if self._on_error is not None and not was_closing:
            self._on_error(reason)

    def _drop_rest(self) -> None:
        with self._changed:
            rest = list(self._items.values())
            self._items.clear()
            self._changed.notify_all()
        for item in rest:
            if item.on_dropped is not None:
                item.on_dropped()
