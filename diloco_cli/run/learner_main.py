"""The learner process: one rank of one island. torchrun starts it: `-m diloco_cli.run.learner_main RUN ISLAND`.

Owns: building what a rank needs, joining the run, and leaving it; the work itself is run.ranks. torch is imported
inside functions, so that a configuration that cannot be read is told in a moment.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from diloco_cli.config.schema import Config, load_config
from diloco_cli.core.fragments import Layout
from diloco_cli.core.learner import LearnerCore
from diloco_cli.errors import DilocoError, LostConnection
from diloco_cli.run import measure, process
from diloco_cli.run.rundir import RunDir

if TYPE_CHECKING:
    from diloco_cli.run.learner_link import SyncerLink
    from diloco_cli.run.ranks import Rejoining
    from diloco_cli.train.data import Corpus, ShardCursor
    from diloco_cli.train.island import Island
    from diloco_cli.train.loop import Trainer

log = logging.getLogger(__name__)

RECENT_CUTS = 20
"""An optimizer's state that is at most so many times H steps old is still worth more than none."""

_leave = threading.Event()
"""SIGTERM: leave in order at the next step boundary."""


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
    signal.signal(signal.SIGTERM, lambda _number, _frame: _leave.set())
    return process.run_guarded(run, f"{island}.{rank}", lambda: _run(run, island))


def _run(run: RunDir, name: str) -> None:
    cfg = load_config(run.config)
    import torch

    from diloco_cli.train.island import Island, set_deterministic
    from diloco_cli.train.loop import seed_everything

    process.beat(run, f"{name}.{os.environ.get('RANK', '0')}", cfg.sync.heartbeat_interval_s)
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
        if os.environ.get(measure.VARIABLE):
            _measure(run, cfg, name, index, island)
            return
        trainer, layout = _build(cfg, name, index, island)
        if island.is_main:
            _lead(run, cfg, name, index, island, trainer, layout)
        else:
            from diloco_cli.run.ranks import Follower

            saved = _saved_state(run, name, island.rank)
            if saved is not None:
                _load(trainer, saved)
            Follower(run, cfg, name, island, trainer, layout).follow()
    finally:
        island.close()


def _build(cfg: Config, name: str, index: int, island: Island) -> tuple[Trainer, Layout]:
    from diloco_cli.run.settings import model_layout
    from diloco_cli.train.data import build_corpus
    from diloco_cli.train.loop import Trainer
    from diloco_cli.train.model import build_model

    corpus = build_corpus(cfg.data, cfg.model.vocab_size)
    model = build_model(cfg.model, cfg.model.vocab_size or corpus.tokenizer.vocab_size, cfg.run.seed)
    layout = model_layout(cfg, model)
    cursor = _cursor(cfg, corpus, index, island, island.cfg.sequences)
    trainer = Trainer(cfg, island, model, cursor, cfg.target_steps(), corpus=corpus)
    log.info("%s: %d parameters in %d fragments, layout %.12s", name, layout.numel, len(layout), layout.hash)
    return trainer, layout


def _cursor(cfg: Config, corpus: Corpus, index: int, island: Island, batch: int) -> ShardCursor:
    """This rank's way through the island's text, `batch` sequences of the island per step."""
    from diloco_cli.train.data import ShardCursor

    return ShardCursor(
        corpus,
        # Islands that joined later deal the text out among themselves once more, in another order.
        learner_index=index % cfg.islands.count,
        num_learners=cfg.islands.count,
        rank=island.rank,
        num_ranks=island.world_size,
        batch=batch // island.cfg.accumulate,
        seed=cfg.run.seed + index // cfg.islands.count,
        heterogeneity=cfg.data.heterogeneity,
    )


