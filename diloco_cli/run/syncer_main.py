"""The syncer process: core.syncer with real sockets, a real clock and a merge worker.

Owns: the global parameters Theta, the outer state, the learners' connections, and the two files that everybody else
reads (events.jsonl, metrics.jsonl). Must not decide anything: every rule is in core.syncer.

One thread, the *actor*, owns the core and all state in this file. Everything else posts to its mailbox: receivers
(one per connection), the listener, the merge worker, the launcher's control pipe. So there is no lock in here.

    launcher --control pipe--> one JSON object a line, with "event":
        stop (reason)   exited (island, reason, returns)   added (island)   removed (island, reason)
        fault (island, kind, duration_s, rate_bps, latency_s, loss, payload)
    its end means that the launcher is gone, which stops the run.

A syncer that finds RUN/syncer/core.json goes on from it (run.durable): it was killed, or the run is resumed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import os
import queue
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco_cli import __version__
from diloco_cli.config.schema import load_config
from diloco_cli.core import faults, recovery
from diloco_cli.core.merge import MergeInput
from diloco_cli.core.syncer import COMPLETED, GATHERING, SyncerCore
from diloco_cli.core.types import (
    AcceptReturn,
    CancelTimer,
    Contribution,
    ContributionReceived,
    ContributionRefused,
    Disconnect,
    DropPayload,
    Finish,
    FragmentInstalled,
    IslandAdded,
    IslandRemoved,
    LearnerAlive,
    LearnerJoined,
    LearnerLeft,
    LearnerReport,
    LearnerReturned,
    MergeFinished,
    Persist,
    Publish,
    Pull,
    Record,
    SendState,
    SetTimer,
    StartMerge,
    StopLearners,
    StopRequested,
    SyncerEffect,
    SyncerEvent,
    TakeSnapshot,
    TimerFired,
)
from diloco_cli.observe.events import JsonlWriter, read_jsonl
from diloco_cli.run import process, record, snapshots
from diloco_cli.run.credentials import load
from diloco_cli.run.durable import CORE, Durable
from diloco_cli.run.global_model import GlobalModel, PayloadStore
from diloco_cli.run.links import LinkFault, make_shaper
from diloco_cli.run.listener import Listener
from diloco_cli.run.metrics import Figures
from diloco_cli.run.peers import Peer, Peers
from diloco_cli.run.ranks import failed_mark, rank_state
from diloco_cli.run.rundir import RunDir
from diloco_cli.run.settings import syncer_settings
from diloco_cli.wire.messages import (
    ContributionMsg,
    EvaluateMsg,
    FaultMsg,
    FinishMsg,
    Goodbye,
    Installed,
    MergedMsg,
    PullMsg,
    Report,
    Returning,
    SnapshotMsg,
    StopMsg,
    Validation,
    Welcome,
)

log = logging.getLogger(__name__)

NAME = "syncer"
# Rare events that the syncer's log repeats; the tape has all of them.
LOGGED_EVENTS = {
    "run_started",
    "join",
    "leave",
    "refused",
    "rejected",
    "refused_connection",
    "warning",
    "error",
    "finish",
    "return",
    "expelled",
    "snapshot",
    "snapshot_failed",
    "syncer_restarted",
    "resumed",
}
EVALUATION_TIMEOUT_S = 600.0
GOODBYE_TIMEOUT_S = 3.0
# Time for the message that tells a learner of its link's fault to get through.
FAULT_DELAY_S = 0.1
# A learner's part of a snapshot comes at its next step boundary, and is written in the background.
SNAPSHOT_TIMEOUT_S, LAST_SNAPSHOT_TIMEOUT_S = 120.0, 5.0


def main() -> None:
    """Entry point: `-m diloco_cli.run.syncer_main RUN LISTEN_FD CONTROL_FD`, both descriptors inherited."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("listen_fd", type=int)
    parser.add_argument("control_fd", type=int)
    args = parser.parse_args()
    process.die_with_parent()
    sys.exit(run_syncer(args.run, socket.socket(fileno=args.listen_fd), args.control_fd))


def run_syncer(path: Path, listening: socket.socket, control_fd: int) -> int:
    """The syncer's whole life; returns its exit code."""
    run = RunDir(path)
    process.ignore_terminal_signals()
    return process.run_guarded(run, NAME, lambda: Syncer(run, listening, control_fd).run_to_end())


