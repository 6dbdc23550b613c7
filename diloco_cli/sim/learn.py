"""Learning under simulation: real small models, trained in virtual time.

Owns: sim.world's Body: a trainer per island, the syncer's parameters, and what is on its way between them. All of it
is the program's own: inner loop (train.loop), fragments (train.island), formats (wire.codecs), merge and anchors
(run.global_model). Only time is made up, so quorum, grace, merge rule, wire type, staleness, failures and the number of
islands can be judged by validation loss, on any machine, with the same result to the bit for a seed.

What a fault does: a process that ends takes its inner optimizer with it; the one that joins instead starts with fresh
moments at the global step, with the fragments as they are then, and goes on in its shard where the old one stood.
All learners are in one process and one thread: islands step at different times with different parameters, and at the
sizes that fit here a step's time is its arithmetic. Called by: cli.simulate, benchmarks/tune_outer.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from diloco_cli.config.schema import Config, ModelKind
from diloco_cli.core.types import Contribution, StartMerge
from diloco_cli.errors import ConfigError
from diloco_cli.sim.baselines import run_data_parallel
from diloco_cli.sim.engine import Streams
from diloco_cli.sim.results import ALGORITHMS, ELASTIC, SCHEMA_VERSION, configured_for, describe, figures, spread
from diloco_cli.sim.scenario import Scenario, fragment_sizes, world_spec
from diloco_cli.sim.world import World

if TYPE_CHECKING:
    from torch import Tensor

    from diloco_cli.train.data import Corpus
    from diloco_cli.train.loop import Trainer

MAX_BYTES = 4 * 2**30
"""Of all learners' parameters, gradients and moments together."""
BYTES_PER_PARAMETER = 20
KEPT_VERSIONS = 64
"""Of each fragment: a merge that is still on its way to some learner is one of the newest so many."""


def learn(
    cfg: Config,
    scenario: Scenario,
    *,
    algorithms: Sequence[str] = ("decoupled",),
    seed: int,
    trials: int = 1,
) -> dict[str, Any]:
    """Train under each algorithm; the document of `simulate --learn --json`.

    `data_parallel` is one learner with the batches of all islands in every step: what the others are compared with.

    Args:
        trials: each has its own seed: parameters at the start, order of the data, and chance.

    Raises:
        ConfigError: a model too large for this, or a scenario that makes no sense.
    """
    check(cfg, scenario)
    if unknown := [a for a in algorithms if a not in ALGORITHMS]:
        raise ConfigError(f"there is no algorithm {unknown[0]}", hint=f"one of {', '.join(ALGORITHMS)}")
    found = {}
    with _one_thread():
        corpus = _corpus(cfg)
        for algorithm in algorithms:
            rows = [_one(_seeded(cfg, seed + i), scenario, corpus, algorithm) for i in range(trials)]
            found[algorithm] = {name: spread([row[name] for row in rows]) for name in rows[0]} | {"trials": trials}
        bigram = _bigram(cfg, corpus)
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": describe(cfg, scenario, seed=seed, trials=trials),
        "bigram_loss": float(f"{bigram:.9g}"),
        "algorithms": found,
    }


def check(cfg: Config, scenario: Scenario) -> None:
    """Refuse what can not be trained here.

    Raises:
        ConfigError: one sentence and how to put it right.
    """
    if scenario.parameters is not None:
        raise ConfigError(
            "--learn trains a real model; a number of parameters is none", where="--model", hint="--model tiny"
        )
    if cfg.model.kind is ModelKind.llama:
        needed = sum(fragment_sizes(cfg, scenario)) * BYTES_PER_PARAMETER * (cfg.islands.count + 1)
        if needed > MAX_BYTES:
            raise ConfigError(
                f"--learn: {cfg.islands.count} islands of {cfg.model.name} need {needed / 2**30:.0f} GiB",
                where="--learn",
                hint="--model tiny, or fewer islands",
            )