def _measure(run: RunDir, cfg: Config, name: str, index: int, island: Island) -> None:
    """`batch: auto`: take the steps of training at several batches, and end."""
    from diloco_cli.train.data import build_corpus
    from diloco_cli.train.loop import Trainer
    from diloco_cli.train.model import build_model

    corpus = build_corpus(cfg.data, cfg.model.vocab_size)
    model = build_model(cfg.model, cfg.model.vocab_size or corpus.tokenizer.vocab_size, cfg.run.seed)
    unit = island.world_size * island.cfg.accumulate
    trainer = Trainer(cfg, island, model, _cursor(cfg, corpus, index, island, unit), cfg.run.steps)
    measure.measure(run, name, island, trainer, lambda batch: _cursor(cfg, corpus, index, island, batch))


def _lead(run: RunDir, cfg: Config, name: str, index: int, island: Island, trainer: Trainer, layout: Layout) -> None:
    from diloco_cli.run.credentials import load
    from diloco_cli.run.learner_link import SyncerLink
    from diloco_cli.run.ranks import Leader
    from diloco_cli.run.settings import is_lockstep, learner_settings

    saved = _saved_state(run, name, 0)
    if saved is not None:
        _load(trainer, saved)
    leader_state = saved["leader"] if saved is not None else None
    link = SyncerLink(
        cfg,
        name,
        layout,
        syncer_address(run),
        load(run.keys, name),
        cfg.run.seed * 1000 + index,
        session=leader_state["link"]["session"] if leader_state else None,
        keep_unanswered=is_lockstep(cfg),
    )
    reason = "failed"
    try:
        if leader_state is None:
            core, tokens, joined_at_step = _join(run, cfg, name, layout, link, island, trainer), 0, None
            log.info("%s: joined at step %d", name, core.step)
        else:
            link.load_state_dict(leader_state["link"])
            core = LearnerCore.load(learner_settings(cfg, len(layout)), leader_state["core"])
            tokens, joined_at_step = leader_state["tokens"], leader_state["joined_at_step"]
            island.broadcast_plan([core.step])
            log.info("%s: goes on from the snapshot, at step %d", name, core.step)
        leader = Leader(
            run,
            cfg,
            name,
            island,
            trainer,
            layout,
            link,
            core,
            tokens=tokens,
            joined_at_step=joined_at_step,
            should_leave=_leave.is_set,
        )
        reason = leader.lead()
        log.info("%s: stops after step %d: %s", name, leader.core.step, reason)
    finally:
        link.close(reason)


