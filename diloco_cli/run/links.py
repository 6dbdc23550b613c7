"""Emulated links from the configuration, and their rates as people expect them: bits over the last second.

Called by: run.syncer_main, run.learner_link.
"""

from __future__ import annotations

import math
from collections import deque

from diloco_cli.config.schema import LinkDirection
from diloco_cli.run.transport import LinkShaper


def make_shaper(direction: LinkDirection, seed: int) -> LinkShaper:
    """The sender's emulation of one direction of an island's link."""
    rate_bps = None if math.isinf(direction.rate_bps) else direction.rate_bps
    return LinkShaper(rate_bps, direction.latency_s, direction.jitter_s, seed)


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
