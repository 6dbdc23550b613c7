"""The ranks of an island at work: rank 0 leads, the others follow its plan.

Owns: the binding of core.learner (decisions), train.loop (steps), train.island (fragments on all ranks) and
run.learner_link (the wire). Rank 0 decides; before each step it broadcasts a *plan* inside the island, a short list of
operations, so that all ranks gather, install and stop at the same step. Called by: run.learner_main, benchmarks.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.config.schema import Config
from diloco_cli.core.fragments import Layout
from diloco_cli.core.learner import LearnerCore
from diloco_cli.core.types import (
    DiscardPayload,
    InstallFragment,
    LearnerEffect,
    MergedReceived,
    PullReceived,
    Reconnected,
    SendFragment,
    StepFinished,
    StopReceived,
)
from diloco_cli.errors import DilocoError
from diloco_cli.observe.events import JsonlWriter
from diloco_cli.run import snapshots
from diloco_cli.run.learner_link import Connected, Incoming, Lost, Merged, SyncerLink, refused
from diloco_cli.run.rundir import RunDir
from diloco_cli.run.settings import learner_settings
from diloco_cli.train.data import bigram_loss
from diloco_cli.train.island import Island
from diloco_cli.train.loop import StepResult, Trainer
from diloco_cli.wire.messages import (
    EvaluateMsg,
    FaultMsg,
    FinishMsg,
    Installed,
    PullMsg,
    Reject,
    Report,
    Returning,
    SnapshotMsg,
    StopMsg,
    Validation,
    Welcome,
)

log = logging.getLogger(__name__)

# Operations of a plan: each is followed by its arguments.
STEP, GATHER, INSTALL, LOAD, EVALUATE, STOP, SET_STEP, PLACE, SNAPSHOT, LEAVE, OPTIMIZER = range(1, 12)
PLAN_WORDS_OF = {
    STEP: 0,
    GATHER: 1,
    INSTALL: 1,
    LOAD: 1,
    EVALUATE: 0,
    STOP: 0,
    SET_STEP: 1,
    PLACE: 1,
    SNAPSHOT: 1,
    LEAVE: 0,
    OPTIMIZER: 2,
}
# Where an optimizer's state comes from, instead of a snapshot's step: what the island saved when it left; nowhere.
FROM_LEFT, FROM_NOWHERE = -1, -2

# While it waits, rank 0 still tells the other ranks so within their collective time-out.
WAIT_SLICE_S = 1.0


# ---- every rank ----------------------------------------------------------------------------------


class Follower:
    """Performs plans. On ranks other than 0 this is all there is; rank 0 adds the protocol (Leader)."""

    def __init__(self, run: RunDir, cfg: Config, name: str, island: Island, trainer: Trainer, layout: Layout) -> None:
        self.cfg = cfg
        self.run = run
        self.name = name
        self.island = island
        self.trainer = trainer
        self.layout = layout
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._samples = JsonlWriter(run.samples(name)) if cfg.run.trace_samples else None

    def follow(self) -> None:
        """Perform rank 0's plans until one says stop. The first one brings the step to start from."""
        self.trainer.set_step(self.island.broadcast_plan()[0])
        while True:
            plan = self.island.broadcast_plan()
            at = 0
            while at < len(plan):
                operation, arguments = plan[at], plan[at + 1 : at + 1 + PLAN_WORDS_OF[plan[at]]]
                at += 1 + len(arguments)
                if operation == STOP:
                    return
                self.perform(operation, *arguments)

    def perform(self, operation: int, *arguments: int) -> None:
        """One operation, on a rank that has nothing to give or take."""
        if operation == STEP:
            self.step()
        elif operation == GATHER:
            self.island.gather_fragment(self.layout.fragments[arguments[0]])
        elif operation == INSTALL:
            self.island.install_fragment(self.layout.fragments[arguments[0]], None, self.cfg.sync.alpha)
        elif operation == LOAD:
            self.island.install_fragment(self.layout.fragments[arguments[0]], None, 0.0)
        elif operation == EVALUATE:
            self.trainer.evaluate(self.cfg.run.eval_sequences)
        elif operation == SET_STEP:
            self.trainer.set_step(arguments[0])
        elif operation == PLACE:
            self.trainer.place(arguments[0])
        elif operation == SNAPSHOT:
            self.save(snapshots.folder_of(self.run.checkpoints, arguments[0]))
        elif operation == LEAVE:
            self.save_left()
        elif operation == OPTIMIZER:
            load_optimizer(self.run, self.cfg, self.name, self.trainer, *arguments)

    # ---- saving and loading --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that this rank needs to go on from here, copied."""
        return {"trainer": snapshots.copied(self.trainer.state_dict())}

    def save(self, folder: Path) -> None:
        """Copy this rank's state now, and write it into a snapshot's folder in the background."""
        state = self.state()
        stem = rank_state(folder, self.name, self.island.rank)

        def write() -> None:
            try:
                snapshots.write_state(stem, state)
            except OSError as error:
                log.warning("the state for %s could not be written: %s", folder.name, error)
                with suppress(OSError):
                    failed_mark(stem).touch()

        self._writer.submit(write)

    def save_left(self) -> None:
        """Save this rank's state for its own return, before it leaves in order."""
        try:
            snapshots.write_state(self.run.left_state(self.name, self.island.rank), self.state())
        except OSError as error:
            log.warning("the state could not be saved on leaving: %s", error)

    def step(self) -> StepResult:
        """One inner step, traced if asked for."""
        result = self.trainer.step()
        if self._samples is not None:
            self._samples.write(
                {
                    "time": time.time(),
                    "step": self.trainer.step_index,
                    "rank": self.island.rank,
                    "ids": result.ids,
                }
            )
        return result


