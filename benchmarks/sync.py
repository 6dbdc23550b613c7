"""One fragment's sync through the whole program, beside a raw TCP hub that moves the same bytes.

Two learners (processes of their own) and the real syncer process: a learner copies its fragment off the model, encrypts
and sends it; the syncer checks, merges (RDA) and takes the outer step; the result is broadcast, decrypted and installed
into the model. Timed in the learners, from the start of the copy to the end of the install; lock-step with H = 1, so
every step is one sync. float32 on the wire, links not emulated. The hub (raw_hub.py) does no more than push, barrier,
pull over plain TCP. The two alternate in one run; figures are medians.

    python benchmarks/sync.py [--mb 16 64 256] [--rounds 9] [--repeats 3]

Held to: ours at most 3 times the hub.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from hand_run import run_by_hand
from raw_hub import raw_hub
from torch import nn

ROW = 1024
WARM_UP_ROUNDS = 3


def build(num_bytes: int) -> nn.Module:
    """A model that is one matrix of float32 (the syncer builds it too, through model.entry_point)."""
    return _Matrix(num_bytes // 4 // ROW)


class _Matrix(nn.Module):
    """Maps tokens to logits of the same shape, so that it passes for a model; the matrix only travels."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(nn.Parameter(torch_empty(rows, ROW)), std=0.02))

    def forward(self, tokens):
        return self.weight[0, :256].expand(*tokens.shape, 256)


def torch_empty(*shape: int):
    """An empty float32 tensor."""
    import torch

    return torch.empty(*shape)


def measure(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds of both learners: seconds per sync."""
    overrides = [
        "model=custom",
        "model.entry_point=sync:build",
        f"+model.entry_args.num_bytes={num_bytes}",
        "islands.count=2",
        "algorithm=diloco",
        "sync.inner_steps=1",
        "sync.overlap_steps=1",
        "sync.quorum=2",
        "sync.fragments=1",
        "network=unlimited",
        "network.wire_up=float32",
        "network.wire_down=float32",
        f"run.steps={rounds + WARM_UP_ROUNDS}",
    ]
    times, events = run_by_hand(__file__, overrides)
    merge_times = [e["merge_time_s"] for e in events if e["event"] == "merge"][WARM_UP_ROUNDS:]
    return {
        "sync_s": statistics.median(t for rows in times for t in rows[WARM_UP_ROUNDS:]),
        "merge_s": statistics.median(merge_times),
    }


def worker(run_path: str, name: str) -> None:
    """One learner: the real Leader, with a trainer whose step does nothing, timing each send-to-install."""
    import torch

    from diloco_cli.config.schema import load_config
    from diloco_cli.run.credentials import load
    from diloco_cli.run.learner_link import SyncerLink
    from diloco_cli.run.learner_main import _join, syncer_address
    from diloco_cli.run.ranks import Leader
    from diloco_cli.run.rundir import RunDir
    from diloco_cli.run.settings import model_layout
    from diloco_cli.train.island import Island
    from diloco_cli.train.loop import StepResult
    from diloco_cli.train.model import state_tensors

    torch.set_num_threads(1)
    run = RunDir(Path(run_path))
    cfg = load_config(run.config)
    model = build(cfg.model.entry_args["num_bytes"])
    layout = model_layout(cfg, model)
    island = Island(cfg.island(name))
    island.setup(model, tensors=state_tensors(model))

    class NoTrainer:
        step_index = 0
        corpus = None

        def step(self):
            return StepResult(1, 1.0, 1.0, 0.1, 1e-6, 0.0, 1e-6, 0.0, False, [])

        def set_step(self, step):
            self.step_index = step

        def state_dict(self):
            return {}

        def evaluate(self, _max_sequences):
            from diloco_cli.train.loop import Evaluation

            return Evaluation(1.0, 1)

    class Timed(Leader):
        times: list[float] = []  # noqa: RUF012
        began = 0.0

        def _send(self, effect):
            self.began = time.perf_counter()
            super()._send(effect)

        def _install(self, effect):
            super()._install(effect)
            self.times.append(time.perf_counter() - self.began)

        def _bigram(self):
            return None

    link = SyncerLink(cfg, name, layout, syncer_address(run), load(run.keys, name), 0)
    trainer = NoTrainer()
    core = _join(run, cfg, name, layout, link, island, trainer)
    leader = Timed(run, cfg, name, island, trainer, layout, link, core)
    reason = leader.lead()
    link.close(reason)
    print(json.dumps(Timed.times))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", nargs=2)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    for mb in args.mb:
        num_bytes = mb * 2**20
        ours, hubs, merges = [], [], []
        for _ in range(args.repeats):
            hubs.append(raw_hub(num_bytes, 2, args.rounds).round_s)
            result = measure(num_bytes, args.rounds)
            ours.append(result["sync_s"])
            merges.append(result["merge_s"])
        hub, sync, merge = (statistics.median(x) for x in (hubs, ours, merges))
        print(
            f"{mb:4d} MB  raw hub {hub * 1e3:7.1f} ms   ours {sync * 1e3:7.1f} ms (merge {merge * 1e3:.1f})   "
            f"ratio {sync / hub:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
