"""What syncing costs a learner: steps per second with it on and off, alternating in one run.

The first-run recipe's model, islands, links and sync settings, with the real syncer process and four real learners.
Every learner takes WINDOW steps as usual, then WINDOW steps in which it neither reports nor sends nor installs, and so
on. All learners switch at the same step counts, so in a window without syncing the syncer is idle too. The first steps
of a window, in which learners are not yet in the same mode, are left out.

    python benchmarks/overhead.py [--windows 12] [key=value overrides]

Held to: at least 97% of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from hand_run import run_by_hand

WINDOW = 60
SETTLING = 10


def worker(run_path: str, name: str) -> None:
    """One learner; prints the seconds of every counted step in [on, off, on, off, ...]."""
    import torch

    from diloco_cli.config.schema import load_config
    from diloco_cli.run.credentials import load
    from diloco_cli.run.learner_link import SyncerLink
    from diloco_cli.run.learner_main import _build, _join, syncer_address
    from diloco_cli.run.ranks import Leader
    from diloco_cli.run.rundir import RunDir
    from diloco_cli.train.island import Island

    torch.set_num_threads(1)
    run = RunDir(Path(run_path))
    cfg = load_config(run.config)
    index = cfg.island_names().index(name)
    island = Island(cfg.island(name))
    trainer, layout = _build(cfg, name, index, island)
    link = SyncerLink(cfg, name, layout, syncer_address(run), load(run.keys, name), index)
    core = _join(cfg, layout, link, island)
    windows: list[list[float]] = []

    class Alternating(Leader):
        def _train_step(self):
            began = time.perf_counter()
            super()._train_step()
            self._take_messages(block_s=0.0)
            times = [time.perf_counter() - began]
            if self.core.step % WINDOW == 0:
                windows.append(times_on[SETTLING:])
                times_on.clear()
                windows.append(self._steps_without_syncing()[SETTLING:])
            else:
                times_on.extend(times)

        def _steps_without_syncing(self):
            times = []
            for _ in range(WINDOW):
                began = time.perf_counter()
                self.trainer.step()
                times.append(time.perf_counter() - began)
            return times

    times_on: list[float] = []
    leader = Alternating(run, cfg, name, island, trainer, layout, link, core)
    reason = leader.lead()
    link.close(reason)
    print(json.dumps(windows))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    said, events = run_by_hand(__file__, [f"run.steps={args.windows * WINDOW}", *args.overrides])
    merges = sum(e["event"] == "merge" for e in events)
    ratios = []
    for windows in said:
        # Neighbouring windows see the same machine: compare each pair, skip the first, which warms up.
        pairs = list(zip(windows[::2], windows[1::2], strict=True))[1:]
        ratios += [statistics.fmean(off) / statistics.fmean(on) for on, off in pairs]
    on = [t for windows in said for w in windows[2::2] for t in w]
    off = [t for windows in said for w in windows[3::2] for t in w]
    print(
        f"step with syncing {statistics.fmean(on) * 1e3:.2f} ms, without {statistics.fmean(off) * 1e3:.2f} ms (means)"
    )
    print(
        f"steps per second with syncing: {statistics.median(ratios):.1%} of those without "
        f"(median of {len(ratios)} pairs of windows; all together {statistics.fmean(off) / statistics.fmean(on):.1%}; "
        f"{merges} merges)"
    )


if __name__ == "__main__":
    main()
