"""Failures on purpose, applied to a running run: signals and limits to processes; links are the syncer's to break.

    crash       SIGKILL; with a duration it is not started again before that is over
    hang        SIGSTOP; SIGCONT after the duration, if its supervisor has not ended it before
    slow        SIGSTOP and SIGCONT in turn, so that `factor` of the time is left
    preempt     SIGTERM: it leaves in order, and is not started again before the duration is over
    disk-full   its processes may make no file longer than nothing: each write fails, as on a full disk
    partition, degrade, corrupt   told to the syncer, which emulates the links

Theory: the plan is data, drawn before the start. A fault whose target does not run at its time waits until it does,
so that all of them happen. Nothing stays stopped, slowed or limited after close().
Owns: what is under way. Must not draw faults (core.faults) or start anything. Called by: run.launcher.
"""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from diloco_cli.core.faults import (
    CORRUPT,
    CRASH,
    DEGRADE,
    DISK_FULL,
    HANG,
    PARTITION,
    PREEMPT,
    SLOW,
    SYNCER,
    Due,
    Fault,
)
from diloco_cli.run.groups import Group

ON_THE_LINK = (PARTITION, DEGRADE, CORRUPT)
SLOW_PERIOD_S = 0.05
# What is over when the duration is, and not when the target has been started again.
TIMED = (SLOW, DISK_FULL, PARTITION, DEGRADE)

Tell = Callable[[dict[str, Any]], None]
RecordEvent = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True)
class Applied:
    """A fault under way."""

    fault: Fault
    group: Group
    start: int
    until_s: float
    pids: list[int]
    slowed: SlowedDown | None = None


class Injector:
    """Applies a plan.

    Attributes:
        counts: faults applied, by kind.
    """

    def __init__(
        self,
        plan: Sequence[Fault],
        groups: Mapping[str, Group],
        tell: Tell,
        record: RecordEvent,
        *,
        stop_timeout_s: float,
    ) -> None:
        """groups: by name, the syncer among them; it may grow. tell: to the syncer. record: on the event tape."""
        self.counts: Counter[str] = Counter()
        self._due = Due(plan)
        self._groups = groups
        self._tell = tell
        self._record = record
        self._stop_timeout_s = stop_timeout_s
        self._waiting: list[Fault] = []
        self._applied: list[Applied] = []
        self._hung: set[int] = set()

    def poll(self, now_s: float, step: int) -> None:
        """Apply what is due, end what is over.

        Args:
            now_s: seconds since the run started; step: of the foremost learner.
        """
        self._end_due(now_s)
        self._waiting += self._due.take(now_s, step)
        blocked: set[str] = set()
        for fault in list(self._waiting):
            # The faults of one target keep their order.
            if fault.target not in blocked and self._may_apply(fault):
                self._waiting.remove(fault)
                self._apply(fault, now_s)
            else:
                blocked.add(fault.target)

    def syncer_restarted(self, now_s: float) -> None:
        """Tell a new syncer which links are broken."""
        for applied in self._applied:
            if applied.fault.kind in ON_THE_LINK and applied.until_s > now_s:
                left_s = None if math.isinf(applied.until_s) else applied.until_s - now_s
                self._tell_link(applied.fault, left_s)

    def close(self) -> None:
        """Undo everything that is under way."""
        for applied in self._applied:
            self._undo(applied)
        self._applied.clear()
        self._waiting.clear()

    # ---- begin -------------------------------------------------------------------------------------

    def _may_apply(self, fault: Fault) -> bool:
        group = self._groups.get(fault.target)
        if group is None or not group.is_up:
            return False
        if fault.kind not in ON_THE_LINK:
            return True
        return group.joined and self._groups[SYNCER].is_up

    def _apply(self, fault: Fault, now_s: float) -> None:
        group = self._groups[fault.target]
        until_s = math.inf if fault.duration_s is None else now_s + fault.duration_s
        applied = Applied(fault, group, group.policy.starts, until_s, group.pids(fault.rank))
        # On the tape before anybody can tell the consequences.
        self._record("fault", _as_event(fault))
        self.counts[fault.kind] += 1
        self._act(applied)
        if fault.kind != CORRUPT:
            self._applied.append(applied)

    def _act(self, applied: Applied) -> None:
        fault, group = applied.fault, applied.group
        match fault.kind:
            case "crash":
                group.policy.hold(time.monotonic() + (fault.duration_s or 0.0))
                group.dying = True
                _signal(applied.pids, signal.SIGKILL)
            case "hang":
                self._hung.update(applied.pids)
                _signal(applied.pids, signal.SIGSTOP)
            case "slow":
                applied.slowed = SlowedDown(applied.pids, fault.factor, self._hung)
            case "preempt":
                group.policy.hold(time.monotonic() + (fault.duration_s or 0.0))
                group.ask_to_end(self._stop_timeout_s)
            case "disk-full":
                limit_files(applied.pids, full=True)
            case _:
                self._tell_link(fault, fault.duration_s)

    def _tell_link(self, fault: Fault, lasts_s: float | None) -> None:
        said = {"event": "fault", "island": fault.target, "kind": fault.kind, "duration_s": lasts_s}
        if fault.kind == DEGRADE:
            said |= {"rate_bps": fault.rate_bps, "latency_s": fault.latency_s, "loss": fault.loss}
        if fault.kind == CORRUPT:
            said |= {"payload": fault.payload}
        self._tell(said)

    # ---- end ---------------------------------------------------------------------------------------

    def _end_due(self, now_s: float) -> None:
        for applied in list(self._applied):
            if self._is_over(applied, now_s):
                self._undo(applied)
                self._applied.remove(applied)
                fault = applied.fault
                self._record("repaired", {"target": fault.target, "kind": fault.kind})

    @staticmethod
    def _is_over(applied: Applied, now_s: float) -> bool:
        """Its time is up, or its target has been started again and takes part."""
        fault, group = applied.fault, applied.group
        if group.policy.starts > applied.start:
            # A new process knows nothing of what was done to the old one.
            back = group.joined if fault.target != SYNCER else group.is_up
            return back and (fault.kind not in (PARTITION, DEGRADE) or now_s >= applied.until_s)
        return fault.kind in (HANG, *TIMED) and now_s >= applied.until_s

    def _undo(self, applied: Applied) -> None:
        if applied.slowed is not None:
            applied.slowed.end()
        if applied.fault.kind == HANG:
            self._hung.difference_update(applied.pids)
            if applied.group.policy.starts == applied.start:
                _signal(applied.pids, signal.SIGCONT)
        if applied.fault.kind == DISK_FULL and applied.group.policy.starts == applied.start:
            limit_files(applied.pids, full=False)