def _one(cfg: Config, scenario: Scenario, corpus: Corpus, algorithm: str) -> dict[str, float | None]:
    if algorithm in ("data_parallel", ELASTIC):
        return _plain(cfg, scenario, corpus, algorithm)
    own = configured_for(cfg, algorithm)
    if own is not cfg:
        scenario = dataclasses.replace(scenario, sizes=())
    learners = Learners(own, corpus)
    world = World(world_spec(own, scenario), Streams(own.run.seed, 0), jump=False, body=learners)
    learners.world = world
    world.run()
    assert world.finish is not None
    tally = world.tally()
    found = figures(dict.fromkeys(own.island_names(), 1), tally)
    return {
        "validation_loss": learners.loss(),
        **{k: found[k] for k in TIMES},
        "tokens": tally.tokens["processed"],
        "late_share": tally.tokens["late"] / tally.tokens["processed"] if tally.tokens["processed"] else None,
    }


TIMES = ("tokens_per_s", "wall_time_s", "goodput", "quorum_filled", "staleness_steps", "merges")


def _plain(cfg: Config, scenario: Scenario, corpus: Corpus, algorithm: str) -> dict[str, float | None]:
    """One learner with all batches; failures cost data parallelism time, not steps."""
    outcome = run_data_parallel(
        world_spec(cfg, scenario),
        Streams(cfg.run.seed, 0),
        elastic=algorithm == ELASTIC,
        restart_s=scenario.restart_s,
    )
    whole = together(cfg)
    trainer = make_trainer(whole, corpus, 0)
    tokens = sum(trainer.step().tokens for _ in range(whole.target_steps()))
    found = figures(dict.fromkeys(cfg.island_names(), 1), outcome.tally)
    return {
        "validation_loss": trainer.evaluate(cfg.run.eval_sequences).loss,
        **{k: found[k] for k in TIMES},
        "tokens": tokens,
        "late_share": None,
    }


def together(cfg: Config) -> Config:
    """One island with the batch of all, for as many steps."""
    batch = sum(cfg.island(name).sequences for name in cfg.island_names())
    each = dataclasses.replace(cfg.islands.each, batch=batch, accumulate=1)
    islands = dataclasses.replace(cfg.islands, count=1, each=each, named={})
    run = dataclasses.replace(cfg.run, steps=cfg.target_steps(), tokens=None)
    return dataclasses.replace(cfg, islands=islands, run=run)


# ---- the islands' insides ---------------------------------------------------------------------------


def make_trainer(cfg: Config, corpus: Corpus, index: int) -> Trainer:
    """One learner as run.learner_main builds it, on the CPU and with one rank."""
    from diloco_cli.train.data import ShardCursor
    from diloco_cli.train.island import Island
    from diloco_cli.train.loop import Trainer
    from diloco_cli.train.model import build_model

    own = cfg.island(cfg.island_names()[index])
    model = build_model(cfg.model, cfg.model.vocab_size or corpus.tokenizer.vocab_size, cfg.run.seed)
    # Ranks would do the same sums in another order; a slow island's time is virtual, too.
    island = Island(dataclasses.replace(own, speed=1.0, nproc_per_node=1), rank=0, world_size=1)
    batch = own.sequences // own.accumulate
    cursor = ShardCursor(corpus, index, cfg.islands.count, 0, 1, batch, cfg.run.seed, cfg.data.heterogeneity)
    return Trainer(cfg, island, model, cursor, cfg.target_steps(), corpus=corpus)


