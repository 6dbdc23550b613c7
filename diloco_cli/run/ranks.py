"""The ranks of an island at work: rank 0 leads, the others follow its plan.

Owns: the binding of core.learner (decisions), train.loop (steps), train.island (fragments on all ranks) and
run.learner_link (the wire). Rank 0 decides; before each step it broadcasts a *plan* inside the island, a short list of
operations, so that all ranks gather, install and stop at the same step. Called by: run.learner_main, benchmarks.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diloco_cli.config.schema import Config
from diloco_cli.core.fragments import Layout
from diloco_cli.core.learner import LearnerCore
from diloco_cli.core.types import (
    DiscardPayload,
    InstallFragment,
    LearnerEffect,
    MergedReceived,
    PullReceived,
    SendFragment,
    StepFinished,
    StopReceived,
)
from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.observe.events import JsonlWriter
from diloco_cli.run.learner_link import Incoming, Lost, Merged, SyncerLink
from diloco_cli.run.rundir import RunDir
from diloco_cli.train.data import bigram_loss
from diloco_cli.train.island import Island
from diloco_cli.train.loop import StepResult, Trainer
from diloco_cli.wire.messages import EvaluateMsg, FinishMsg, Installed, PullMsg, Report, StopMsg, Validation

# Operations of a plan: each is followed by its arguments.
STEP, GATHER, INSTALL, LOAD, EVALUATE, STOP = 1, 2, 3, 4, 5, 6
PLAN_WORDS_OF = {STEP: 0, GATHER: 1, INSTALL: 1, LOAD: 1, EVALUATE: 0, STOP: 0}

# While it waits, rank 0 still tells the other ranks so within their collective time-out.
WAIT_SLICE_S = 1.0


# ---- every rank ----------------------------------------------------------------------------------


class Follower:
    """Performs plans. On ranks other than 0 this is all there is; rank 0 adds the protocol (Leader)."""

    def __init__(self, run: RunDir, cfg: Config, name: str, island: Island, trainer: Trainer, layout: Layout) -> None:
        self.cfg = cfg
        self.name = name
        self.island = island
        self.trainer = trainer
        self.layout = layout
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


# ---- rank 0 --------------------------------------------------------------------------------------


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
    ) -> None:
        super().__init__(run, cfg, name, island, trainer, layout)
        self.link = link
        self.core = core
        self.tokens = 0
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
        """Train until the syncer says stop; returns the reason."""
        while not self._stop_reason:
            if self._evaluate:
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
        return self._stop_reason

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
            case Merged():
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
            case StopMsg():
                self._stop_reason = message.reason
            case Lost():
                self.island.broadcast_plan([STOP])
                raise EnvironmentNotReady("the connection to the syncer is lost", where=self.name, why=message.reason)

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