class SlowedDown:
    """Processes that run for `factor` of the time, until end(). `hung`: those that may not be set going meanwhile."""

    def __init__(self, pids: Sequence[int], factor: float, hung: set[int]) -> None:
        self._pids = list(pids)
        self._factor = min(max(factor, 0.0), 1.0)
        self._hung = hung
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Leaves them running."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.wait(SLOW_PERIOD_S * self._factor):
                _signal(self._pids, signal.SIGSTOP)
                self._over.wait(SLOW_PERIOD_S * (1.0 - self._factor))
                self._let_go()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        _signal([pid for pid in self._pids if pid not in self._hung], signal.SIGCONT)


def limit_files(pids: Sequence[int], *, full: bool) -> None:
    """Have every write to a file fail in these processes (EFBIG), or no more. Only Linux can."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def in_words(fault: Fault) -> str:
    """One line for the screen."""
    rank = "" if fault.rank is None else f", rank {fault.rank}"
    lasts = "" if fault.duration_s is None else f" for {fault.duration_s:g} s"
    what = {
        CRASH: "killed",
        HANG: "stopped",
        SLOW: f"slowed to {fault.factor:.0%}",
        PARTITION: "its link lets nothing through",
        DEGRADE: "its link is degraded",
        PREEMPT: "preempted",
        CORRUPT: "its next contribution goes bad",
        DISK_FULL: "its disk is full",
    }[fault.kind]
    return f"{fault.target}{rank}: {what}{lasts}"


def _as_event(fault: Fault) -> dict[str, Any]:
    """The fault's line on the tape: what was asked for, without what does not concern its kind."""
    of_kind = {SLOW: ("factor",), DEGRADE: ("rate_bps", "latency_s", "loss"), CORRUPT: ("payload",)}
    keys = ("target", "kind", "at_s", "at_step", "duration_s", "rank", *of_kind.get(fault.kind, ()))
    whole = dataclasses.asdict(fault)
    return {k: whole[k] for k in keys if whole[k] is not None} | {"text": in_words(fault)}
