"""What syncing costs a learner: steps per second with it on and off, alternating in one run.

The first-run recipe's model, islands, links and sync settings, with the real syncer process and four real learners.
Every learner takes WINDOW steps as usual, then WINDOW steps in which it neither reports nor sends nor installs, and so
on. All learners switch together, so in a window without syncing the syncer is idle too. The first steps of a window,
in which what was under way still arrives, are left out.

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

WINDOW = 40
SETTLING = 4
STORE_PORT = "DILOCO_BENCHMARK_STORE_PORT"


def worker(run_path: str, name: str) -> None:
    """One learner; prints the seconds of every counted step in [on, off, on, off, ...]."""
    import torch
    from torch.distributed import TCPStore

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
    core = _join(run, cfg, name, layout, link, island, trainer)
    windows: list[list[float]] = []
    store = TCPStore("127.0.0.1", int(os.environ[STORE_PORT]))

    def wait_for_the_others() -> None:
        key = str(len(windows))
        store.add(key, 1)
        while store.add(key, 0) < len(cfg.island_names()):
            time.sleep(0.002)

    class Alternating(Leader):
        def _train_step(self):
            began = time.perf_counter()
            super()._train_step()
            self._take_messages(block_s=0.0)
            times = [time.perf_counter() - began]
            if self.core.step % WINDOW == 0:
                windows.append(times_on[SETTLING:])
                times_on.clear()
                wait_for_the_others()
                windows.append(self._steps_without_syncing()[SETTLING:])
                wait_for_the_others()
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
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    from torch.distributed import TCPStore

    os.environ["OMP_NUM_THREADS"] = "1"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ[STORE_PORT] = str(store.port)
    said, events = run_by_hand(__file__, [f"run.steps={args.windows * WINDOW}", *args.overrides])
    merges = sum(e["event"] == "merge" for e in events)
    step_s = []
    # The machine's own speed drifts, so a window is compared with the mean of its two neighbours. The first warms up.
    for means in zip(*([statistics.fmean(w) for w in windows] for windows in said), strict=True):
        step_s.append(statistics.fmean(means))
    on_shares = []
    for i in range(2, len(step_s) - 1):
        share = (step_s[i - 1] + step_s[i + 1]) / 2 / step_s[i]
        on_shares.append(share if i % 2 == 0 else 1 / share)
    on = [t for windows in said for w in windows[2::2] for t in w]
    off = [t for windows in said for w in windows[3::2] for t in w]
    print(
        f"step with syncing {statistics.fmean(on) * 1e3:.2f} ms, without {statistics.fmean(off) * 1e3:.2f} ms (means)"
    )
    low, _, high = statistics.quantiles(on_shares)
    print(
        f"steps per second with syncing: {statistics.median(on_shares):.1%} of those without "
        f"(median of {len(on_shares)} windows, each beside its neighbours; quartiles {low:.1%} and "
        f"{high:.1%}; all together {statistics.fmean(off) / statistics.fmean(on):.1%}; {merges} merges)"
    )


if __name__ == "__main__":
    main()
