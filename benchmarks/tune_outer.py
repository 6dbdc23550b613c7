"""How good is a setting of the outer step: decoupled training with real models on a virtual clock, in one process.

A sweep over `diloco simulate --learn` (diloco_cli/sim/learn.py): one JSON line per combination and seed. Nothing
depends on the machine's load, and the same seed gives the same result. docs/outer-presets.md has what was measured with
it; its figures are of this script before sim.learn was there, when steps had a normal and not a uniform spread.

    python benchmarks/tune_outer.py run.steps=400 outer.lr=0.7,1.0 sync.inner_steps=24,48 [--one-learner] [--seeds 0 1]

Settings are those of `diloco train` over the recipe --conf, commas make a sweep. --one-learner trains one learner
instead on the batches of all islands together: the same steps, the same tokens, the same corpus.
"""

from __future__ import annotations

import argparse
import json
import time

from diloco_cli.config.compose import compose, expand_sweeps
from diloco_cli.sim.learn import learn
from diloco_cli.sim.scenario import Scenario


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for diloco train; commas make a sweep")
    parser.add_argument("--conf", default="first-run", help="recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--step-ms", type=float, default=30.0, help="virtual time of a step at speed 1")
    parser.add_argument("--jitter", type=float, default=0.08, help="half width of a step's time, as a share")
    parser.add_argument("--one-learner", action="store_true", help="the baseline instead")
    args = parser.parse_intermixed_args()
    scenario = Scenario(step_time_s=args.step_ms / 1000, step_jitter=args.jitter)
    for settings in expand_sweeps(args.settings):
        cfg = compose(["run.eval_sequences=512", *settings], args.conf)
        algorithm = "data_parallel" if args.one_learner else cfg.sync.algorithm.value
        for seed in args.seeds:
            began_s = time.process_time()
            found = learn(cfg, scenario, algorithms=[algorithm], seed=seed)["algorithms"][algorithm]
            line = {"settings": " ".join(settings), "one_learner": args.one_learner, "seed": seed}
            line |= {name: value["mean"] for name, value in found.items() if isinstance(value, dict)}
            print(json.dumps({**line, "cpu_s": round(time.process_time() - began_s, 1)}), flush=True)


if __name__ == "__main__":
    main()
