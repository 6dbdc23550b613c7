"""The syncer process: core.syncer with real sockets, a real clock and a merge worker.

Owns: the global parameters Theta, the outer state, the learners' connections, and the two files that everybody else
reads (events.jsonl, metrics.jsonl). Must not decide anything: every rule is in core.syncer.

One thread, the *actor*, owns the core and all state in this file. Everything else posts to its mailbox: receivers
(one per connection), the listener, the merge worker, the launcher's control pipe. So there is no lock in here.

    launcher --control pipe--> {"event": "stop"} | {"event": "exited", "island": ...}; its end means that the launcher
    is gone, which stops the run.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco_cli.config.schema import load_config
from diloco_cli.core.syncer import COMPLETED, SyncerCore
from diloco_cli.core.types import (
    CancelTimer,
    Contribution,
    ContributionReceived,
    ContributionRefused,
    Disconnect,
    DropPayload,
    Finish,
    FragmentInstalled,
    LearnerAlive,
    LearnerJoined,
    LearnerLeft,
    LearnerReport,
    MergeFinished,
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
    TimerFired,
)
from diloco_cli.observe.events import JsonlWriter
from diloco_cli.run import process
from diloco_cli.run.credentials import load
from diloco_cli.run.global_model import GlobalModel, PayloadStore
from diloco_cli.run.links import make_shaper
from diloco_cli.run.listener import Listener
from diloco_cli.run.metrics import Figures
from diloco_cli.run.peers import Peer, Peers
from diloco_cli.run.rundir import RunDir
from diloco_cli.run.settings import syncer_settings
from diloco_cli.wire.messages import (
    ContributionMsg,
    EvaluateMsg,
    FinishMsg,
    Goodbye,
    Installed,
    MergedMsg,
    PullMsg,
    Report,
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
}
EVALUATION_TIMEOUT_S = 600.0
GOODBYE_TIMEOUT_S = 3.0


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
        self.store = PayloadStore(self.cfg, self.layout)
        self.peers = Peers(self.cfg, self.layout, self.store, self)
        self.finish: Finish | None = None
        self._merge_lines: dict[int, dict[str, Any]] = {}
        self._merges_under_way = 0
        self._timers: dict[str, float] = {}
        self._timer_heap: list[tuple[float, str]] = []
        self._validation: Validation | None = None
        self._evaluating: str | None = None
        self._evaluated_by: set[str] = set()
        self._figures = Figures(self)
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
        self._record_start()
        self.perform(self.core.start(time.monotonic()))
        self._serve_until(lambda: self.finish is not None)
        assert self.finish is not None
        self._serve_until(lambda: not self._merges_under_way)
        self._figures.write(force=True)
        if self.finish.status == COMPLETED:
            self._evaluate_with_somebody()
        self._save_final()
        self._record_result()
        self._say_goodbye()

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
            payload = self.model.merge(effect.fragment, inputs)
            self.post(lambda: self._merge_finished(effect, payload))
            # The learners need not wait for the digest; the tape's line does.
            digest = self.model.digest(effect.fragment)
            self.post(lambda: self._record_merge(effect.fragment, digest))

        self._merges_under_way += 1
        self._merge_jobs.put(job)

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
            )
            self.peers.send_fragment(learner, message, payload)
        self.model.forget(fragment, self.core.bases_in_use(fragment))

    def _send_state(self, effect: SendState) -> None:
        learner = effect.learner
        adopted = {"inner_steps": self.cfg.sync.inner_steps, "target_steps": self.core.settings.target_steps}
        self.peers.tell(
            learner, Welcome(settings=adopted, global_step=effect.global_step, versions=list(effect.versions))
        )
        for fragment in range(len(self.layout)):
            self._publish(fragment, effect.versions[fragment], (learner,), ())

    # ---- what peers say (called by Peers, in the actor's thread) --------------------------------

    def on_joined(self, peer: Peer) -> None:
        """Both connections of a learner are there and its layout is ours."""
        self._figures.joined(peer.name)
        self.feed(LearnerJoined(learner=peer.name))

    def on_left(self, name: str, reason: str) -> None:
        """A learner's connection is over."""
        self.feed(LearnerLeft(learner=name, reason=reason))
        if self._evaluating == name:
            self._evaluating = None

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
        if not problem and not known and message.base_version <= self.core.versions[message.fragment]:
            problem = f"it starts from version {message.base_version}, which is no longer known"
        if problem:
            self.feed(ContributionRefused(contribution=contribution, reason=problem))
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
            self.on_left(name, str(said.get("reason", "its process ended")))

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
            self._merge_lines[line["fragment"]] = line
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


if __name__ == "__main__":
    main()