def rank_state(folder: Path, island: str, rank: int) -> Path:
    """Where a rank's state lies in a snapshot (without suffix)."""
    return folder / "islands" / island / f"rank-{rank}"


def load_optimizer(run: RunDir, cfg: Config, name: str, trainer: Trainer, step: int, index: int) -> None:
    """Give a rank the optimizer's state of the island with this index, from the snapshot of a step (or FROM_...).

    All ranks load from the same place: rank 0 has looked at it before.
    """
    if step == FROM_NOWHERE:
        trainer.warm_up_again()
        return
    stem = run.left_state(name, trainer.island.rank)
    if step != FROM_LEFT:
        folder = snapshots.folder_of(run.checkpoints, step)
        stem = rank_state(folder, cfg.island_names()[index], trainer.island.rank)
    trainer.load_optimizer(snapshots.read_state(stem)["trainer"]["optimizer"])


def failed_mark(stem: Path) -> Path:
    """There when a rank could not write its state, so that nobody waits for it."""
    return stem.with_name(stem.name + ".failed")


# ---- rank 0 --------------------------------------------------------------------------------------


class Rejoining:
    """What has come for a (re)joining learner so far: Welcome, the newest of each fragment, and the rest.

    Welcome and fragments come over two connections, in either order.
    """

    def __init__(self) -> None:
        self.welcome: Welcome | None = None
        self.states: dict[int, Merged] = {}
        self.early: list[Incoming] = []

    def take(self, message: Incoming, link: SyncerLink) -> None:
        """Keep a message until its time comes."""
        if isinstance(message, Merged):
            if older := self.states.pop(message.message.fragment, None):
                link.release(older)
            self.states[message.message.fragment] = message
        else:
            self.early.append(message)

    @property
    def complete(self) -> bool:
        """Whether every fragment is here, as new as was said or newer."""
        if self.welcome is None:
            return False
        versions = self.welcome.versions
        return all(f in self.states and self.states[f].message.version >= v for f, v in enumerate(versions))


