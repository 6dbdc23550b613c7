"""Training in virtual time: it is the program's own training, to the bit, and the settings act."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from diloco_cli.config.compose import compose
from diloco_cli.config.schema import Config
from diloco_cli.core.faults import Fault
from diloco_cli.core.merge import MergeInput, merge
from diloco_cli.errors import ConfigError
from diloco_cli.sim import learn as learning
from diloco_cli.sim.engine import Streams
from diloco_cli.sim.scenario import Scenario, world_spec
from diloco_cli.sim.world import World
from diloco_cli.train.model import state_tensors

TINY = [
    "model.dim=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=32",
    "data.seq_len=32",
    "islands.count=2",
    "islands.each.batch=2",
    "run.eval_sequences=16",
    "run.steps=40",
    "inner.warmup_steps=5",
    "sync.fragments=2",
    "sync.min_fragment_bytes=1KiB",
    "sync.inner_steps=8",
    "sync.overlap_steps=2",
]
SCENARIO = Scenario(step_time_s=0.1)


def config(*overrides: str) -> Config:
    return compose([*TINY, *overrides], None)


def trained(cfg: Config, scenario: Scenario = SCENARIO) -> learning.Learners:
    """The insides of a world that has run."""
    cfg = learning._seeded(cfg, cfg.run.seed)
    learners = learning.Learners(cfg, learning._corpus(cfg))
    learners.world = World(world_spec(cfg, scenario), Streams(0, 0), jump=False, body=learners)
    learners.world.run()
    return learners


def figures(cfg: Config, scenario: Scenario = SCENARIO, *, algorithm: str = "decoupled") -> dict[str, Any]:
    return learning.learn(cfg, scenario, algorithms=[algorithm], seed=0)["algorithms"][algorithm]


def test_same_seed_same_bytes() -> None:
    cfg, scenario = config(), Scenario(step_time_s=0.1, step_jitter=0.3)
    once, again = (json.dumps(learning.learn(cfg, scenario, seed=5, trials=2)) for _ in range(2))
    assert once == again
    assert json.dumps(learning.learn(cfg, scenario, seed=6, trials=2)) != once
    first, second = trained(cfg, scenario).model.tensors(), trained(cfg, scenario).model.tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_learner_at_rate_one_is_plain_training_to_the_bit() -> None:
    cfg = config(
        "islands.count=1",
        "algorithm=diloco",
        "outer.lr=1",
        "outer.momentum=0",
        "network.wire_up=float32",
        "network.wire_down=float32",
    )
    found = trained(cfg).model.tensors()
    cfg = learning._seeded(cfg, 0)
    plain = learning.make_trainer(cfg, learning._corpus(cfg), 0)
    for _ in range(40):
        plain.step()
    assert all(torch.equal(found[name], tensor) for name, tensor in state_tensors(plain.model).items())
    whole = learning.learn(cfg, SCENARIO, algorithms=["data_parallel"], seed=0)["algorithms"]["data_parallel"]
    assert whole["validation_loss"]["mean"] == pytest.approx(plain.evaluate(16).loss, rel=1e-8)


def test_a_merge_is_the_merge_function_of_what_was_trained() -> None:
    """One lock-step sync of two learners, done by hand with trainers that know of no protocol."""
    cfg = config(
        "algorithm=diloco",
        "run.steps=8",
        "sync.fragments=1",
        "network.wire_up=float32",
        "network.wire_down=float32",
    )
    found = trained(cfg).model
    cfg = learning._seeded(cfg, 0)
    corpus = learning._corpus(cfg)
    (fragment,) = found.layout.fragments
    theta = learning.Learners(cfg, corpus)._values[0][0].clone()
    contributions = []
    for i in range(2):
        trainer = learning.make_trainer(cfg, corpus, i)
        tokens = sum(trainer.step().tokens for _ in range(8))
        values = trainer.island.gather_fragment(fragment)
        assert values is not None
        contributions.append(MergeInput(learner=f"island-{i}", values=values, tokens=tokens, steps=8))
    from diloco_cli.run.global_model import segments

    parts = segments(fragment, cfg.outer.merge)
    by_hand, _ = merge(theta, torch.zeros_like(theta), contributions, lr=0.7, momentum=0.5, segments=parts)
    assert cfg.outer.lr == 0.7
    assert cfg.outer.momentum == 0.5
    # The final cut after it finds nobody with a step since its install, and changes nothing.
    assert torch.equal(found._theta[0], by_hand)


def test_settings_act() -> None:
    base = figures(config())
    assert base["validation_loss"]["mean"] < 5.6
    others = ["network.wire_up=int4", "outer.merge=average", "outer.lr=1", "sync.alpha=0.5"]
    losses = {other: figures(config(other))["validation_loss"]["mean"] for other in others}
    assert len({base["validation_loss"]["mean"], *losses.values()}) == len(losses) + 1, losses
    fast, slow = (
        figures(config("run.finish_wait=1s", f"+islands.named.island-1.speed={speed}")) for speed in (0.9, 0.3)
    )
    assert slow["tokens"]["mean"] < fast["tokens"]["mean"]


def test_a_failure_costs_tokens_and_the_rest_goes_on() -> None:
    calm, broken = (
        figures(config(), Scenario(step_time_s=0.1, faults=faults))
        for faults in ((), (Fault(kind="crash", target="island-1", at_s=1.0, duration_s=1.0),))
    )
    assert 0.5 * calm["tokens"]["mean"] < broken["tokens"]["mean"] < calm["tokens"]["mean"]
    assert broken["validation_loss"]["mean"] < 5.6


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="trains a real model"):
        learning.learn(config(), Scenario(parameters=10**6), seed=0)
    with pytest.raises(ConfigError, match="GiB"):
        learning.learn(compose(["model=1b"], None), SCENARIO, seed=0)
    with pytest.raises(ConfigError, match="no algorithm"):
        learning.learn(config(), SCENARIO, algorithms=["magic"], seed=0)
