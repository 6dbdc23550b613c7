"""What a run measures of itself: metrics.jsonl, and the figures that the summary needs at the end.

Owns: the arithmetic from learners' reports to lines per source and interval. Called by: run.syncer_main, in the actor's
thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco_cli.run.links import RateMeter
from diloco_cli.wire.messages import Report

if TYPE_CHECKING:
    from diloco_cli.run.syncer_main import Syncer

SYNCER_SOURCE = "syncer"
# Phases of a learner's time that are told apart; what it calls them is its own affair, how many is ours.
MAX_PHASES = 32


class Figures:
    """metrics.jsonl, and what the summary needs of it."""

    def __init__(self, syncer: Syncer) -> None:
        self._syncer = syncer
        self._interval_s = syncer.cfg.logging.interval_s
        self.due_s = time.monotonic() + self._interval_s
        self._latest: dict[str, Report] = {}
        self._since: dict[str, _Window] = {}
        self._phases: dict[str, dict[str, float]] = {}
        self._steps: dict[str, int] = {}
        self._train_loss: dict[str, float] = {}
        self._down_rates: dict[str, RateMeter] = {}
        self._last_merge: dict[str, Any] = {}
        self._merges = RateMeter(window_s=2.0)
        self._tokens = RateMeter(window_s=2.0)
        self._first_step_s: float | None = None
        self._end_s: float | None = None

    def joined(self, name: str) -> None:
        """A learner begins with nothing reported."""
        self._since[name] = _Window(time.monotonic())
        self._down_rates[name] = RateMeter()

    def report(self, name: str, report: Report) -> None:
        """Take a learner's report."""
        totals = self._phases.setdefault(name, {})
        for phase, seconds in report.phases.items():
            if phase in totals or len(totals) < MAX_PHASES:
                totals[phase] = totals.get(phase, 0.0) + seconds
        self._since[name].add(report, {p: s for p, s in report.phases.items() if p in totals})
        self._latest[name] = report
        self._steps[name] = report.step
        if "loss" in report.metrics:
            old = self._train_loss.get(name)
            loss = report.metrics["loss"]
            self._train_loss[name] = loss if old is None else old + 0.05 * (loss - old)
        if self._first_step_s is None and report.step > 0:
            self._first_step_s = time.monotonic()
        self._end_s = time.monotonic()

    def merged(self, line: dict[str, Any]) -> None:
        """Keep the newest merge's times for the screen."""
        self._last_merge = line

    def write_if_due(self) -> None:
        """Write a line per source every logging.interval."""
        if time.monotonic() >= self.due_s:
            self.write()

    def write(self, *, force: bool = False) -> None:
        """Write a line per source that has something new."""
        now_s = time.monotonic()
        self.due_s = now_s + self._interval_s
        for name in sorted(self._since):
            window = self._since[name]
            if window.steps or force:
                self._write_learner(name, window, now_s)
                self._since[name] = _Window(now_s, last_step=window.last_step, last_tokens=window.last_tokens)
        self._write_syncer(now_s)

    def _write_learner(self, name: str, window: _Window, now_s: float) -> None:
        syncer = self._syncer
        report = self._latest.get(name)
        if report is None:
            return
        shaper = syncer.peers.shapers.get(name)
        down = self._down_rates[name].add(now_s, shaper.bytes_sent) if shaper else None
        elapsed_s = max(1e-9, now_s - window.began_s)
        metrics = dict(report.metrics)
        metrics.pop("link_down_bps", None)
        line: dict[str, Any] = {
            "time": syncer.now_s(),
            "source": name,
            "step": report.step,
            "tokens": report.tokens,
            "tokens_per_s": window.tokens / elapsed_s,
        }
        # A learner's figures add to ours and replace none.
        line |= {key: value for key, value in metrics.items() if key not in line}
        if window.loss_steps:
            line["loss"] = window.loss_sum / window.loss_steps
        if window.steps and window.step_time_sum:
            line["step_time_s"] = window.step_time_sum / window.steps
        if down is not None:
            line["link_down_bps"] = down
        line |= {f"phase_{phase}_s": seconds for phase, seconds in window.phases.items()}
        syncer.metrics.write(line)

    def _write_syncer(self, now_s: float) -> None:
        core = self._syncer.core
        tokens = core.ledger.summary()
        merges_rate = self._merges.add(now_s, core.num_merges)
        tokens_rate = self._tokens.add(now_s, tokens["processed"])
        self._syncer.metrics.write(
            {
                "time": self._syncer.now_s(),
                "source": SYNCER_SOURCE,
                "step": core.global_step,
                "phase": core.phase,
                "merges": core.num_merges,
                "merges_per_s": None if merges_rate is None else merges_rate / 8.0,
                "quorum_time_s": core.quorum_time.value,
                "sync_time_s": core.sync_time.value,
                "grace_time_s": self._last_merge.get("grace_time_s"),
                "merge_time_s": self._last_merge.get("merge_time_s"),
                "goodput": core.goodput(now_s),
                "uptime": core.uptime.share(now_s),
                "tokens_per_s": None if tokens_rate is None else tokens_rate / 8.0,
                "tokens": tokens,
                "learners": len(core.learners),
            }
        )

    def dump(self) -> dict[str, Any]:
        """What outlives the syncer's process; times as seconds before now."""
        now_s = time.monotonic()
        peers = self._syncer.peers
        return {
            "steps": dict(self._steps),
            "train_loss": dict(self._train_loss),
            "phases": {name: dict(p) for name, p in self._phases.items()},
            "first_step_ago_s": None if self._first_step_s is None else now_s - self._first_step_s,
            "bytes": peers.bytes_by_island(),
        }

    def load(self, saved: Mapping[str, Any], elapsed_s: float) -> None:
        """The inverse, so much later on the run's clock."""
        self._steps = dict(saved["steps"])
        self._train_loss = dict(saved["train_loss"])
        self._phases = {name: dict(p) for name, p in saved["phases"].items()}
        if saved["first_step_ago_s"] is not None:
            self._end_s = time.monotonic()
            self._first_step_s = self._end_s - elapsed_s - saved["first_step_ago_s"]
        for name, count in saved["bytes"].items():
            self._syncer.peers.bytes_up_before[name] = count["up"]
            if (shaper := self._syncer.peers.shapers.get(name)) is not None:
                shaper.departed(count["down"])

    def result(self) -> dict[str, Any]:
        """Figures of the whole run."""
        syncer = self._syncer
        now_s = time.monotonic()
        busy = sum(p.get("compute", 0.0) + p.get("slowed", 0.0) for p in self._phases.values())
        # Sending, installing and waiting are what the network costs a learner.
        network = sum(p.get("wait", 0.0) + p.get("gather", 0.0) + p.get("install", 0.0) for p in self._phases.values())
        training_s = (self._end_s - self._first_step_s) if self._first_step_s and self._end_s else None
        processed = syncer.core.ledger.processed_tokens
        losses = sorted(self._train_loss.values())
        return {
            "steps": dict(sorted(self._steps.items())),
            "train_loss": sum(losses) / len(losses) if losses else None,
            "goodput": syncer.core.goodput(now_s),
            "uptime": syncer.core.uptime.share(now_s),
            "compute_utilization": busy / (busy + network) if busy + network else None,
            "training_time_s": training_s,
            "tokens_per_s": processed / training_s if training_s else None,
            "bytes": syncer.peers.bytes_by_island(),
            "phases_s": {name: dict(p) for name, p in sorted(self._phases.items())},
        }


@dataclass(slots=True)
class _Window:
    """Sums over the reports since the last metric line of a learner."""

    began_s: float
    last_step: int | None = None
    last_tokens: int = 0
    steps: int = 0
    tokens: int = 0
    step_time_sum: float = 0.0
    loss_sum: float = 0.0
    loss_steps: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    def add(self, report: Report, phases: dict[str, float]) -> None:
        steps = report.step - self.last_step if self.last_step is not None else 0
        if self.last_step is None and report.tokens:
            steps = 1
        if steps > 0 and report.step_time_s is not None:
            self.steps += steps
            self.step_time_sum += report.step_time_s * steps
            if "loss" in report.metrics:
                self.loss_sum += report.metrics["loss"] * steps
                self.loss_steps += steps
        self.tokens += max(0, report.tokens - self.last_tokens)
        self.last_step, self.last_tokens = report.step, report.tokens
        for phase, seconds in phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
