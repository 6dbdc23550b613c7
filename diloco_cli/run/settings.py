"""From the configuration to what the protocol core is set up with: one place for learner and syncer.

Must not: import torch when it is imported (the simulator has none). Called by: run.learner_main, run.syncer_main,
run.global_model, sim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from diloco_cli.config.schema import Algorithm, Config
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
        chips={name: cfg.island(name).nproc_per_node for name in cfg.island_names()},
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
        anchor_history=KEPT_VERSIONS,
    )
