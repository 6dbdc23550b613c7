"""What snapshots cost the learners: steps around a snapshot beside steps between two, in one run.

    python benchmarks/snapshots.py [--every 6] [--steps 1500] [OVERRIDE ...]

Held to: less than 2% of the steps at the default run.snapshot_every. Printed: learners' time in the phase "save"
(copying their state at a step boundary), and the steps per second in the SPAN_S after a cut, while everything is
written, beside those in the SPAN_S before it; medians over all snapshots and learners. The cost at an interval T is
that shortfall times SPAN_S / T.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

from diloco_cli.config.compose import compose
from diloco_cli.observe.events import read_jsonl
from diloco_cli.run.launcher import run_training

SPAN_S = 2.0


def main() -> None:
    """Run, then look at the run's own metrics."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=float, default=6.0, help="seconds between snapshots in this run")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    mine = [f"run.snapshot_every={args.every:g}s", f"run.steps={args.steps}", "logging.interval=0.25s"]
    cfg = compose([*mine, *args.overrides], None)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder).resolve() / "run"
        run_training(cfg, mine, run_dir=path, quiet=True)
        events, lines = read_jsonl(path / "events.jsonl"), read_jsonl(path / "metrics.jsonl")
    snapshots = [e for e in events if e["event"] == "snapshot"][:-1]  # the last one is of the run's end
    cuts = [e["time"] - e["seconds"] for e in snapshots]
    saving, total = 0.0, 0.0
    ratios = []
    for island in cfg.island_names():
        own = [line for line in lines if line["source"] == island]
        for line in own:
            phases = {k: v for k, v in line.items() if k.startswith("phase_")}
            saving += phases.get("phase_save_s", 0.0)
            total += sum(phases.values())
        for cut in cuts:
            before, at, after = (_step_at(own, cut + d) for d in (-SPAN_S, 0.0, SPAN_S))
            if None not in (before, at, after) and at > before:  # type: ignore[operator]
                ratios.append((after - at) / (at - before))  # type: ignore[operator]
    num_bytes = statistics.median(e["bytes"] for e in snapshots)
    shortfall = 1.0 - statistics.median(ratios)
    every_s = compose([], None).run.snapshot_every_s or float("inf")
    print(f"{len(snapshots)} snapshots of {num_bytes / 1e6:.1f} MB, every {args.every:g} s")
    print(f"copying: {100 * saving / total:.2f}% of the learners' time")
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        f"steps in the {SPAN_S:g} s after a cut / before it: median {statistics.median(ratios):.3f},"
        f" quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f} ({len(ratios)} pairs)"
    )
    cost = max(0.0, shortfall) * SPAN_S / every_s
    print(f"cost at the default interval of {every_s:g} s: {100 * cost:.2f}% of the steps")


def _step_at(lines: list[dict[str, float]], time_s: float) -> float | None:
    """The step at a time, between two metric lines."""
    for a, b in itertools.pairwise(lines):
        if a["time"] <= time_s <= b["time"]:
            return a["step"] + (b["step"] - a["step"]) * (time_s - a["time"]) / (b["time"] - a["time"])
    return None


if __name__ == "__main__":
    main()