class Learners:
    """What is in the fragments of a world: the Body of sim.world.

    Attributes:
        world: set before it runs; asked only which versions are still in use.
    """

    world: World

    def __init__(self, cfg: Config, corpus: Corpus) -> None:
        from diloco_cli.run.global_model import GlobalModel

        self._cfg = cfg
        self._corpus = corpus
        self._indices = {name: i for i, name in enumerate(cfg.island_names())}
        self._trainers: dict[str, Trainer] = {}
        self.model = GlobalModel(cfg)
        self._fragments = self.model.layout.fragments
        self._values: list[dict[int, Tensor]] = [{0: self._decoded(f)} for f in range(len(self._fragments))]
        self._held: dict[int, tuple[Tensor, bool]] = {}
        self._feedback: dict[tuple[str, int], Any] = {}
        self._base: dict[tuple[str, int], Tensor] = {}

    def load(self, learner: str, step: int, versions: Sequence[int]) -> None:
        """A fresh process, on the shard where its predecessor stood."""
        before = self._trainers.get(learner)
        trainer = make_trainer(self._cfg, self._corpus, self._indices[learner])
        if before is not None:
            trainer.cursor = before.cursor
        trainer.set_step(step)
        self._trainers[learner] = trainer
        self._feedback = {k: v for k, v in self._feedback.items() if k[0] != learner}
        for f, version in enumerate(versions):
            self._put(learner, f, version, alpha=0.0)

    def step(self, learner: str) -> int:
        """One inner step; its tokens."""
        return self._trainers[learner].step().tokens

    def send(self, learner: str, contribution: Contribution) -> None:
        """Copy, encode, decode: what the syncer gets of it."""
        from diloco_cli.wire.codecs import DRIFT_WIRES, ErrorFeedback, decode, encode

        f, wire = contribution.fragment, self._cfg.network.wire_up.value
        fragment = self._fragments[f]
        flat = self._trainers[learner].island.gather_fragment(fragment)
        assert flat is not None
        is_drift = wire in DRIFT_WIRES
        if is_drift:
            feedback = self._feedback.setdefault((learner, f), ErrorFeedback(fragment.numel))
            payload = feedback.encode(flat.sub_(self._base[learner, f]), wire)
        else:
            payload = encode(flat, wire)
        self._held[contribution.handle] = (decode(payload, wire, fragment.numel), is_drift)

    def install(self, learner: str, fragment: int, version: int) -> None:
        """A merged fragment is put in."""
        self._put(learner, fragment, version, alpha=self._cfg.sync.alpha)

    def merge(self, effect: StartMerge) -> None:
        """The contributions make a new version."""
        f = effect.fragment
        held = [(c, *self._held.pop(c.handle)) for c in effect.members]
        inputs = [self.model.merge_input(c, values, is_drift=is_drift) for c, values, is_drift in held]
        self.model.adopt(f, effect.version, self.model.merge(f, inputs))
        self.model.forget(f, self.world.syncer.bases_in_use(f))
        known = self._values[f]
        known[effect.version] = self._decoded(f)
        known.pop(effect.version - KEPT_VERSIONS, None)

    def drop(self, handle: int) -> None:
        """A contribution is not merged."""
        self._held.pop(handle, None)

    def loss(self) -> float:
        """Validation loss of the syncer's parameters, nats per token."""
        from diloco_cli.train.model import state_tensors

        judge = make_trainer(self._cfg, self._corpus, 0)
        mine = state_tensors(judge.model)
        for name, tensor in self.model.tensors().items():
            mine[name].detach().copy_(tensor)
        return judge.evaluate(self._cfg.run.eval_sequences).loss

    def _put(self, learner: str, fragment: int, version: int, alpha: float) -> None:
        values = self._values[fragment][version]
        self._trainers[learner].island.install_fragment(self._fragments[fragment], values, alpha)
        self._base[learner, fragment] = values

    def _decoded(self, fragment: int) -> Tensor:
        """The newest version of a fragment as learners get it."""
        import torch

        from diloco_cli.wire.codecs import decode

        payload = torch.frombuffer(bytearray(self.model.wire_payload(fragment)), dtype=torch.uint8)
        return decode(payload, self._cfg.network.wire_down.value, self._fragments[fragment].numel)


# ---- helpers ----------------------------------------------------------------------------------------


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in one order, whatever the number of cores; the setting is given back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seeded(cfg: Config, seed: int) -> Config:
    run = dataclasses.replace(cfg.run, seed=seed)
    # On the CPU, whatever there is: the result must not depend on the machine.
    each = dataclasses.replace(cfg.islands.each, device=type(cfg.islands.each.device).cpu)
    named = {n: dataclasses.replace(i, device=each.device) for n, i in cfg.islands.named.items()}
    return dataclasses.replace(cfg, run=run, islands=dataclasses.replace(cfg.islands, each=each, named=named))


def _corpus(cfg: Config) -> Corpus:
    from diloco_cli.train.data import build_corpus

    return build_corpus(cfg.data, cfg.model.vocab_size)


def _bigram(cfg: Config, corpus: Corpus) -> float:
    from diloco_cli.train.data import bigram_loss

    loss = bigram_loss(corpus, max_sequences=cfg.run.eval_sequences)
    return math.nan if loss is None else loss
