"""What a run looks like at one moment, folded from its metric and event records.

Owns: RunView (records in, snapshot out) and the words for events. Pure: time is an argument, no clock, no file, no
terminal; memory is bounded whatever the run's length. Records come from other processes and other machines, so no
value in them is trusted to have the right type, and text is cleaned of control characters.
Called by: observe.dashboard (draws snapshots), run's launcher, cli (status, watch).

All times are seconds on the clock of the records' `time` (seconds since the run's start).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_cli.config.schema import Config
from diloco_cli.observe import figures

STATES = (
    "starting", "training", "waiting", "unhealthy", "restarting", "finished", "gone", "given up", "left",
)  # fmt: skip
ATTENTION = {
    "given up": 0, "gone": 1, "restarting": 2, "unhealthy": 3, "waiting": 4, "starting": 5, "training": 6,
    "left": 7, "finished": 8,
}  # fmt: skip
"""Who is shown first where not all islands have room."""

ETA_WARMUP_S = 3.0
"""The first seconds of stepping say nothing about the speed (imports, caches, compilation)."""
ETA_WINDOW = 240
"""Progress samples that the speed is taken from, at least 0.5 s apart: the last two minutes."""
_RUNNING = ("training", "waiting", "unhealthy")
_AWAY = ("gone", "restarting", "given up", "left")
_REPORTED = ("starting", "training", "waiting", "finished")
"""States that an island says of itself in a metric record."""
SILENT_S = 5.0
"""A training island that was not heard of for so long is shown as silent."""
HISTORY_POINTS_MAX = 512
LOG_LINES_MAX = 200
TROUBLE_LINES_MAX = 32
ISLANDS_MAX = 4096
TEXT_MAX = 400


def clean(value: object, limit: int = TEXT_MAX) -> str:
    """Text from outside as one harmless line: control, format and unpaired characters become a space."""
    text = value if isinstance(value, str) else str(value)
    text = text[: limit + 1]
    if not text.isascii() or not text.isprintable():
        text = "".join(" " if unicodedata.category(c) in _HARMFUL else c for c in text)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


_HARMFUL = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A finite number, or None for anything else."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and abs(value) >= 2**63:
        return None
    return float(value) if math.isfinite(value) else None


def whole(record: Mapping[str, Any], key: str) -> int | None:
    """A whole number, or None for anything else."""
    value = number(record, key)
    return None if value is None else int(value)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts island-2 before island-10."""
    parts = re.findall(r"[0-9]{1,12}|[^0-9]+|[0-9]", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


# ---- the snapshot -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandSnapshot:
    """One island now. None: not known yet. `reason`: why it is in that state, in words; `last_reason`: why it last
    was away or unhealthy, also when that is over."""

    name: str
    state: str
    reason: str
    last_reason: str
    restarts: int
    since_s: float
    step: int
    tokens: int
    loss: float | None
    tokens_per_s: float | None
    step_time_s: float | None
    link_up_bps: float | None
    link_down_bps: float | None
    link_up_max_bps: float | None
    link_down_max_bps: float | None
    staleness_steps: int | None
    last_merge_age_s: float | None
    last_merge_fragment: int | None
    silent_s: float | None
    late: int
    refused: int
    phases: Mapping[str, float]
    history: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerSnapshot:
    """The syncer now. Times in seconds; `versions` by fragment; `tokens` is the ledger of fates."""

    merges: int
    merges_per_s: float | None
    quorum_time_s: float | None
    grace_time_s: float | None
    merge_time_s: float | None
    last_merge_age_s: float | None
    last_learners: int | None
    late: int
    refused: int
    versions: tuple[int, ...]
    tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One event in words. `count` alike ones stand behind it; `number` grows with every change of the log."""

    number: int
    time: float
    event: str
    text: str
    level: str
    count: int = 1
    routine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The newest snapshot on disk. None: its record does not say."""

    step: int | None
    path: str
    num_bytes: int | None
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """All that a screen shows."""

    name: str
    algorithm: str
    now_s: float
    started: bool
    status: str | None
    status_reason: str
    islands: tuple[IslandSnapshot, ...]
    syncer: SyncerSnapshot
    step: int
    target_steps: int | None
    progress: float | None
    eta_s: float | None
    tokens: int
    tokens_per_s: float | None
    loss: float | None
    validation: tuple[tuple[float, float], ...]
    bigram: float | None
    goodput: float | None
    uptime: float | None
    quorum: int
    live: int
    quorum_lost: bool
    syncer_down: str
    """Why the syncer is not there; empty while it is."""
    restarts: int
    faults: Mapping[str, int]
    """Faults injected so far, by kind."""
    snapshot: Snapshot | None
    log: tuple[LogLine, ...]
    trouble: tuple[LogLine, ...]
    """The newest faults and errors, however much else has happened since."""

    def counts(self) -> dict[str, int]:
        """How many islands are in each state, states without any left out, in the order of STATES."""
        found = Counter(island.state for island in self.islands)
        return {state: found[state] for state in STATES if found[state]}


# ---- the fold -----------------------------------------------------------------------------------


class _History:
    """A curve in bounded memory: when full, neighbours are averaged pairwise and the next ones count twice as much."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._per_point = 1
        self._bucket: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        self._bucket.append((x, y))
        if len(self._bucket) < self._per_point:
            return
        self.points.append(_mean_point(self._bucket))
        self._bucket.clear()
        if len(self.points) >= HISTORY_POINTS_MAX:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean_point(pair) for pair in pairs]
            self._per_point *= 2

    def all(self) -> tuple[tuple[float, float], ...]:
        return (*self.points, _mean_point(self._bucket)) if self._bucket else tuple(self.points)


def _mean_point(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    xs, ys = zip(*points, strict=True)
    return math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)


@dataclass(slots=True)
class _Island:
    name: str
    state: str = "starting"
    reason: str = ""
    last_reason: str = ""
    restarts: int = 0
    since_s: float = 0.0
    seen_s: float | None = None
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    installed_step: int | None = None
    merged_s: float | None = None
    merged_fragment: int | None = None
    late: int = 0
    refused: int = 0
    history: _History = field(default_factory=_History)


_KEPT_METRICS = ("loss", "tokens_per_s", "step_time_s", "link_up_bps", "link_down_bps", "staleness_steps", "tokens")
# Too many, and the merge says it all; or for the summary, which says it in words.
_NOT_SHOWN = ("pull", "contribution", "quorum", "grace", "result")
_ORDERLY_END = re.compile(
    r"(finished|completed|done)\b|(the )?run (has reached|is over|is ending|has ended)|target reached"
)


class RunView:
    """Folds records into what a screen shows.

    Args:
        name: of the run, for the header.
        algorithm: for the header.
        islands: names known beforehand; others are added as they appear.
        target_steps: inner steps of the fastest learner at which the run ends.
        quorum: fewest live islands that let merges go on.
        link_bps: island -> (up, down), the configured rates in bits per second; infinity: unlimited.
    """

    def __init__(
        self,
        *,
        name: str = "",
        algorithm: str = "",
        islands: Iterable[str] = (),
        target_steps: int | None = None,
        quorum: int = 1,
        link_bps: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.name = clean(name)
        self.algorithm = clean(algorithm)
        self.target_steps = target_steps
        self.quorum = quorum
        self.bad_records = 0
        self._link_bps = dict(link_bps or {})
        self._islands: dict[str, _Island] = {}
        self._started = False
        self._status: str | None = None
        self._status_reason = ""
        self._quorum_lost = False
        self._told_live = 0
        self._syncer_counts = False  # it has spoken of its quorum; before that, the islands' states are counted
        self._available: int | None = None  # as the syncer counts them while it waits for a quorum
        self._syncer_down = ""
        self._syncer_down_s = 0.0
        self._syncer_restarts = 0
        self._faults: Counter[str] = Counter()
        self._snapshot: Snapshot | None = None
        self._syncer: dict[str, float] = {}
        self._ledger: dict[str, int] = {}
        self._versions: dict[int, int] = {}
        self._num_fragments = 0
        self._merges = 0
        self._merge_times: deque[float] = deque(maxlen=64)
        self._last_merge_learners: int | None = None
        self._late = 0
        self._refused = 0
        self._validation = _History()
        self._bigram: float | None = None
        self._first_progress_s: float | None = None
        self._progress: deque[tuple[float, int]] = deque(maxlen=ETA_WINDOW)
        self._log: deque[LogLine] = deque(maxlen=LOG_LINES_MAX)
        self._log_keys: deque[str] = deque(maxlen=LOG_LINES_MAX)
        self._trouble: deque[LogLine] = deque(maxlen=TROUBLE_LINES_MAX)
        self._log_number = 0
        self._latest_s = 0.0
        for island in islands:
            self._island(island)

    @classmethod
    def from_config(cls, cfg: Config, name: str = "") -> RunView:
        """A view that knows the islands, the links and the target before the first record."""
        names = cfg.island_names()
        links = {island: cfg.link(island) for island in names}
        return cls(
            name=name or cfg.run.name,
            algorithm=cfg.sync.algorithm.value,
            islands=names,
            target_steps=cfg.planned_steps(),
            quorum=cfg.sync.quorum,
            link_bps={island: (link.up.rate_bps, link.down.rate_bps) for island, link in links.items()},
        )

    @property
    def latest_s(self) -> float:
        """Time of the newest record."""
        return self._latest_s

    # ---- records in ----

    def apply(self, record: Mapping[str, Any]) -> None:
        """Take one record of metrics.jsonl or events.jsonl. A record that makes no sense is counted, not raised."""
        try:
            time_s = number(record, "time")
            time_s = self._latest_s if time_s is None else time_s
            self._latest_s = max(self._latest_s, time_s)
            if isinstance(record.get("event"), str):
                self._apply_event(record["event"], record, time_s)
            elif record.get("source") == "syncer":
                self._apply_syncer(record, time_s)
            elif isinstance(record.get("source"), str):
                self._apply_island(record, time_s)
            else:
                self.bad_records += 1
        except Exception:  # the screen must not end a run over a strange record
            self.bad_records += 1

    def apply_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take several records, in order."""
        for record in records:
            self.apply(record)

    def note(self, text: str, *, event: str = "note", level: str = "info", time_s: float | None = None) -> None:
        """Put a line of the launcher's own into the event list."""
        self._add_log(event, clean(text), level, self._latest_s if time_s is None else time_s)

    def _island(self, name: object) -> _Island:
        key = clean(name, 64) or "?"
        if key not in self._islands:
            if len(self._islands) >= ISLANDS_MAX:
                raise ValueError("too many islands")
            self._islands[key] = _Island(key)
        return self._islands[key]

    def _set_state(self, island: _Island, state: str, reason: str, time_s: float) -> None:
        if island.state != state:
            island.since_s = time_s
        island.state, island.reason = state, reason

    def _apply_island(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island(record["source"])
        island.seen_s = time_s
        for key in _KEPT_METRICS:
            value = number(record, key)
            if value is not None:
                island.metrics[key] = value
        phases = {
            clean(key[len("phase_") : -len("_s")], 24): value
            for key in record
            if key.startswith("phase_") and key.endswith("_s") and (value := number(record, key)) is not None
        }
        island.phases = phases or island.phases
        step = whole(record, "step")
        loss = number(record, "loss")
        if step is not None:
            if loss is not None and (step > island.step or not island.history.points):
                island.history.add(step, loss)
            island.step = max(island.step, step)
            self._note_progress(island.step, time_s)
        if island.state in (*_AWAY, "finished"):
            return  # a report that was under way; only a join brings an island back
        if island.state == "unhealthy":
            return  # until something of it has been merged
        state = record.get("state")
        self._set_state(island, state if state in _REPORTED else "training", clean(record.get("reason") or ""), time_s)

    def _note_progress(self, step: int, time_s: float) -> None:
        if self._progress and step <= self._progress[-1][1]:
            return
        if step <= 0:
            return
        if self._first_progress_s is None:
            self._first_progress_s = time_s
        if time_s < self._first_progress_s + ETA_WARMUP_S:
            self._progress.clear()  # only the newest sample of the warm-up is kept: measuring starts there
        elif len(self._progress) > 1 and time_s - self._progress[-2][0] < 0.5:
            self._progress.pop()
        self._progress.append((time_s, step))

    def _apply_syncer(self, record: Mapping[str, Any], time_s: float) -> None:
        if self._syncer_down and time_s > self._syncer_down_s:
            self._on_syncer_restarted({}, time_s)  # it writes again
        for key in (
            "step", "merges", "merges_per_s", "quorum_time_s", "grace_time_s", "merge_time_s",
            "goodput", "uptime", "tokens_per_s",
        ):  # fmt: skip
            value = number(record, key)
            if value is not None:
                self._syncer[key] = value
        ledger = record.get("tokens")
        if isinstance(ledger, Mapping):
            keys = [str(key) for key in ledger][:16]
            self._ledger = {clean(k, 24): v for k in keys if (v := whole(ledger, k)) is not None}

    # ---- events ----

    def _apply_event(self, event: str, record: Mapping[str, Any], time_s: float) -> None:
        handler: Callable[[Mapping[str, Any], float], None] | None = getattr(self, f"_on_{event}", None)
        if handler is not None:
            handler(record, time_s)
        elif event not in _NOT_SHOWN:
            self._add_log(clean(event, 24), _words(record), "info", time_s)

    def _on_run_started(self, record: Mapping[str, Any], time_s: float) -> None:
        self._started = True
        islands = record.get("islands")
        if isinstance(islands, list | tuple):
            for name in islands:
                self._island(name)
        self.target_steps = whole(record, "target_steps") or self.target_steps
        self._num_fragments = min(whole(record, "fragments") or 0, 100_000)
        self._bigram = number(record, "bigram") or self._bigram
        parts = [_plural(len(self._islands), "island")]
        if self._num_fragments:
            parts.append(_plural(self._num_fragments, "fragment"))
        if self.target_steps:
            parts.append(_plural(self.target_steps, "step"))
        self._add_log("start", ", ".join(parts), "info", time_s)

    def _on_join(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island(record.get("learner"))
        again = island.state in _AWAY
        self._set_state(island, "training", "", time_s)
        island.seen_s = time_s
        step = whole(record, "step")
        at_step = f" at step {step}" if step else ""
        self._add_log("join", f"{island.name} {'is back' if again else 'joined'}{at_step}", "good", time_s)
        self._check_quorum(time_s)

    def _on_leave(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island(record.get("learner"))
        reason = clean(record.get("reason") or "")
        if self._status is not None or _ORDERLY_END.match(reason.lower()):
            self._set_state(island, "finished", reason, time_s)
            self._add_log("leave", f"{island.name} finished at step {island.step}", "info", time_s)
            return
        reason = reason or "no reason given"
        if island.state == "given up" or (island.state == "restarting" and record.get("returns") is not False):
            pass  # its supervisor knew before the syncer did, and its word says more
        elif record.get("returns") is False:
            self._away(island, "left", reason, time_s)
        else:
            self._away(island, "gone", reason, time_s)
        how = "left" if island.state == "left" else "is gone"
        self._add_log("leave", f"{island.name} {how}: {reason}", "info" if how == "left" else "bad", time_s)
        self._check_quorum(time_s)

    def _away(self, island: _Island, state: str, reason: str, time_s: float) -> None:
        self._set_state(island, state, reason, time_s)
        island.last_reason = reason

    def _check_quorum(self, time_s: float) -> None:
        """Say when too few are left for a merge, and when there are enough again."""
        if self._syncer_counts:
            return
        live = self._live()
        lost = live < self.quorum and any(i.state in _AWAY for i in self._islands.values())
        if lost and (not self._quorum_lost or live != self._told_live):
            self._told_live = live
            self._add_log("quorum", f"waiting for quorum {live}/{self.quorum}", "bad", time_s)
        elif not lost and self._quorum_lost:
            self._add_log("quorum", f"quorum is back: {live}/{self.quorum}", "good", time_s)
        self._quorum_lost = lost

    def _live(self) -> int:
        return sum(island.state in _RUNNING for island in self._islands.values())

    def _on_waiting_for_quorum(self, record: Mapping[str, Any], time_s: float) -> None:
        available, timeout_s = whole(record, "available"), number(record, "timeout_s")
        self.quorum = whole(record, "quorum") or self.quorum
        if self._quorum_lost and self._log and self._log[-1].event == "quorum":
            del self._log[-1], self._log_keys[-1]  # what was told by the islands' leaving; the syncer knows more
        self._available = self._live() if available is None else available
        self._syncer_counts = True
        self._quorum_lost = True
        most = "" if timeout_s is None else f", for at most {figures.span(timeout_s)}"
        self._add_log("quorum", f"waiting for quorum {self._available}/{self.quorum}{most}", "bad", time_s)

    def _on_quorum_back(self, record: Mapping[str, Any], time_s: float) -> None:
        self._available = None
        if self._quorum_lost:
            self._quorum_lost = False
            available = whole(record, "available")
            live = self._live() if available is None else available
            self._add_log("quorum", f"quorum is back: {live}/{self.quorum}", "good", time_s)

    # ---- failures, restarts, snapshots ----

    def _island_of(self, process: object) -> _Island | None:
        """The island that a process (island-1, or island-1.0 for one rank of it) belongs to; None: the syncer."""
        name = clean(process, 64)
        if name == "syncer":
            return None
        head, dot, rank = name.rpartition(".")
        return self._island(head if dot and rank.isdecimal() and name not in self._islands else name)

    def _on_restart(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island_of(record.get("process"))
        attempt, delay_s = whole(record, "attempt"), number(record, "delay_s")
        reason = clean(record.get("reason") or "it ended")
        again = f"attempt {attempt}" if attempt else "started again"
        when = f" in {figures.span(delay_s)}" if delay_s else ""
        if island is None:
            self._syncer_restarts += 1
            self._syncer_down, self._syncer_down_s = f"{again}{when}: {reason}", time_s
        else:
            island.restarts += 1
            self._away(island, "restarting", f"{again}{when}: {reason}", time_s)
            island.last_reason = reason
        name = "syncer" if island is None else island.name
        self._add_log("restart", f"{name}, {again}{when}: {reason}", "warn", time_s)
        self._check_quorum(time_s)

    def _on_syncer_restarted(self, record: Mapping[str, Any], time_s: float) -> None:
        if not self._syncer_down:
            return
        self._syncer_down = ""
        for island in self._islands.values():
            island.seen_s = time_s if island.seen_s is not None else None
        self._available = None  # if it still waits, it says so again
        self._add_log("restart", "the syncer is back", "good", time_s)

    def _on_given_up(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island_of(record.get("process"))
        reason = clean(record.get("reason") or "no reason given")
        if island is None:
            self._syncer_down, self._syncer_down_s = f"given up: {reason}", math.inf
        else:
            self._away(island, "given up", reason, time_s)
        self._add_log("given up", f"{'syncer' if island is None else island.name}: {reason}", "bad", time_s)
        self._check_quorum(time_s)

    def _on_unhealthy(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island(record.get("learner"))
        reason, in_a_row = clean(record.get("reason") or "no reason given"), whole(record, "in_a_row")
        text = reason + (f" ({in_a_row} in a row)" if in_a_row and in_a_row > 1 else "")
        if island.state in (*_RUNNING, "starting"):
            self._away(island, "unhealthy", text, time_s)
        self._add_log("unhealthy", f"{island.name}: {text}", "bad", time_s)

    def _on_expelled(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island(record.get("learner"))
        reason = clean(record.get("reason") or "no reason given")
        if island.state not in ("restarting", "given up"):
            self._away(island, "gone", f"taken out: {reason}", time_s)
        self._add_log("expelled", f"{island.name} is taken out until it restarts: {reason}", "bad", time_s)
        self._check_quorum(time_s)

    def _on_fault(self, record: Mapping[str, Any], time_s: float) -> None:
        target, kind = clean(record.get("target") or "?", 64), clean(record.get("kind") or "?", 24)
        self._faults[kind if len(self._faults) < 64 or kind in self._faults else "other"] += 1
        text = clean(record.get("text") or f"{kind}, {target}")
        self._add_log("fault", text if target in text else f"{target}: {text}", "warn", time_s)

    def _on_repaired(self, record: Mapping[str, Any], time_s: float) -> None:
        target, kind = clean(record.get("target") or "?", 64), clean(record.get("kind") or "fault", 24)
        self._add_log("repaired", f"{target}: {kind} is over", "good", time_s)

    def _on_snapshot(self, record: Mapping[str, Any], time_s: float) -> None:
        step, num_bytes, seconds = whole(record, "step"), whole(record, "bytes"), number(record, "seconds")
        path = clean(record.get("path") or "", 4096)
        self._snapshot = Snapshot(step=step, path=path, num_bytes=num_bytes, time_s=time_s)
        size = "" if num_bytes is None else f", {figures.count(num_bytes)}B"
        took = "" if seconds is None else f" in {figures.span(seconds)}"
        self._add_log("snapshot", f"step {'?' if step is None else step}{size}{took}", "info", time_s)

    def _on_snapshot_failed(self, record: Mapping[str, Any], time_s: float) -> None:
        reason = clean(record.get("reason") or "no reason given")
        self._add_log("snapshot", f"failed, training goes on: {reason}", "bad", time_s, key=f"no snapshot {reason}")

    def _on_resumed(self, record: Mapping[str, Any], time_s: float) -> None:
        """The run goes on from a snapshot: what came after it on the tape is undone."""
        step = whole(record, "step")
        self._latest_s = time_s
        self._status, self._status_reason = None, ""
        self._quorum_lost, self._available, self._syncer_down = False, None, ""
        self._progress.clear()
        self._first_progress_s = None
        for island in self._islands.values():
            island.step = island.step if step is None else min(island.step, step)
            island.seen_s = None
            if island.state != "left":
                self._set_state(island, "starting", "", time_s)
        source = clean(record.get("snapshot") or "", 200)
        text = f"at step {'?' if step is None else step}" + (f" from {source}" if source else "")
        self._add_log("resumed", text, "good", time_s)

    def _on_merge(self, record: Mapping[str, Any], time_s: float) -> None:
        fragment, version = whole(record, "fragment"), whole(record, "version")
        learners = record.get("learners")
        names = [self._island(name) for name in learners] if isinstance(learners, list | tuple) else []
        for island in names:
            island.merged_s, island.merged_fragment = time_s, fragment
            if island.state == "unhealthy":
                self._set_state(island, "training", "", time_s)
        self._merges += 1
        if self._available is not None:
            self._on_quorum_back({}, time_s)
        self._merge_times.append(time_s)
        self._last_merge_learners = len(names)
        for key in ("quorum_time_s", "grace_time_s", "merge_time_s"):
            value = number(record, key)
            if value is not None:
                self._syncer[key] = value
        if fragment is not None and version is not None and 0 <= fragment < 100_000:
            self._versions[fragment] = version
        text = f"fragment {fragment} → v{version} from {_plural(len(names), 'island')}"
        reason = clean(record.get("reason") or "")
        self._add_log("merge", text + (f": {reason}" if reason else ""), "info", time_s, key="merge", routine=True)

    def _on_install(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island(record.get("learner"))
        island.installed_step = whole(record, "step")

    def _on_merge_skipped(self, record: Mapping[str, Any], time_s: float) -> None:
        reason = clean(record.get("reason") or "no reason given")
        text = f"fragment {whole(record, 'fragment')}: {reason}"
        self._add_log("no merge", text, "warn", time_s, key="no merge", routine=True)

    def _on_final_cut(self, record: Mapping[str, Any], time_s: float) -> None:
        self._add_log("target", "reached; the last contributions come in", "good", time_s)

    def _on_late(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island(record.get("learner"))
        island.late += 1
        self._late += 1
        kept = ", kept for the next round" if record.get("kept") is True else ""
        reason = clean(record.get("reason") or "its merge was already done") + kept
        text = f"{island.name}, fragment {whole(record, 'fragment')}: {reason}"
        self._add_log("late", text, "warn", time_s, key=f"late {island.name}", routine=True)

    def _on_refused(self, record: Mapping[str, Any], time_s: float) -> None:
        island = self._island(record.get("learner"))
        island.refused += 1
        self._refused += 1
        reason = clean(record.get("reason") or "no reason given")
        text = f"{island.name}, fragment {whole(record, 'fragment')}: {reason}"
        self._add_log("refused", text, "bad", time_s, key=f"refused {island.name} {reason}")

    def _on_evaluation(self, record: Mapping[str, Any], time_s: float) -> None:
        loss, step = number(record, "loss"), whole(record, "step")
        self._bigram = number(record, "bigram") or self._bigram
        if loss is None:
            return
        self._validation.add(float(self._max_step() if step is None else step), loss)
        who = clean(record.get("learner") or "", 64)
        final = "final " if record.get("final") is True else ""
        bigram = f" (bigram model {self._bigram:.3f})" if self._bigram is not None else ""
        text = f"{final}validation loss {loss:.3f}{bigram}" + (f" at step {step}" if step is not None else "")
        self._add_log("eval", text + (f", {who}" if who else ""), "good", time_s)

    def _on_warning(self, record: Mapping[str, Any], time_s: float) -> None:
        text = clean(record.get("message") or "")
        self._add_log("warning", text, "warn", time_s, key=f"warning {text}")

    def _on_error(self, record: Mapping[str, Any], time_s: float) -> None:
        process = clean(record.get("process") or "", 64)
        text = clean(record.get("message") or "")
        self._add_log("error", f"{process}: {text}" if process else text, "bad", time_s)

    def _on_finish(self, record: Mapping[str, Any], time_s: float) -> None:
        self._status = clean(record.get("status") or "finished", 24).replace("_", " ")
        self._status_reason = clean(record.get("reason") or "")
        for island in self._islands.values():
            if island.state in _RUNNING:
                self._set_state(island, "finished", "", time_s)
        level = "good" if self._status == "completed" else "bad"
        text = self._status + (f": {self._status_reason}" if self._status_reason else "")
        self._add_log("finish", text, level, time_s)

    def _add_log(
        self, event: str, text: str, level: str, time_s: float, *, key: str = "", routine: bool = False
    ) -> None:
        """Append a line; one with the same key among the last few is replaced and its count grows."""
        self._log_number += 1
        count = 1
        if key:
            for back in range(1, min(4, len(self._log_keys)) + 1):
                if self._log_keys[-back] == key:
                    count += self._log[-back].count
                    del self._log[-back], self._log_keys[-back]
                    break
        self._log.append(
            LogLine(
                number=self._log_number, time=time_s, event=event, text=text, level=level, count=count, routine=routine
            )
        )
        self._log_keys.append(key)
        if level in ("warn", "bad") and not routine:
            if count > 1 and self._trouble and self._trouble[-1].event == event:
                self._trouble.pop()
            self._trouble.append(self._log[-1])

    # ---- snapshot out ----

    def snapshot(self, now_s: float) -> RunSnapshot:
        """Everything at `now_s`."""
        islands = sorted(self._islands.values(), key=lambda island: natural_key(island.name))
        step, target = self._max_step(), self.target_steps
        progress = None if not target else min(1.0, step / target)
        if self._status == "completed":
            progress = 1.0
        training = [island for island in islands if island.state in ("training", "unhealthy")]
        losses = [island.metrics["loss"] for island in training or islands if "loss" in island.metrics]
        # Of a run that is over: those who were there to its end.
        live = self._live() or sum(island.state == "finished" for island in self._islands.values())
        if self._available is not None and self._status is None:
            live = self._available
        return RunSnapshot(
            name=self.name,
            algorithm=self.algorithm,
            now_s=now_s,
            started=self._started,
            status=self._status,
            status_reason=self._status_reason,
            islands=tuple(self._snapshot_island(island, now_s) for island in islands),
            syncer=self._snapshot_syncer(now_s),
            step=step,
            target_steps=target,
            progress=progress,
            eta_s=self._eta_s(now_s, step),
            tokens=self._ledger.get("processed", int(sum(i.metrics.get("tokens", 0.0) for i in islands))),
            tokens_per_s=self._tokens_per_s(training),
            loss=math.fsum(losses) / len(losses) if losses else None,
            validation=self._validation.all(),
            bigram=self._bigram,
            goodput=self._syncer.get("goodput"),
            uptime=self._syncer.get("uptime"),
            quorum=self.quorum,
            live=live,
            quorum_lost=self._quorum_lost and self._status is None,
            syncer_down=self._syncer_down if self._status is None else "",
            restarts=self._syncer_restarts + sum(island.restarts for island in islands),
            faults=dict(self._faults),
            snapshot=self._snapshot,
            log=tuple(self._log),
            trouble=tuple(self._trouble),
        )

    def _max_step(self) -> int:
        """Steps of the fastest learner, which is what the target is about."""
        return max((island.step for island in self._islands.values()), default=0)

    def _tokens_per_s(self, training: list[_Island]) -> float | None:
        rates = [island.metrics["tokens_per_s"] for island in training if "tokens_per_s" in island.metrics]
        return math.fsum(rates) if rates else (self._syncer.get("tokens_per_s") if self._status is None else None)

    def _eta_s(self, now_s: float, step: int) -> float | None:
        """Seconds to the target at the speed after the warm-up; None while that is unknown."""
        if self._status is not None or not self.target_steps or len(self._progress) < 2:
            return None
        (first_s, first_step), (last_s, last_step) = self._progress[0], self._progress[-1]
        if last_s - first_s < 1.0 or last_step <= first_step:
            return None
        # Samples come every half second or so. Time beyond that without a step is a stall and lowers the speed.
        idle_s = max(0.0, now_s - last_s)
        stalled_s = max(0.0, idle_s - 2.0)
        rate = (last_step - first_step) / (last_s - first_s + stalled_s)
        return max(0.0, (self.target_steps - step) / rate - (idle_s - stalled_s))

    def _snapshot_island(self, island: _Island, now_s: float) -> IslandSnapshot:
        metrics = island.metrics
        staleness = metrics.get("staleness_steps")
        if staleness is None and island.installed_step is not None:
            staleness = max(0, island.step - island.installed_step)
        up_max, down_max = self._link_bps.get(island.name, (None, None))
        running = island.state in _RUNNING
        # Reports come through the syncer: while that is away, nobody's silence says anything.
        heard = island.seen_s is not None and running and not self._syncer_down
        silent = now_s - island.seen_s if heard and island.seen_s is not None else None
        return IslandSnapshot(
            name=island.name,
            state=island.state,
            reason=island.reason,
            last_reason=island.last_reason,
            restarts=island.restarts,
            since_s=island.since_s,
            step=island.step,
            tokens=int(metrics.get("tokens", 0)),
            loss=metrics.get("loss"),
            tokens_per_s=metrics.get("tokens_per_s") if running else None,
            step_time_s=metrics.get("step_time_s"),
            link_up_bps=metrics.get("link_up_bps") if running else None,
            link_down_bps=metrics.get("link_down_bps") if running else None,
            link_up_max_bps=up_max,
            link_down_max_bps=down_max,
            staleness_steps=None if staleness is None else int(staleness),
            last_merge_age_s=None if island.merged_s is None else max(0.0, now_s - island.merged_s),
            last_merge_fragment=island.merged_fragment,
            silent_s=silent if silent is not None and silent >= SILENT_S else None,
            late=island.late,
            refused=island.refused,
            phases=dict(island.phases),
            history=island.history.all(),
        )

    def _snapshot_syncer(self, now_s: float) -> SyncerSnapshot:
        last = self._merge_times[-1] if self._merge_times else None
        num_fragments = max(self._num_fragments, max(self._versions, default=-1) + 1)
        merges_per_s = self._syncer.get("merges_per_s")
        if merges_per_s is None and len(self._merge_times) > 1:
            span = self._merge_times[-1] - self._merge_times[0]
            merges_per_s = (len(self._merge_times) - 1) / span if span > 0 else None
        return SyncerSnapshot(
            merges=max(self._merges, int(self._syncer.get("merges", 0))),
            merges_per_s=merges_per_s,
            quorum_time_s=self._syncer.get("quorum_time_s"),
            grace_time_s=self._syncer.get("grace_time_s"),
            merge_time_s=self._syncer.get("merge_time_s"),
            last_merge_age_s=None if last is None else max(0.0, now_s - last),
            last_learners=self._last_merge_learners,
            late=self._late,
            refused=self._refused,
            versions=tuple(self._versions.get(fragment, 0) for fragment in range(num_fragments)),
            tokens=dict(self._ledger),
        )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _words(record: Mapping[str, Any]) -> str:
    """An event nobody wrote words for: its short values as key=value."""
    parts = [
        f"{clean(key, 24)}={clean(value, 60)}"
        for key, value in record.items()
        if key not in ("time", "event") and isinstance(value, str | int | float)
    ]
    return " ".join(parts[:6])