def load_state(cfg: Config, layout: Layout, link: SyncerLink, island: Island, anew: Rejoining) -> LearnerCore:
    """Install all fragments on all ranks; counters begin at zero. Collective: one plan per fragment."""
    welcome, states = anew.welcome, anew.states
    assert welcome is not None
    for fragment in layout.fragments:
        f = fragment.fragment
        island.broadcast_plan([LOAD, f])
        island.install_fragment(fragment, states[f].values, 0.0)
        link.remember_base(f, states[f].values)
    versions = [states[f].message.version for f in range(len(layout))]
    for f, version in enumerate(versions):
        if version > welcome.versions[f]:
            # A merge overtook the state that was sent to us: the syncer must know which one we hold.
            step = welcome.global_step
            link.installed(Installed(fragment=f, version=version, tokens=0, steps=0, step=step, waited_s=0.0))
        link.release(states[f])
    return LearnerCore(learner_settings(cfg, len(layout)), step=welcome.global_step, versions=versions)


@dataclass(slots=True)
class Progress:
    """What has happened since the last report."""

    steps: int = 0
    step_time_s: float = 0.0
    loss_sum: float = 0.0
    loss_steps: int = 0


class Leader(Follower):
    """Rank 0: feeds core.learner, performs its effects on all ranks, reports."""

    def __init__(
        self,
        run: RunDir,
        cfg: Config,
        name: str,
        island: Island,
        trainer: Trainer,
        layout: Layout,
        link: SyncerLink,
        core: LearnerCore,
        *,
        tokens: int = 0,
        joined_at_step: int | None = None,
        should_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(run, cfg, name, island, trainer, layout)
        self.link = link
        self.core = core
        self.tokens = tokens
        self._joined_at_step = core.step if joined_at_step is None else joined_at_step
        self._should_leave = should_leave
        self._saved_cut = 0
        """Step of the newest snapshot that our state was saved for, plus 1; 0: none."""
        self._anew: Rejoining | None = None
        """Back on a new connection, and not let in yet: what has come so far."""
        self._merged: dict[int, Merged] = {}
        self._next_handle = 1
        self._last: StepResult | None = None
        self._progress = Progress()
        self._phases: dict[str, float] = {}
        self._accounted_s = time.monotonic()
        self._reported_s = 0.0
        self._stop_reason = ""
        self._evaluate = False
        self._evaluates_regularly = name == cfg.island_names()[0] and cfg.run.eval_every_steps > 0

    def lead(self) -> str:
        """Train until the syncer says stop, or somebody wants us to leave; returns the reason."""
        self.link.returns = True
        while not self._stop_reason:
            if self._should_leave():
                self._plan(LEAVE)
                self.save_left()
                self._stop_reason = "preempted"
            elif self._evaluate:
                self._evaluate = False
                self._validate(final=True)
            elif not self.core.waits_for:
                self._train_step()
            else:
                self._report(force=True)
                self._wait()
                continue
            self._take_messages(block_s=0.0)
        self.island.broadcast_plan([STOP])
        self._writer.shutdown(wait=True)
        return self._stop_reason

    def state(self) -> dict[str, Any]:
        """With what only rank 0 has: the protocol's state, and the link's."""
        link = self.link.state_dict()
        mine = {"core": self.core.dump(), "tokens": self.tokens, "joined_at_step": self._joined_at_step, "link": link}
        return {**super().state(), "leader": mine}

    def _save_for(self, cut: int) -> None:
        """Save our state for the snapshot that was cut at step `cut` - 1, unless that is done."""
        if cut <= self._saved_cut:
            return
        self._saved_cut = cut
        if self._anew is not None:
            return  # what we have now is of no use to anybody
        with self._phase("save"):
            self._plan(SNAPSHOT, cut - 1)
            self.save(snapshots.folder_of(self.run.checkpoints, cut - 1))

    # ---- training ----

    def _train_step(self) -> None:
        self._plan(STEP)
        result = self.step()
        self._account_step(result)
        self.tokens += result.tokens
        self._perform(self.core.handle(StepFinished(tokens=result.tokens)))
        if self._evaluates_regularly and self.core.step % self.cfg.run.eval_every_steps == 0:
            self._validate(final=False)
        self._report(force=bool(self.core.waits_for))

    def _account_step(self, result: StepResult) -> None:
        self._last = result
        self._progress.steps += 1
        self._progress.step_time_s += result.step_time_s
        if result.tokens:  # a step on padding alone has no loss
            self._progress.loss_sum += result.loss
            self._progress.loss_steps += 1
        self._add_phase("data", result.data_time_s)
        self._add_phase("compute", result.compute_time_s)
        self._add_phase("slowed", result.slowed_time_s)

    def _validate(self, *, final: bool) -> None:
        with self._phase("evaluation"):
            self._plan(EVALUATE)
            evaluation = self.trainer.evaluate(self.cfg.run.eval_sequences)
            bigram = self._bigram() if final else None
        self.link.validation(
            Validation(step=self.core.step, loss=evaluation.loss, bigram=bigram, tokens=evaluation.tokens, final=final)
        )

    def _bigram(self) -> float | None:
        return bigram_loss(self.trainer.corpus, max_sequences=self.cfg.run.eval_sequences)

    # ---- messages ----

    def _wait(self) -> None:
        with self._phase("wait"):
            self._take_messages(block_s=WAIT_SLICE_S)
        self._plan()

    def _take_messages(self, *, block_s: float) -> None:
        """Feed what has come in, merged fragments first (core.learner, theory of operation)."""
        incoming: list[Incoming] = []
        try:
            if block_s > 0:
                incoming.append(self.link.inbox.get(timeout=block_s))
            while True:
                incoming.append(self.link.inbox.get_nowait())
        except queue.Empty:
            pass
        incoming.sort(key=lambda m: not isinstance(m, Merged))
        for message in incoming:
            self._take(message)

    def _take(self, message: Incoming) -> None:
        match message:
            case Lost():
                if message.ours:
                    self.island.broadcast_plan([STOP])
                    raise DilocoError("the link to the syncer failed", where=self.name, why=message.reason)
                log.warning("the connection to the syncer is lost: %s", message.reason)
                self._drop_anew()
                self.link.reconnect()
            case Connected():
                self._return()
            case Welcome():
                self._welcomed(message)
            case Reject():
                self.island.broadcast_plan([STOP])
                raise refused(message)
            case FaultMsg():
                self.link.apply_fault(message)
            case SnapshotMsg():
                self._save_for(message.step + 1)
            case StopMsg():
                self._stop_reason = message.reason
            case _ if self._anew is not None:
                self._anew.take(message, self.link)
                self._begin_anew_if_complete()
            case Merged():
                self._save_for(message.message.cut)
                handle = self._next_handle
                self._next_handle += 1
                self._merged[handle] = message
                merged = message.message
                event = MergedReceived(fragment=merged.fragment, version=merged.version, handle=handle)
                self._perform(self.core.handle(event))
            case PullMsg():
                self._perform(self.core.handle(PullReceived(fragment=message.fragment)))
            case FinishMsg():
                self._perform(self.core.handle(StopReceived(reason=message.reason)))
            case EvaluateMsg():
                self._evaluate = True

    # ---- coming back ----

    def _return(self) -> None:
        """There is a new connection: say where we stand."""
        log.info("%s: connected again, at step %d", self.name, self.core.step)
        self._perform(self.core.handle(Reconnected()))
        self._anew = Rejoining()
        self.link.say_returning(
            Returning(
                step=self.core.step,
                tokens=self.tokens,
                joined_at_step=self._joined_at_step,
                versions=list(self.core.versions),
                fragment_tokens=list(self.core.tokens),
                sent_at=[step + 1 for step in self.core.sent_at],
            )
        )

    def _welcomed(self, message: Welcome) -> None:
        """The syncer has answered: we go on as we are, or begin anew with what it sends, training on meanwhile."""
        if self._anew is None:
            log.warning("%s: welcomed without having asked", self.name)
            return
        if not message.returned:
            log.info("%s: is let in anew at step %d", self.name, message.global_step)
            for merged in self._merged.values():
                self.link.release(merged)
            self._merged.clear()
            self._anew.welcome = message
            self._begin_anew_if_complete()
            return
        self.link.accepted()
        anew, self._anew = self._anew, None
        for waiting in [*anew.states.values(), *anew.early]:
            self._take(waiting)

    def _begin_anew_if_complete(self) -> None:
        assert self._anew is not None
        if not self._anew.complete:
            return
        anew, self._anew = self._anew, None
        self.core = load_state(self.cfg, self.layout, self.link, self.island, anew)
        self.trainer.set_step(self.core.step)
        self._plan(SET_STEP, self.core.step)
        self.tokens = 0
        self._joined_at_step = self.core.step
        self.link.forget_unanswered()
        self.link.accepted()
        for waiting in anew.early:
            self._take(waiting)

    def _drop_anew(self) -> None:
        if self._anew is not None:
            for merged in self._anew.states.values():
                self.link.release(merged)
            self._anew = None

    def _perform(self, effects: tuple[LearnerEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case InstallFragment():
                    self._install(effect)
                case SendFragment():
                    self._send(effect)
                case DiscardPayload():
                    self.link.release(self._merged.pop(effect.handle))

    def _install(self, effect: InstallFragment) -> None:
        merged = self._merged.pop(effect.handle)
        waited_s = time.monotonic() - merged.arrived_s
        with self._phase("install"):
            self._plan(INSTALL, effect.fragment)
            fragment = self.layout.fragments[effect.fragment]
            self.island.install_fragment(fragment, merged.values, self.cfg.sync.alpha)
            self.link.remember_base(effect.fragment, merged.values)
        self.link.installed(
            Installed(
                fragment=effect.fragment,
                version=effect.version,
                tokens=effect.tokens,
                steps=effect.steps,
                step=self.core.step,
                waited_s=waited_s,
            )
        )
        self.link.release(merged)

    def _send(self, effect: SendFragment) -> None:
        with self._phase("gather"):
            self._plan(GATHER, effect.fragment)
            out = self.link.float_buffer(effect.fragment)
            flat = self.island.gather_fragment(self.layout.fragments[effect.fragment], out)
        assert flat is not None
        self.link.send(effect, flat)

    def _plan(self, *words: int) -> None:
        self.island.broadcast_plan(words)

    # ---- figures ----

    def _report(self, *, force: bool) -> None:
        now_s = time.monotonic()
        if not (force or self.core.settings.report_is_due(self._progress.steps, now_s - self._reported_s)):
            return
        self._reported_s = now_s
        progress, self._progress = self._progress, Progress()
        metrics = self.link.link_rates(now_s)
        metrics["staleness_steps"] = sum(self.core.steps) / len(self.core.steps)
        if self._last is not None:
            metrics |= {"lr": self._last.lr, "grad_norm": self._last.grad_norm}
        if progress.loss_steps:
            metrics["loss"] = progress.loss_sum / progress.loss_steps
        phases, self._phases = self._phases, {}
        phases["other"] = max(0.0, now_s - self._accounted_s - sum(phases.values()))
        self._accounted_s = now_s
        self.link.report(
            Report(
                step=self.core.step,
                tokens=self.tokens,
                step_time_s=progress.step_time_s / progress.steps if progress.steps else None,
                metrics=metrics,
                phases=phases,
            )
        )

    def _add_phase(self, name: str, seconds: float) -> None:
        self._phases[name] = self._phases.get(name, 0.0) + seconds

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._add_phase(name, time.monotonic() - began)
