"""From the configuration to what the protocol core is set up with: one place for learner and syncer; and the faults.

Must not: import torch when it is imported (the simulator has none). Called by: run.learner_main, run.syncer_main,
run.global_model, run.launcher, run.plan, sim.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from diloco_cli.config.quantities import is_step, parse_duration_s, parse_rate_bps, parse_step
from diloco_cli.config.schema import Algorithm, Config, FailureEvent
from diloco_cli.core.faults import CORRUPT, CRASH, DEFAULT_DURATION_S, HANG, SYNCER, Fault, draw, ordered
from diloco_cli.core.fragments import Layout, build_layout
from diloco_cli.core.learner import LearnerSettings
from diloco_cli.core.state import SyncerSettings

if TYPE_CHECKING:
    from torch import nn

KEPT_VERSIONS = 4
"""Most versions of a fragment, older than the newest, whose parameters the syncer keeps as anchors."""


def learner_settings(cfg: Config, num_fragments: int) -> LearnerSettings:
    """What core.learner needs of the configuration."""
    return LearnerSettings(
        num_fragments=num_fragments,
        inner_steps=cfg.sync.inner_steps,
        overlap_steps=0 if cfg.sync.algorithm is Algorithm.diloco else cfg.sync.overlap_steps,
        target_steps=cfg.target_steps(),
        lockstep=is_lockstep(cfg),
        same_offset=cfg.sync.algorithm is Algorithm.diloco,
        max_drift_steps=cfg.sync.max_drift_steps,
    )


def is_lockstep(cfg: Config) -> bool:
    """Whether merges happen at fixed steps, all learners waiting for them."""
    return cfg.sync.algorithm is not Algorithm.decoupled or cfg.run.deterministic


def model_layout(cfg: Config, model: nn.Module) -> Layout:
    """The fragments of a model under this configuration: the same on every side."""
    from diloco_cli.train.model import tensor_inventory

    return build_layout(
        tensor_inventory(model),
        num_fragments=cfg.sync.fragments,
        strategy=cfg.sync.strategy.value,
        min_fragment_bytes=int(cfg.sync.min_fragment_num_bytes),
    )


def syncer_settings(cfg: Config, num_fragments: int) -> SyncerSettings:
    """What core.syncer needs of the configuration."""
    lockstep = is_lockstep(cfg)
    return SyncerSettings(
        num_fragments=num_fragments,
        chips={name: cfg.num_ranks(name) for name in cfg.island_names()},
        inner_steps=cfg.sync.inner_steps,
        overlap_steps=cfg.sync.overlap_steps,
        quorum=cfg.sync.quorum,
        grace_safety=cfg.sync.grace_safety,
        keep_late=cfg.sync.late.value == "next",
        lockstep=lockstep,
        target_steps=cfg.target_steps(),
        finish_tolerance=cfg.run.finish_tolerance,
        # In lock-step all take the same steps, so all are waited for.
        finish_wait_s=math.inf if lockstep else cfg.run.finish_wait_s,
        heartbeat_timeout_s=cfg.sync.heartbeat_timeout_s,
        start_timeout_s=cfg.launcher.start_timeout_s,
        quorum_timeout_s=cfg.sync.quorum_timeout_s,
        snapshot_every_s=cfg.run.snapshot_every_s,
        snapshot_every_steps=cfg.run.snapshot_every_steps,
        anchor_history=KEPT_VERSIONS,
    )


def fault_plan(cfg: Config) -> tuple[Fault, ...]:
    """All faults of a run, in order: what was written, and what is drawn from failures.random.

    The same configuration gives the same plan, here and in the simulator. `cfg` has passed config.validate.
    """
    faults = [_fault(event, f"failures.events.{i}") for i, event in enumerate(cfg.failures.events)]
    chance = cfg.failures.random
    if chance.mean_time_between is not None:
        seed = cfg.run.seed if chance.seed is None else chance.seed
        faults += draw(
            cfg.island_names(),
            lambda island: random.Random(f"{seed}/{island}"),
            mean_time_between_s=parse_duration_s(chance.mean_time_between, "failures.random.mean_time_between"),
            repair_time_s=parse_duration_s(chance.repair_time, "failures.random.repair_time"),
            distribution=chance.distribution,
            kinds=[_kind(kind) for kind in chance.kinds],
            horizon_s=parse_duration_s(chance.horizon, "failures.random.horizon"),
        )
    return ordered(faults)


def _kind(text: str) -> str:
    return text.replace("_", "-")


def _fault(event: FailureEvent, where: str) -> Fault:
    kind = _kind(event.kind)
    duration_s = None if kind in (CRASH, HANG, CORRUPT) else DEFAULT_DURATION_S
    if event.duration is not None:
        duration_s = parse_duration_s(event.duration, f"{where}.duration")
    by_step = is_step(event.at)
    return Fault(
        kind=kind,
        target=SYNCER if event.syncer else event.island or event.link or "",
        at_s=None if by_step else parse_duration_s(event.at, f"{where}.at"),
        at_step=parse_step(event.at, f"{where}.at") if by_step else None,
        duration_s=duration_s,
        rank=event.rank,
        factor=event.factor,
        rate_bps=None if event.bandwidth is None else parse_rate_bps(event.bandwidth, f"{where}.bandwidth"),
        latency_s=None if event.latency is None else parse_duration_s(event.latency, f"{where}.latency"),
        loss=event.loss,
        payload=event.payload,
    )