def run_started_s(run: RunDir) -> float:
    """The monotonic time at which the launcher started the run: what the times of all records count from."""
    return float(json.loads((run.path / "syncer.json").read_text(encoding="utf-8"))["started_monotonic_s"])


class Syncer:
    """The actor."""

    def __init__(self, run: RunDir, listening: socket.socket, control_fd: int) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.run = run
        self.cfg = load_config(run.config)
        self.started_s = run_started_s(run)
        self.events = JsonlWriter(run.events)
        self.metrics = JsonlWriter(run.metrics)
        self.mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.model = GlobalModel(self.cfg)
        self.layout = self.model.layout
        self.core = SyncerCore(syncer_settings(self.cfg, len(self.layout)))
        self.durable = Durable(run.durable, len(self.layout))
        self.store = PayloadStore(self.cfg, self.layout)
        self.peers = Peers(self.cfg, self.layout, self.store, self)
        self.finish: Finish | None = None
        self._merge_lines: dict[int, dict[str, Any]] = {}
        """Of merges whose digest is not known yet."""
        self._last_lines: dict[int, dict[str, Any]] = {}
        self._merges_under_way = 0
        self._timers: dict[str, float] = {}
        self._timer_heap: list[tuple[float, str]] = []
        self._validation: Validation | None = None
        self._evaluating: str | None = None
        self._evaluated_by: set[str] = set()
        self._figures = Figures(self)
        self._cut = 0
        """Step of the newest snapshot plus 1; 0: none."""
        self._snapshot: _SnapshotUnderWay | None = None
        self._not_kept_because = ""
        self._merged_version = [0] * len(self.layout)
        """Of the merge worker: the version that is in the model."""
        self._merge_jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._merge_worker, name="merge", daemon=True).start()
        threading.Thread(target=self._read_control, args=(control_fd,), name="control-pipe", daemon=True).start()
        shapers = {
            name: make_shaper(self.cfg.link(name).down, self.cfg.run.seed * 1000 + 500 + i)
            for i, name in enumerate(self.cfg.island_names())
        }
        self.peers.shapers = shapers
        self.listener = Listener(
            listening,
            load(run.keys, NAME),
            lambda channel, hello: self.post(lambda: self.peers.connected(channel, hello)),
            shaper_for=lambda island: shapers.get(island) or make_shaper(self.cfg.link(island).down, 0),
            on_refused=lambda address, reason: self.post(
                lambda: self.record("refused_connection", {"address": address, "reason": reason})
            ),
        )

    # ---- the actor's loop ------------------------------------------------------------------------

    def post(self, action: Callable[[], None]) -> None:
        """Have the actor run this. From any thread."""
        self.mailbox.put(action)

    def run_to_end(self) -> None:
        """Serve until the protocol finishes, then evaluate, save, and say goodbye to everybody."""
        process.beat(self.run, NAME, self.cfg.sync.heartbeat_interval_s)
        self.perform(self._begin())
        self._serve_until(lambda: self.finish is not None)
        assert self.finish is not None
        self._serve_until(lambda: not self._merges_under_way)
        self._figures.write(force=True)
        if self.finish.status == COMPLETED:
            self._evaluate_with_somebody()
        self._take_last_snapshot()
        self._save_final()
        self._record_result()
        self._say_goodbye()

    def _begin(self) -> tuple[SyncerEffect, ...]:
        """Start, or go on from what outlived the process before."""
        saved = self.durable.read()
        now_s = time.monotonic()
        if saved is None:
            self._record_start()
            return self.core.start(now_s)
        resumed = saved.get("resumed_from")
        settings = self.core.settings
        self.durable.load(saved, self.model)
        self._merged_version = list(saved["core"]["versions"])
        # Learners of a killed syncer are there; those of a run that is resumed have to be started.
        self.core, effects = recovery.load(
            settings,
            saved["core"],
            now_s,
            elapsed_s=0.0 if resumed else now_s - saved["core"]["saved_at_s"],
            patience_s=settings.start_timeout_s if resumed else settings.heartbeat_timeout_s,
        )
        self._figures.load(saved["figures"], 0.0 if resumed else now_s - saved["core"]["saved_at_s"])
        if resumed:
            self._record_start()
            self.record("resumed", {"step": self.core.global_step, "snapshot": resumed})
        else:
            self._complete_tape(saved["lines"])
            self.record("syncer_restarted", {"step": self.core.global_step, "merges": self.core.num_merges})
        return effects

    def _serve_until(self, done: Callable[[], bool], timeout_s: float = float("inf")) -> None:
        """Run posted actions and timers until done() or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not done():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return
            self._fire_timers(now_s)
            self.peers.drop_overdue(now_s)
            if done():
                return
            next_s = min(self._next_timer_s(), self._figures.due_s, self.peers.due_s, deadline_s)
            try:
                action = self.mailbox.get(timeout=max(0.0, next_s - time.monotonic()))
            except queue.Empty:
                pass
            else:
                action()
            self._figures.write_if_due()

    def feed(self, event: SyncerEvent) -> None:
        """Give the core an event and do what it says."""
        self.perform(self.core.handle(event, time.monotonic()))

    def _fire_timers(self, now_s: float) -> None:
        while self._timer_heap and self._timer_heap[0][0] <= now_s:
            at_s, key = heapq.heappop(self._timer_heap)
            if self._timers.get(key) == at_s:
                del self._timers[key]
                self.feed(TimerFired(key=key))

    def _next_timer_s(self) -> float:
        return self._timer_heap[0][0] if self._timer_heap else float("inf")

    def _set_timer(self, key: str, at_s: float) -> None:
        self._timers[key] = at_s
        heapq.heappush(self._timer_heap, (at_s, key))

    # ---- effects ---------------------------------------------------------------------------------

    def perform(self, effects: tuple[SyncerEffect, ...]) -> None:
        """Do what the core decided, in its order."""
        for effect in effects:
            match effect:
                case Record():
                    self.record(effect.event, effect.data)
                case Pull():
                    for learner in effect.to:
                        self.peers.tell(learner, PullMsg(fragment=effect.fragment))
                case StartMerge():
                    self._start_merge(effect)
                case Persist():
                    self._persist()
                case TakeSnapshot():
                    self._take_snapshot(effect.step)
                case AcceptReturn():
                    self._welcome(effect.learner, effect.global_step, self.core.versions, returned=True)
                case Publish():
                    self._publish(effect.fragment, effect.version, effect.to, effect.taken)
                case SendState():
                    self._send_state(effect)
                case DropPayload():
                    self.store.free(effect.handle)
                case SetTimer():
                    self._set_timer(effect.key, effect.at_s)
                case CancelTimer():
                    self._timers.pop(effect.key, None)
                case StopLearners():
                    for learner in effect.to:
                        self.peers.tell(learner, FinishMsg(reason=effect.reason))
                case Disconnect():
                    self.peers.disconnect(effect.learner, effect.reason)
                case Finish():
                    self.finish = effect

    def _start_merge(self, effect: StartMerge) -> None:
        """Hand the merge to the worker; the core hears of the end through the mailbox."""
        inputs = self.store.merge_inputs(effect.members, self.model)

        def job() -> None:
            if self.cfg.sync.record:
                self._keep_contributions(effect, inputs)
            payload = self.model.merge(effect.fragment, inputs)
            self._merged_version[effect.fragment] = effect.version
            for fragment in {effect.fragment, *self.durable.missing(self._merged_version)}:
                self.durable.write(fragment, self._merged_version[fragment], self.model)
            self.post(lambda: self._merge_finished(effect, payload))
            # The learners need not wait for the digest; the tape's line does.
            digest = self.model.digest(effect.fragment)
            self.post(lambda: self._record_merge(effect.fragment, digest))

        self._merges_under_way += 1
        self._merge_jobs.put(job)

    def _keep_contributions(self, effect: StartMerge, inputs: list[MergeInput]) -> None:
        """For `diloco replay`. In the merge worker."""
        try:
            record.write(self.run.record, effect.fragment, effect.version, inputs)
        except OSError as error:
            reason = f"version {effect.version} of fragment {effect.fragment} is not recorded: {error.strerror}"
            self.post(lambda: self.record("warning", {"message": reason}))

    def _merge_finished(self, effect: StartMerge, payload: Tensor) -> None:
        for member in effect.members:
            self.store.free(member.handle)
        self.model.adopt(effect.fragment, effect.version, payload)
        self.feed(MergeFinished(fragment=effect.fragment, version=effect.version))

    def _merge_worker(self) -> None:
        while (job := self._merge_jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                failed = error  # bugs of ours end the process loudly, in the actor's thread

                def fail(failed: BaseException = failed) -> None:
                    raise failed

                self.post(fail)
                return

    def _publish(self, fragment: int, version: int, to: tuple[str, ...], taken: tuple[str, ...]) -> None:
        payload = self.model.wire_payload(fragment)
        for learner in to:
            message = MergedMsg(
                fragment=fragment,
                version=version,
                wire=self.cfg.network.wire_down.value,
                numel=self.layout.fragments[fragment].numel,
                taken=learner in taken,
                global_step=self.core.global_step,
                cut=self._cut,
            )
            self.peers.send_fragment(learner, message, payload)
        self.model.forget(fragment, self.core.bases_in_use(fragment))

    def _send_state(self, effect: SendState) -> None:
        self._welcome(effect.learner, effect.global_step, effect.versions, taken_steps=effect.taken_steps)
        for fragment in range(len(self.layout)):
            self._publish(fragment, effect.versions[fragment], (effect.learner,), ())

    def _welcome(
        self,
        learner: str,
        global_step: int,
        versions: Sequence[int],
        *,
        returned: bool = False,
        taken_steps: int = 0,
    ) -> None:
        adopted = {"inner_steps": self.cfg.sync.inner_steps, "target_steps": self.core.settings.target_steps}
        message = Welcome(
            settings=adopted,
            global_step=global_step,
            versions=list(versions),
            returned=returned,
            taken_steps=taken_steps,
        )
        self.peers.tell(learner, message)

    # ---- what outlives this process --------------------------------------------------------------------

    def _saved(self) -> dict[str, Any]:
        return {
            "core": recovery.dump(self.core, time.monotonic()),
            "figures": self._figures.dump(),
            "lines": {str(fragment): line for fragment, line in self._last_lines.items()},
        }

    def _complete_tape(self, lines: dict[str, dict[str, Any]]) -> None:
        """A merge's line waits for its digest: the syncer may have been killed in between."""
        newest = {}
        for line in read_jsonl(self.run.events):
            if line.get("event") == "merge":
                newest[line["fragment"]] = line["version"]
        for name, line in sorted(lines.items()):
            self._last_lines[int(name)] = line
            if newest.get(int(name), 0) < line["version"]:
                self.events.write({**line, "digest": self.model.digest(int(name))})

    def _persist(self) -> None:
        """Before what is new is told to anybody. A disk that takes nothing is said, and stops nothing."""
        if self.durable.commit(self._saved()):
            if self._not_kept_because:
                self.record("warning", {"message": "merges are kept on the disk again"})
            self._not_kept_because = ""
        elif not self._not_kept_because:
            self._not_kept_because = self.durable.failed
            lost = "a syncer that is killed now goes back to before"
            self.record("warning", {"message": f"merges are not kept on the disk: {self.durable.failed}; {lost}"})

    def _take_snapshot(self, step: int) -> None:
        """Cut here. Our part is on the disk already, and copied in the background; every learner saves its own at its
        next step boundary."""
        if self._snapshot is not None:
            self.record("snapshot_failed", {"step": step, "reason": "the one before is still being written"})
            return
        try:
            saved = self._saved()
            folder = snapshots.begin(self.run.checkpoints, step)
            pinned = self.durable.pin(saved["core"]["versions"])
        except OSError as error:
            self._snapshot_failed(step, error)
            return
        self._cut = step + 1
        islands = self.peers.announced()
        for name in islands:
            self.peers.tell(name, SnapshotMsg(step=step))
        ranks = {name: self.cfg.num_ranks(name) for name in islands}
        self._snapshot = _SnapshotUnderWay(folder, step, ranks, saved, pinned)
        threading.Thread(target=self._finish_snapshot, args=(self._snapshot,), name="snapshot", daemon=True).start()

    def _finish_snapshot(self, under_way: _SnapshotUnderWay) -> None:
        """Wait for the learners' parts, then make it count. In a thread of its own."""
        began_s = time.monotonic()
        try:
            self.durable.copy(under_way.pinned, under_way.folder)
            (under_way.folder / CORE).write_text(json.dumps(under_way.saved, allow_nan=False), encoding="ascii")
            islands = under_way.wait()
            meta = {
                "step": under_way.step,
                "time": self.now_s(),
                "diloco": __version__,
                "layout_hash": self.layout.hash,
                "islands": islands,
            }
            num_bytes = snapshots.finish(under_way.folder, meta)
            snapshots.retain(self.run.checkpoints, self.cfg.run.snapshot_keep)
        except OSError as error:
            failed = error
            self.post(lambda: self._snapshot_failed(under_way.step, failed))
            return
        line = {
            "step": under_way.step,
            "path": str(under_way.folder.relative_to(self.run.path)),
            "bytes": num_bytes,
            "seconds": time.monotonic() - began_s,
            "islands": islands,
        }

        def done() -> None:
            self._snapshot = None
            self.record("snapshot", line)

        self.post(done)

    def _snapshot_failed(self, step: int, error: OSError) -> None:
        self._snapshot = None
        reason = f"{error.strerror or error}"
        self.record("snapshot_failed", {"step": step, "reason": f"{reason}; training goes on without"})

    def _take_last_snapshot(self) -> None:
        """Of the run's end, so that it can be resumed from there. Nobody waits long for it."""
        deadline_s = time.monotonic() + LAST_SNAPSHOT_TIMEOUT_S
        self._serve_until(lambda: self._snapshot is None, LAST_SNAPSHOT_TIMEOUT_S)
        if self._snapshot is not None or self.core.phase == GATHERING or not self.core.global_step:
            return
        self._take_snapshot(self.core.global_step)
        self._serve_until(lambda: self._snapshot is None, deadline_s - time.monotonic())

    # ---- what peers say (called by Peers, in the actor's thread) --------------------------------

    def on_joined(self, peer: Peer) -> None:
        """Both connections of a learner are there and its layout is ours."""
        self._figures.joined(peer.name)
        self.feed(LearnerJoined(learner=peer.name, session=peer.session))

    def on_left(self, name: str, reason: str) -> None:
        """A learner's connection is over."""
        self._left(name, reason, returns=True)

    def _left(self, name: str, reason: str, *, returns: bool) -> None:
        self.feed(LearnerLeft(learner=name, reason=reason, returns=returns))
        if self._evaluating == name:
            self._evaluating = None
        if self._snapshot is not None:
            self._snapshot.gone.add(name)

    def _on_returning(self, peer: Peer, message: Returning) -> None:
        count = len(self.layout)
        if any(len(values) != count for values in (message.versions, message.fragment_tokens, message.sent_at)):
            self.peers.disconnect(peer.name, "it returns with another number of fragments")
            return
        self._figures.joined(peer.name)
        self.feed(
            LearnerReturned(
                learner=peer.name,
                session=peer.session,
                step=message.step,
                tokens=message.tokens,
                joined_at_step=message.joined_at_step,
                versions=tuple(message.versions),
                fragment_tokens=tuple(message.fragment_tokens),
                sent_at=tuple(step - 1 for step in message.sent_at),
            )
        )

    def on_message(self, peer: Peer, message: object) -> None:
        """A control message of a learner that has joined."""
        match message:
            case Report():
                self._figures.report(peer.name, message)
                self.feed(
                    LearnerReport(
                        learner=peer.name, step=message.step, tokens=message.tokens, step_time_s=message.step_time_s
                    )
                )
            case Returning():
                self._on_returning(peer, message)
            case Installed():
                self._on_installed(peer, message)
            case Validation():
                self._on_validation(peer, message)
            case Goodbye():
                peer.goodbye = message.reason
            case _:
                self.peers.disconnect(peer.name, f"unexpected {type(message).__name__}")

    def _on_installed(self, peer: Peer, message: Installed) -> None:
        if message.fragment >= len(self.layout) or message.version > self.core.versions[message.fragment]:
            self.peers.disconnect(peer.name, "it installed something that does not exist")
            return
        self.feed(
            FragmentInstalled(
                learner=peer.name,
                fragment=message.fragment,
                version=message.version,
                tokens=message.tokens,
                steps=message.steps,
                step=message.step,
                waited_s=message.waited_s,
            )
        )
        self.model.forget(message.fragment, self.core.bases_in_use(message.fragment))

    def _on_validation(self, peer: Peer, message: Validation) -> None:
        data = {"learner": peer.name, "step": message.step, "loss": message.loss, "final": message.final}
        self.record("evaluation", {**data, "bigram": message.bigram, "tokens": message.tokens})
        if message.final and peer.name in self._evaluated_by:
            self._validation = message

    def on_alive(self, name: str) -> None:
        """Bulk bytes are arriving."""
        self.feed(LearnerAlive(learner=name))

    def on_contribution(self, name: str, message: ContributionMsg, handle: int, problem: str) -> None:
        """A whole contribution is in the store; `problem` says why it may not count, if so."""
        contribution = Contribution(
            learner=name,
            fragment=message.fragment,
            base_version=message.base_version,
            tokens=message.tokens,
            steps=message.steps,
            sent_at_step=message.sent_at_step,
            handle=handle,
        )
        # What starts from a version that is still to come is for the core to refuse.
        known = self.model.knows(message.fragment, message.base_version)
        # What was merged already is merely late, whatever is known of its base.
        known = known or self.core.has_merged(name, message.fragment, message.base_version)
        bad = bool(problem)
        if not problem and not known and message.base_version <= self.core.versions[message.fragment]:
            problem = f"it starts from version {message.base_version}, which is no longer known"
        if problem:
            self.feed(ContributionRefused(contribution=contribution, reason=problem, bad=bad))
        else:
            self.feed(ContributionReceived(contribution=contribution))

    # ---- the launcher ----------------------------------------------------------------------------

    def _read_control(self, fd: int) -> None:
        with os.fdopen(fd, "rb") as pipe:
            for line in pipe:
                try:
                    said = json.loads(line)
                except ValueError:
                    continue
                self.post(lambda said=said: self._on_control(said))  # type: ignore[misc]
        self.post(lambda: self.feed(StopRequested(reason="the launcher is gone")))

    def _on_control(self, said: dict[str, Any]) -> None:
        if said.get("event") == "stop":
            self.feed(StopRequested(reason=str(said.get("reason", "stop requested"))))
        elif said.get("event") == "exited":
            name = str(said["island"])
            self.peers.forget(name)
            self._left(name, str(said.get("reason", "its process ended")), returns=bool(said.get("returns", False)))
        elif said.get("event") == "added":
            self._add(str(said["island"]))
        elif said.get("event") == "removed":
            name = str(said["island"])
            self.peers.forget(name)
            self.feed(IslandRemoved(learner=name, reason=str(said.get("reason", "it was taken out"))))
        elif said.get("event") == "fault":
            self._apply_fault(said)

    def _add(self, name: str) -> None:
        """An island that the run did not begin with. The launcher has written it into the configuration."""
        self.cfg = load_config(self.run.config)
        index = self.cfg.island_names().index(name)
        self.peers.shapers[name] = make_shaper(self.cfg.link(name).down, self.cfg.run.seed * 1000 + 500 + index)
        self.feed(IslandAdded(learner=name, chips=self.cfg.num_ranks(name)))

    def _apply_fault(self, said: dict[str, Any]) -> None:
        """A failure on purpose of an island's link, or of what it sends: each side does its own half."""
        name, kind, duration_s = str(said["island"]), str(said["kind"]), float(said.get("duration_s") or 0.0)
        message = FaultMsg(
            kind=kind,
            duration_s=duration_s,
            rate_bps=said.get("rate_bps"),
            latency_s=said.get("latency_s"),
            loss=float(said.get("loss") or 0.0),
            payload=str(said.get("payload") or ""),
        )
        self.peers.tell(name, message)
        if kind not in (faults.PARTITION, faults.DEGRADE):
            return
        until_s = time.monotonic() + duration_s
        cut = kind == faults.PARTITION
        fault = LinkFault(
            until_s=until_s, cut=cut, rate_bps=message.rate_bps, latency_s=message.latency_s, loss=message.loss
        )

        def apply() -> None:
            # After the message has left, which it would otherwise hold back.
            if (shaper := self.peers.shapers.get(name)) is not None:
                shaper.set_fault(fault)
            if cut:
                self.peers.cut_off(name, until_s)

        timer = threading.Timer(FAULT_DELAY_S, lambda: self.post(apply))
        timer.daemon = True
        timer.start()

    # ---- the end ---------------------------------------------------------------------------------

    def _evaluate_with_somebody(self) -> None:
        """Have one learner validate the final parameters, which all of them hold; another one if it goes away."""
        while self._validation is None:
            candidates = [n for n in self.peers.names() if n not in self._evaluated_by]
            if not candidates:
                self.record("warning", {"message": "no learner was left to validate the final parameters"})
                return
            name = candidates[0]
            self._evaluating = name
            self._evaluated_by.add(name)
            self.peers.tell(name, EvaluateMsg())
            self._serve_until(
                lambda name=name: self._validation is not None or self._evaluating != name,  # type: ignore[misc]
                EVALUATION_TIMEOUT_S,
            )

    def _save_final(self) -> None:
        from diloco_cli.train.export import save_final

        try:
            save_final(self.run.path, self.model.tensors(), self.cfg, self.model.tokenizer)
        except OSError as error:
            self.record("error", {"process": NAME, "message": f"the final parameters could not be saved: {error}"})
            raise

    def _say_goodbye(self) -> None:
        assert self.finish is not None
        for name in self.peers.names():
            self.peers.tell(name, StopMsg(reason=self.finish.reason))
        self._serve_until(lambda: not self.peers.names(), GOODBYE_TIMEOUT_S)
        self.listener.close()
        self.peers.close()
        self.events.close()
        self.metrics.close()

    # ---- records ---------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the run started: the time of every record."""
        return round(time.monotonic() - self.started_s, 4)

    def record(self, event: str, data: Any) -> None:
        """One line of the event tape."""
        line = {"time": self.now_s(), "event": event, **data}
        if event in LOGGED_EVENTS:
            log.info("%s %s", event, " ".join(f"{k}={v}" for k, v in data.items()))
        if event == "merge":
            self._figures.merged(line)
            self._merge_lines[line["fragment"]] = self._last_lines[line["fragment"]] = line
        else:
            self.events.write(line)

    def _record_merge(self, fragment: int, digest: str) -> None:
        """Write a merge's line, now that the digest of its result is known."""
        self._merges_under_way -= 1
        self.events.write({**self._merge_lines.pop(fragment), "digest": digest})

    def _record_start(self) -> None:
        self.record(
            "run_started",
            {
                "islands": self.cfg.island_names(),
                "target_steps": self.core.settings.target_steps,
                "fragments": len(self.layout),
                "fragment_numel": [f.numel for f in self.layout.fragments],
                "fragments_requested": self.layout.requested,
                "fragments_reason": self.layout.reason,
                "quorum": self.cfg.sync.quorum,
                "algorithm": self.cfg.sync.algorithm.value,
                "parameters": self.layout.numel,
                "layout_hash": self.layout.hash,
            },
        )

    def _record_result(self) -> None:
        """Everything the launcher needs for summary.json."""
        assert self.finish is not None
        self.record(
            "result",
            {
                "status": self.finish.status,
                "reason": self.finish.reason,
                "merges": self.core.num_merges,
                "tokens": self.core.ledger.summary(),
                "validation": self._validation.loss if self._validation else None,
                "bigram": self._validation.bigram if self._validation else None,
                **self._figures.result(),
            },
        )