def _load(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Go on from a snapshot's state, in a run that may have another number of islands now.

    The text is then dealt out anew; the island goes to the place that corresponds to its old one.
    """
    state = dict(saved["trainer"])
    now = cast(Any, trainer.cursor).state_dict()
    before, count = state["cursor"]["num_learners"], now["num_learners"]
    if before != count:
        batch = trainer.island.cfg.sequences
        position = state["cursor"]["position"] * before // count
        state["cursor"] = {**state["cursor"], "num_learners": count, "position": position - position % batch}
    trainer.load_state_dict(state)


def _saved_state(run: RunDir, name: str, rank: int) -> dict[str, Any] | None:
    """What this rank goes on from at its first start after `diloco resume`; None: it joins like a new one.

    All ranks decide alike: the resumed snapshot was verified as a whole.
    """
    from diloco_cli.run import snapshots
    from diloco_cli.run.children import RETURN_VARIABLE
    from diloco_cli.run.ranks import rank_state

    step = os.environ.get(RETURN_VARIABLE, "")
    if not step.isdigit():
        return None
    stem = rank_state(snapshots.folder_of(run.checkpoints, int(step)), name, rank)
    if not stem.with_name(stem.name + ".json").exists():
        log.info("%s: was not in the snapshot", name)
        return None
    return snapshots.read_state(stem)


def syncer_address(run: RunDir) -> tuple[str, int]:
    """Where the launcher's listening socket is."""
    import json

    found = json.loads((run.path / "syncer.json").read_text(encoding="utf-8"))
    return str(found["host"]), int(found["port"])


def _join(
    run: RunDir, cfg: Config, name: str, layout: Layout, link: SyncerLink, island: Island, trainer: Trainer
) -> LearnerCore:
    """Wait to be let in, install all fragments, and begin with counters at zero."""
    from diloco_cli.run.ranks import OPTIMIZER, PLACE, load_optimizer, load_state

    anew = _receive_state(cfg, link)
    assert anew.welcome is not None
    step = anew.welcome.global_step
    # The other ranks wait for this: the step to start from, then one plan per fragment.
    island.broadcast_plan([step])
    trainer.set_step(step)
    core = load_state(cfg, layout, link, island, anew)
    if step > 0:
        place = anew.welcome.taken_steps
        island.broadcast_plan([PLACE, place])
        trainer.place(place)
        source = _optimizer_source(run, cfg, name, step)
        island.broadcast_plan([OPTIMIZER, *source])
        load_optimizer(run, cfg, name, trainer, *source)
    for message in anew.early:
        link.inbox.put(message)
    return core


def _optimizer_source(run: RunDir, cfg: Config, name: str, step: int) -> tuple[int, int]:
    """Where the inner optimizer's state comes from: (step of a snapshot or FROM_..., index of the island).

    In order: what this island saved last, if that is recent; a healthy peer of the same shape; nowhere (algorithm.md,
    Failure and return).
    """
    from diloco_cli.run import snapshots
    from diloco_cli.run.ranks import FROM_LEFT, FROM_NOWHERE, rank_state

    oldest = step - RECENT_CUTS * cfg.sync.inner_steps
    ranks = cfg.num_ranks(name)
    try:
        left = [snapshots.read_state(run.left_state(name, r))["trainer"]["step"] for r in range(ranks)]
        if min(left) >= oldest:
            log.info("%s: its optimizer goes on from where it left, at step %d", name, min(left))
            return FROM_LEFT, 0
    except snapshots.SnapshotDamaged:
        pass
    folder, _problems = snapshots.newest_good(run.checkpoints)
    usable = folder is not None and folder == snapshots.folder_of(run.checkpoints, snapshots.step_of(folder))
    if folder is not None and usable and snapshots.step_of(folder) >= oldest:
        names = cfg.island_names()
        shape = (ranks, cfg.island(name).parallel)
        alike = [n for n in names if (cfg.num_ranks(n), cfg.island(n).parallel) == shape]
        for other in sorted(alike, key=lambda n: (n != name, n)):
            stems = [rank_state(folder, other, r) for r in range(ranks)]
            if all(stem.with_name(stem.name + ".json").exists() for stem in stems):
                log.info("%s: its optimizer goes on from that of %s in %s", name, other, folder.name)
                return snapshots.step_of(folder), names.index(other)
    log.info("%s: its optimizer begins anew, with a warm-up", name)
    return FROM_NOWHERE, 0


def _receive_state(cfg: Config, link: SyncerLink) -> Rejoining:
    """Welcome, the newest of each fragment, and what came early; over another connection if this one is lost."""
    from diloco_cli.run.learner_link import Connected, Lost, refused
    from diloco_cli.run.ranks import Rejoining
    from diloco_cli.wire.messages import Reject, StopMsg, Welcome

    anew = Rejoining()
    deadline_s = time.monotonic() + cfg.launcher.start_timeout_s + cfg.network.connect_timeout_s
    while not anew.complete:
        if _leave.is_set():
            raise DilocoError("stopped before the start", why="SIGTERM")
        try:
            message = link.inbox.get(timeout=0.2)
        except queue.Empty:
            if time.monotonic() > deadline_s:
                raise LostConnection("the syncer did not start the run in time") from None
            continue
        match message:
            case Welcome():
                anew.welcome = message
            case Connected():
                pass
            case Reject():
                raise refused(message)
            case Lost():
                if message.ours:
                    raise DilocoError("the link to the syncer failed", why=message.reason)
                log.warning("the connection to the syncer is lost: %s", message.reason)
                for state in anew.states.values():
                    link.release(state)
                anew = Rejoining()
                link.reconnect()
            case StopMsg():
                raise DilocoError("stopped before the start", why=message.reason)
            case _:
                anew.take(message, link)
    return anew


if __name__ == "__main__":
    main()
