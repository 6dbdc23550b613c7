"""Decoupled training against one learner on the same number of tokens with the same global batch.

Both are whole runs of the program: the first-run recipe as it is (four learners, emulated links), and one learner
whose batch is the four together, trained plainly: lock-step with outer learning rate 1 and no momentum makes the
merge of a single learner hand back its own parameters. Same model, text, steps, schedule and seeds.

    python benchmarks/quality.py [--seeds 0 1] [key=value overrides for both]

At 3000 steps, about a quarter of an hour per seed on two cores: the gap is one of the beginning, and at the recipe's
1000 steps it is still over 4% (docs/outer-presets.md says why).

Held to: decoupled within 3% of the one learner's validation loss.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

STEPS = 3000
ONE_LEARNER = [
    "islands.count=1",
    "algorithm=diloco",
    "sync.quorum=1",
    "outer.lr=1",
    "outer.momentum=0",
    "network=unlimited",
    "network.wire_up=float32",
    "network.wire_down=float32",
]


def run(overrides: list[str]) -> dict[str, Any]:
    """One run to its end; its summary."""
    from diloco_cli.config.compose import compose
    from diloco_cli.run.launcher import run_training

    cfg = compose(overrides, None)
    with tempfile.TemporaryDirectory() as folder:
        return run_training(cfg, overrides, run_dir=Path(folder) / "run", quiet=True)


def main() -> None:
    """Run both and print both."""
    from diloco_cli.config.compose import compose

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    args.overrides = [f"run.steps={STEPS}", *args.overrides]
    cfg = compose(args.overrides, None)
    batch = cfg.islands.count * cfg.islands.each.batch
    gaps = []
    for seed in args.seeds:
        shared = [*args.overrides, f"run.seed={seed}"]
        losses = []
        kinds = {"decoupled": shared, "one learner": [*shared, *ONE_LEARNER, f"islands.each.batch={batch}"]}
        for label, overrides in kinds.items():
            summary = run(overrides)
            losses.append(summary["loss"]["validation"])
            print(
                f"seed {seed}  {label:11s}  validation {summary['loss']['validation']:.4f}  "
                f"bigram {summary['loss']['bigram']:.4f}  tokens {summary['tokens']['processed']}  "
                f"steps {sorted(summary['steps'].values())}  {summary['wall_time_s']:.0f} s",
                flush=True,
            )
        gaps.append(losses[0] / losses[1] - 1)
        print(f"seed {seed}  decoupled is {gaps[-1]:+.2%} off one learner", flush=True)
    print(f"median over {len(gaps)} seeds: {statistics.median(gaps):+.2%} (held to at most +3%)")


if __name__ == "__main__":
    main()
