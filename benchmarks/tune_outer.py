"""How good is a setting of the outer step: decoupled training with real models on a virtual clock, in one process.

The protocol cores (core.syncer, core.learner), the parameters of the syncer (run.global_model), the codecs and the
inner loop (train.loop) are those of a run; only time is made up. A step lasts --step-ms with a seeded jitter, a
message the latency and rate of its link (network.*), a merge MERGE_S. So a run takes what its arithmetic takes,
nothing depends on the machine's load, and the same seed gives the same result. docs/outer-presets.md has what was
measured with it.

    python benchmarks/tune_outer.py run.steps=400 outer.lr=0.7,1.0 sync.inner_steps=24,48 [--seeds 0 1] [--one-learner]

Settings are those of `diloco train` over the recipe --conf, commas make a sweep; one JSON line per run. --one-learner
trains one learner instead on the batches of all islands together: the same steps, the same tokens, the same corpus.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco_cli.config.compose import compose, expand_sweeps
from diloco_cli.config.schema import Config
from diloco_cli.core.learner import LearnerCore
from diloco_cli.core.syncer import SyncerCore
from diloco_cli.core.types import (
    CancelTimer,
    Contribution,
    ContributionReceived,
    DropPayload,
    Finish,
    FragmentInstalled,
    InstallFragment,
    LearnerEffect,
    LearnerJoined,
    LearnerReport,
    MergedReceived,
    MergeFinished,
    Publish,
    Pull,
    PullReceived,
    Record,
    SendFragment,
    SendState,
    SetTimer,
    StartMerge,
    StepFinished,
    StopLearners,
    StopReceived,
    SyncerEffect,
    SyncerEvent,
    TimerFired,
)
from diloco_cli.run.global_model import GlobalModel
from diloco_cli.run.settings import learner_settings, syncer_settings
from diloco_cli.train.data import Corpus, ShardCursor, build_corpus
from diloco_cli.train.island import Island
from diloco_cli.train.loop import Trainer
from diloco_cli.train.model import build_model, state_tensors
from diloco_cli.wire.codecs import DRIFT_WIRES, decode, encode, encoded_bytes

MERGE_S = 0.003
EVAL_SEQUENCES = 512


def make_trainer(cfg: Config, corpus: Corpus, index: int = 0) -> Trainer:
    """One learner as run.learner_main builds it, on the CPU and with one rank."""
    model = build_model(cfg.model, cfg.model.vocab_size or corpus.tokenizer.vocab_size, cfg.run.seed)
    island = Island(cfg.island(cfg.island_names()[index]), rank=0, world_size=1)
    cursor = ShardCursor(corpus, index, cfg.islands.count, 0, 1, island.cfg.batch, cfg.run.seed, cfg.data.heterogeneity)
    return Trainer(cfg, island, model, cursor, cfg.target_steps(), corpus=corpus)


class Learner:
    """One island: its trainer, its side of the protocol, and what has come in during a step."""

    def __init__(self, cfg: Config, corpus: Corpus, index: int) -> None:
        self.trainer = make_trainer(cfg, corpus, index)
        self.core: LearnerCore | None = None
        self.inbox: list[tuple[float, MergedReceived | PullReceived | StopReceived]] = []
        self.busy = False
        self.step_s = 0.0
        self.tokens = 0


class World:
    """A syncer, its learners and their links on one virtual clock."""

    def __init__(self, cfg: Config, corpus: Corpus, step_s: float, jitter: float) -> None:
        self.cfg, self.step_s, self.jitter = cfg, step_s, jitter
        self.model = GlobalModel(cfg)
        fragments = len(self.model.layout)
        self.syncer = SyncerCore(syncer_settings(cfg, fragments))
        self.settings = learner_settings(cfg, fragments)
        self.learners = {name: Learner(cfg, corpus, i) for i, name in enumerate(cfg.island_names())}
        self.judge = make_trainer(cfg, corpus)
        self.chance = random.Random(cfg.run.seed)
        self.now_s = 0.0
        self.finished: Finish | None = None
        self.loss_before_final_cut = float("nan")
        self.members: list[int] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._timers: dict[str, float] = {}
        self._payloads: dict[int, Tensor] = {}
        self._merged: dict[tuple[int, int], Tensor] = {}

    def run(self) -> None:
        """From the first joining to the end of the protocol."""
        self._perform(self.syncer.start(0.0))
        for name in self.learners:
            self._tell(LearnerJoined(learner=name))
        while self.finished is None:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()

    def loss(self) -> float:
        """Validation loss of the global parameters as they are now, nats per token."""
        mine = state_tensors(self.judge.model)
        for name, tensor in self.model.tensors().items():
            mine[name].detach().copy_(tensor)
        return self.judge.evaluate(EVAL_SEQUENCES).loss

    # ---- clock and links -------------------------------------------------------------------------

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when_s, self._order, action))

    def _travel_s(self, learner: str, direction: str, num_bytes: int = 0) -> float:
        link = getattr(self.cfg.link(learner), direction)
        return float(link.latency_s + 8 * num_bytes / link.rate_bps + self.chance.uniform(0, link.jitter_s))

    # ---- the syncer ------------------------------------------------------------------------------

    def _tell(self, event: SyncerEvent) -> None:
        self._perform(self.syncer.handle(event, self.now_s))

    def _up(self, learner: str, event: SyncerEvent, num_bytes: int = 0) -> None:
        self._at(self.now_s + self._travel_s(learner, "up", num_bytes), lambda: self._tell(event))

    def _down(self, learner: str, event: Any, num_bytes: int = 0) -> None:
        self._at(self.now_s + self._travel_s(learner, "down", num_bytes), lambda: self._arrive(learner, event))

    def _perform(self, effects: tuple[SyncerEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case Pull():
                    for name in effect.to:
                        self._down(name, PullReceived(fragment=effect.fragment))
                case StartMerge():
                    self._merge(effect)
                case Publish():
                    self._publish(effect)
                case SendState():
                    self._at(self.now_s + self._travel_s(effect.learner, "down"), partial(self._join, effect))
                case SetTimer():
                    self._timers[effect.key] = effect.at_s
                    self._at(effect.at_s, partial(self._fire, effect))
                case CancelTimer():
                    self._timers.pop(effect.key, None)
                case StopLearners():
                    for name in effect.to:
                        self._down(name, StopReceived(reason=effect.reason))
                case DropPayload():
                    del self._payloads[effect.handle]
                case Record(event="final_cut"):
                    self.loss_before_final_cut = self.loss()
                case Record(event="merge") if self.syncer.phase != "final":
                    self.members.append(len(effect.data["learners"]))
                case Finish():
                    self.finished = effect

    def _fire(self, timer: SetTimer) -> None:
        if self._timers.get(timer.key) == timer.at_s:
            del self._timers[timer.key]
            self._tell(TimerFired(key=timer.key))

    def _merge(self, effect: StartMerge) -> None:
        inputs = [self.model.merge_input(c, self._payloads.pop(c.handle), is_drift=False) for c in effect.members]

        def finish() -> None:
            self.model.adopt(effect.fragment, effect.version, self.model.merge(effect.fragment, inputs))
            self._tell(MergeFinished(fragment=effect.fragment, version=effect.version))

        self._at(self.now_s + MERGE_S, finish)

    def _publish(self, effect: Publish) -> None:
        f, wire = effect.fragment, self.cfg.network.wire_down.value
        payload = torch.frombuffer(bytearray(self.model.wire_payload(f)), dtype=torch.uint8)
        handle = effect.version
        self._merged[f, handle] = decode(payload, wire, self.model.layout.fragments[f].numel)
        for name in effect.to:
            event = MergedReceived(fragment=f, version=effect.version, handle=handle)
            self._down(name, event, payload.numel())

    # ---- learners --------------------------------------------------------------------------------

    def _join(self, effect: SendState) -> None:
        learner = self.learners[effect.learner]
        learner.core = LearnerCore(self.settings, step=effect.global_step, versions=effect.versions)
        self._begin(effect.learner)

    def _begin(self, name: str) -> None:
        learner = self.learners[name]
        assert learner.core is not None
        learner.busy = not learner.core.waits_for
        if learner.busy:
            spread = max(0.1, 1 + self.jitter * self.chance.gauss(0, 1))
            learner.step_s = self.step_s / self.cfg.island(name).speed * spread
            self._at(self.now_s + learner.step_s, lambda: self._step_done(name))

    def _step_done(self, name: str) -> None:
        learner = self.learners[name]
        assert learner.core is not None
        tokens = learner.trainer.step().tokens
        learner.tokens += tokens
        self._act(name, learner.core.handle(StepFinished(tokens=tokens)), self.now_s)
        waiting, learner.inbox = learner.inbox, []
        for arrived_s, event in sorted(waiting, key=lambda w: not isinstance(w[1], MergedReceived)):
            self._act(name, learner.core.handle(event), arrived_s)
        step = learner.core.step
        self._up(name, LearnerReport(learner=name, step=step, tokens=learner.tokens, step_time_s=learner.step_s))
        self._begin(name)

    def _arrive(self, name: str, event: Any) -> None:
        learner = self.learners[name]
        if learner.busy:
            learner.inbox.append((self.now_s, event))
        elif learner.core is not None:
            self._act(name, learner.core.handle(event), self.now_s)
            self._begin(name)

    def _act(self, name: str, effects: tuple[LearnerEffect, ...], arrived_s: float) -> None:
        for effect in effects:
            if isinstance(effect, SendFragment):
                self._send(name, effect)
            elif isinstance(effect, InstallFragment):
                self._install(name, effect, arrived_s)

    def _send(self, name: str, effect: SendFragment) -> None:
        fragment, wire = self.model.layout.fragments[effect.fragment], self.cfg.network.wire_up.value
        flat = self.learners[name].trainer.island.gather_fragment(fragment)
        assert flat is not None
        self._order += 1
        handle = self._order
        self._payloads[handle] = decode(encode(flat, wire), wire, fragment.numel)
        contribution = Contribution(
            learner=name,
            fragment=effect.fragment,
            base_version=effect.base_version,
            tokens=effect.tokens,
            steps=effect.steps,
            sent_at_step=effect.sent_at_step,
            handle=handle,
        )
        self._up(name, ContributionReceived(contribution=contribution), encoded_bytes(fragment.numel, wire))

    def _install(self, name: str, effect: InstallFragment, arrived_s: float) -> None:
        learner = self.learners[name]
        assert learner.core is not None
        values = self._merged[effect.fragment, effect.handle]
        fragment = self.model.layout.fragments[effect.fragment]
        learner.trainer.island.install_fragment(fragment, values, self.cfg.sync.alpha)
        installed = FragmentInstalled(
            learner=name,
            fragment=effect.fragment,
            version=effect.version,
            tokens=effect.tokens,
            steps=effect.steps,
            step=learner.core.step,
            waited_s=self.now_s - arrived_s,
        )
        self._up(name, installed)


def decoupled(cfg: Config, corpus: Corpus, step_s: float, jitter: float) -> dict[str, Any]:
    """One run; what came of it."""
    world = World(cfg, corpus, step_s, jitter)
    world.run()
    account = world.syncer.ledger.summary()
    return {
        "loss": round(world.loss(), 4),
        "before_final_cut": round(world.loss_before_final_cut, 4),
        "steps": world.syncer.global_step,
        "tokens": account["processed"],
        "merges": len(world.members),
        "members": round(sum(world.members) / max(1, len(world.members)), 2),
        "late": round(account["late"] / account["processed"], 3),
        "virtual_s": round(world.now_s, 1),
    }


def one_learner(cfg: Config, corpus: Corpus) -> dict[str, Any]:
    """The baseline: the batches of all islands in every step of one learner."""
    batch = sum(cfg.island(name).batch for name in cfg.island_names())
    steps = cfg.target_steps()
    cfg.islands.count, cfg.islands.each.batch = 1, batch
    cfg.run.steps, cfg.run.tokens = steps, None
    trainer = make_trainer(cfg, corpus)
    tokens = sum(trainer.step().tokens for _ in range(steps))
    return {"loss": round(trainer.evaluate(EVAL_SEQUENCES).loss, 4), "steps": steps, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for diloco train; commas make a sweep")
    parser.add_argument("--conf", default="first-run", help="recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--step-ms", type=float, default=30.0, help="virtual time of a step at speed 1")
    parser.add_argument("--jitter", type=float, default=0.05, help="standard deviation of a step's time, as a share")
    parser.add_argument("--one-learner", action="store_true", help="the baseline instead")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    corpus: Corpus | None = None
    for settings in expand_sweeps(args.settings):
        for seed in args.seeds:
            cfg = compose([*settings, f"run.seed={seed}", "islands.each.device=cpu"], args.conf)
            if cfg.network.wire_up.value in DRIFT_WIRES:
                parser.error(
                    f"network.wire_up={cfg.network.wire_up.value}: only float32 and bfloat16 are measured here"
                )
            corpus = corpus or build_corpus(cfg.data, cfg.model.vocab_size)
            began_s = time.process_time()
            result = (
                one_learner(cfg, corpus)
                if args.one_learner
                else decoupled(cfg, corpus, args.step_ms / 1000, args.jitter)
            )
            line = {"settings": " ".join(settings), "one_learner": args.one_learner, "seed": seed, **result}
            print(json.dumps({**line, "cpu_s": round(time.process_time() - began_s, 1)}), flush=True)


if __name__ == "__main__":
    main()