@dataclass
class _SnapshotUnderWay:
    """A snapshot that waits for the learners' parts: `ranks` of each island; `gone`: islands that left meanwhile.

    saved, pinned: the syncer's part, as of the cut.
    """

    folder: Path
    step: int
    ranks: dict[str, int]
    saved: dict[str, Any]
    pinned: dict[tuple[int, int], int]
    gone: set[str] = field(default_factory=set)

    def wait(self) -> list[str]:
        """Until every island's part is there, or will not come; returns the islands whose part is whole."""
        deadline_s = time.monotonic() + SNAPSHOT_TIMEOUT_S
        waiting = set(self.ranks)
        whole: list[str] = []
        while waiting:
            for name in sorted(waiting):
                stems = [rank_state(self.folder, name, r) for r in range(self.ranks[name])]
                if all(stem.with_name(stem.name + ".json").exists() for stem in stems):
                    whole.append(name)
                    waiting.discard(name)
                elif name in self.gone or any(failed_mark(stem).exists() for stem in stems):
                    waiting.discard(name)
            if time.monotonic() > deadline_s:
                break
            if waiting:
                time.sleep(0.02)
        for name in set(self.ranks) - set(whole):
            shutil.rmtree(self.folder / "islands" / name, ignore_errors=True)
        return sorted(whole)


if __name__ == "__main__":
    main()
