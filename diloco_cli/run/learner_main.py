"""The learner process: one rank of one island. torchrun starts it: `-m diloco_cli.run.learner_main RUN ISLAND`.

Owns: building what a rank needs, joining the run, and leaving it; the work itself is run.ranks. torch is imported
inside functions, so that a configuration that cannot be read is told in a moment.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_cli.config.schema import Config, load_config
from diloco_cli.core.fragments import Layout
from diloco_cli.core.learner import LearnerCore
from diloco_cli.errors import DilocoError, EnvironmentNotReady
from diloco_cli.run import process
from diloco_cli.run.rundir import RunDir

if TYPE_CHECKING:
    from diloco_cli.run.learner_link import Incoming, Merged, SyncerLink
    from diloco_cli.train.island import Island
    from diloco_cli.train.loop import Trainer
    from diloco_cli.wire.messages import Welcome

log = logging.getLogger(__name__)


def main() -> None:
    """Entry point under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("island")
    args = parser.parse_args()
    process.die_with_parent()
    sys.exit(run_rank(args.run, args.island))


def run_rank(path: Path, island: str) -> int:
    """One rank's whole life; returns its exit code. RANK and WORLD_SIZE are in the environment."""
    run = RunDir(path)
    rank = int(os.environ.get("RANK", "0"))
    process.ignore_terminal_signals()
    return process.run_guarded(run, f"{island}.{rank}", lambda: _run(run, island))


def _run(run: RunDir, name: str) -> None:
    cfg = load_config(run.config)
    import torch

    from diloco_cli.train.island import Island, set_deterministic
    from diloco_cli.train.loop import seed_everything

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    index = cfg.island_names().index(name)
    if cfg.run.deterministic:
        set_deterministic()
    island = Island(cfg.island(name))
    log.info(
        "%s: rank %d of %d on %s, %d threads",
        name,
        island.rank,
        island.world_size,
        island.device,
        torch.get_num_threads(),
    )
    try:
        seed_everything(cfg.run.seed, index, island.rank)
        trainer, layout = _build(cfg, name, index, island)
        if island.is_main:
            _lead(run, cfg, name, index, island, trainer, layout)
        else:
            from diloco_cli.run.ranks import Follower

            Follower(run, cfg, name, island, trainer, layout).follow()
    finally:
        island.close()


def _build(cfg: Config, name: str, index: int, island: Island) -> tuple[Trainer, Layout]:
    from diloco_cli.run.settings import model_layout
    from diloco_cli.train.data import ShardCursor, build_corpus
    from diloco_cli.train.loop import Trainer
    from diloco_cli.train.model import build_model

    corpus = build_corpus(cfg.data, cfg.model.vocab_size)
    model = build_model(cfg.model, cfg.model.vocab_size or corpus.tokenizer.vocab_size, cfg.run.seed)
    layout = model_layout(cfg, model)
    cursor = ShardCursor(
        corpus,
        learner_index=index,
        num_learners=cfg.islands.count,
        rank=island.rank,
        num_ranks=island.world_size,
        batch=island.cfg.batch // island.cfg.accumulate,
        seed=cfg.run.seed,
        heterogeneity=cfg.data.heterogeneity,
    )
    trainer = Trainer(cfg, island, model, cursor, cfg.target_steps(), corpus=corpus)
    log.info("%s: %d parameters in %d fragments, layout %.12s", name, layout.numel, len(layout), layout.hash)
    return trainer, layout


def _lead(run: RunDir, cfg: Config, name: str, index: int, island: Island, trainer: Trainer, layout: Layout) -> None:
    from diloco_cli.run.credentials import load
    from diloco_cli.run.learner_link import SyncerLink
    from diloco_cli.run.ranks import Leader

    address = syncer_address(run)
    link = SyncerLink(cfg, name, layout, address, load(run.keys, name), cfg.run.seed * 1000 + index)
    reason = "failed"
    try:
        core = _join(cfg, layout, link, island)
        trainer.set_step(core.step)
        log.info("%s: joined at step %d", name, core.step)
        leader = Leader(run, cfg, name, island, trainer, layout, link, core)
        reason = leader.lead()
        log.info("%s: stops after step %d: %s", name, core.step, reason)
    finally:
        link.close(reason)


def syncer_address(run: RunDir) -> tuple[str, int]:
    """Where the launcher's listening socket is."""
    import json

    found = json.loads((run.path / "syncer.json").read_text(encoding="utf-8"))
    return str(found["host"]), int(found["port"])


def _join(cfg: Config, layout: Layout, link: SyncerLink, island: Island) -> LearnerCore:
    """Wait to be let in, install all fragments, and begin with counters at zero."""
    from diloco_cli.run.ranks import LOAD
    from diloco_cli.run.settings import learner_settings
    from diloco_cli.wire.messages import Installed

    welcome, states, early = _receive_state(cfg, layout, link)
    # The other ranks wait for this: the step to start from, then one plan per fragment.
    island.broadcast_plan([welcome.global_step])
    for fragment in layout.fragments:
        f = fragment.fragment
        island.broadcast_plan([LOAD, f])
        island.install_fragment(fragment, states[f].values, 0.0)
        link.remember_base(f, states[f].values)
        version = states[f].message.version
        if version > welcome.versions[f]:
            # A merge overtook the state that was sent to us: the syncer must know which one we hold.
            step = welcome.global_step
            link.installed(Installed(fragment=f, version=version, tokens=0, steps=0, step=step, waited_s=0.0))
        link.release(states[f])
    for message in early:
        link.inbox.put(message)
    versions = [states[f].message.version for f in range(len(layout))]
    return LearnerCore(learner_settings(cfg, len(layout)), step=welcome.global_step, versions=versions)


def _receive_state(cfg: Config, layout: Layout, link: SyncerLink) -> tuple[Welcome, dict[int, Merged], list[Incoming]]:
    """Welcome, the newest of each fragment, and what came early."""
    from diloco_cli.run.learner_link import Lost, Merged, refused
    from diloco_cli.wire.messages import Reject, StopMsg, Welcome

    welcome: Welcome | None = None
    states: dict[int, Merged] = {}
    early: list[Incoming] = []
    deadline_s = time.monotonic() + cfg.launcher.start_timeout_s + cfg.network.connect_timeout_s
    while welcome is None or any(
        f not in states or states[f].message.version < welcome.versions[f] for f in range(len(layout))
    ):
        try:
            message = link.inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise EnvironmentNotReady("the syncer did not start the run in time") from None
        match message:
            case Welcome():
                welcome = message
            case Merged():
                if older := states.pop(message.message.fragment, None):
                    link.release(older)
                states[message.message.fragment] = message
            case Reject():
                raise refused(message)
            case Lost():
                raise EnvironmentNotReady("the connection to the syncer is lost", why=message.reason)
            case StopMsg():
                raise DilocoError("stopped before the start", why=message.reason)
            case _:
                early.append(message)
    return welcome, states, early


if __name__ == "__main__":
    main()
