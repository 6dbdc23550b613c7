"""A finished run beside its simulation: does `diloco simulate` tell the truth?

Owns: what is taken from a run (step times, costs of copying and merging; links from its configuration), and the
comparison. What is predicted is none of it: tokens/s, time, goodput, bytes, merges and who was in them follow from the
protocol in virtual time (sim.world). Both sides are read off the event tape by the same rules.
Must not: change anything in the run's folder. Called by: cli.simulate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_cli.config.schema import Config, load_config
from diloco_cli.errors import ConfigError
from diloco_cli.observe.events import read_jsonl
from diloco_cli.sim.engine import Streams
from diloco_cli.sim.results import figures, spread
from diloco_cli.sim.scenario import Scenario, fragment_sizes, world_spec
from diloco_cli.sim.world import Costs, World

SCHEMA_VERSION = 1
LIMIT = 0.10
"""What predictions are held to, where HELD."""
HELD = ("tokens_per_s", "goodput", "bytes_up", "bytes_down", "merges")
TRIALS = 3
MAX_JITTER = 0.5
STEP_PHASES = ("data", "compute", "slowed")


@dataclass(slots=True)
class Tape:
    """What a run's events say, real ones or simulated ones.

    Attributes:
        began_s, ended_s: the first learner's joining, and the end of the protocol, on the tape's clock.
        members: of each merge.
        moved: elements that learners copied out (contributions) and in (installs), by fragment.
        merge_s: seconds of merging; merged: elements that were read and written for it.
    """

    began_s: float = math.nan
    ended_s: float = math.nan
    members: list[int] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)
    merge_s: float = 0.0
    merged: dict[int, int] = field(default_factory=dict)

    def add(self, time_s: float, event: str, data: Mapping[str, Any]) -> None:
        """Take one event."""
        if event == "join":
            # Learners begin together, when the last one that is expected has joined.
            if not self.members:
                self.began_s = time_s
        elif event == "finish":
            self.ended_s = time_s
        elif event == "merge":
            fragment, count = int(data["fragment"]), len(data["learners"])
            self.members.append(count)
            self.merge_s += float(data.get("merge_time_s") or 0.0)
            self.merged[fragment] = self.merged.get(fragment, 0) + count + 2
        elif event in ("contribution", "install"):
            fragment = int(data["fragment"])
            self.moved[fragment] = self.moved.get(fragment, 0) + 1

    @property
    def duration_s(self) -> float:
        """Seconds of training."""
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run folder, read."""

    path: Path
    cfg: Config
    summary: Mapping[str, Any]
    result: Mapping[str, Any]
    tape: Tape
    sizes: tuple[int, ...]
    step_jitter: float


def compare(path: Path) -> dict[str, Any]:
    """Simulate a finished run from its configuration and measured costs, and hold the two against each other.

    Returns:
        The document of `simulate RUN --json`: `inputs` (what was taken from the run), `figures` (each measured,
        predicted with its spread over trials, and the difference as a share of what was measured), `within`.

    Raises:
        ConfigError: no run, or one that did not reach its target.
    """
    run = read_run(path)
    scenario = scenario_of(run)
    measured = _measured(run)
    trials = [_predicted(run.cfg, scenario, seed) for seed in range(TRIALS)]
    rows: dict[str, dict[str, Any]] = {}
    held: list[float] = []
    for name, value in measured.items():
        predicted = spread([trial[name] for trial in trials])
        mean = predicted["mean"]
        difference = float(f"{mean / value - 1:.6g}") if value and mean is not None else None
        limit = LIMIT if name in HELD else None
        rows[name] = {"measured": value, "predicted": predicted, "difference": difference, "limit": limit}
        if limit is not None and difference is not None:
            held.append(abs(difference))
    return {
        "schema_version": SCHEMA_VERSION,
        "run": str(path),
        "algorithm": run.cfg.sync.algorithm.value,
        "inputs": _inputs(run, scenario),
        "figures": rows,
        "largest_difference": max(held, default=None),
        "within": all(d <= LIMIT for d in held),
    }


# ---- reading a run ----------------------------------------------------------------------------------


def read_run(path: Path) -> FinishedRun:
    """The folder of a run that reached its target.

    Raises:
        ConfigError: with the file that is missing or makes no sense.
    """
    for name in ("config.yaml", "summary.json", "events.jsonl"):
        if not (path / name).is_file():
            hint = "the run has not ended" if name == "summary.json" and (path / "config.yaml").is_file() else ""
            raise ConfigError(f"no finished run: there is no {name}", where=str(path), hint=hint)
    cfg = load_config(path / "config.yaml")
    summary = _summary(path / "summary.json")
    if summary.get("status") != "completed":
        raise ConfigError(
            f"this run did not reach its target: {summary.get('status')}",
            where=str(path / "summary.json"),
            hint="a prediction can be held against a completed run only",
        )
    tape, result = Tape(), {}
    sizes: tuple[int, ...] = ()
    try:
        for record in read_jsonl(path / "events.jsonl"):
            event = str(record.get("event"))
            tape.add(float(record.get("time") or 0.0), event, record)
            if event == "result":
                result = record
            elif event == "run_started":
                sizes = tuple(int(n) for n in record.get("fragment_numel") or ())
        sizes = sizes or fragment_sizes(cfg, Scenario())
        if not (tape.duration_s > 0 and all(_steps(result, name) > 0 for name in cfg.island_names())):
            raise ValueError("it tells no start, no end, or no steps")
        jitter = _jitter(read_jsonl(path / "metrics.jsonl"))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(
            "the run's records make no sense", where=str(path / "events.jsonl"), why=str(error) or repr(error)
        ) from error
    return FinishedRun(path, cfg, summary, result, tape, sizes, jitter)


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("it cannot be read", where=str(path), why=str(error)) from error
    if not isinstance(found, dict):
        raise ConfigError("it is no JSON object", where=str(path))
    return found


def _steps(result: Mapping[str, Any], name: str) -> int:
    return int(result["steps"][name])


def _jitter(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Half width of a uniform spread with the standard deviation of the step times, as a share of their mean.

    Of each learner's figures per interval; a slow drift of all of them is in here too, which does no harm.
    """
    times: dict[str, list[float]] = {}
    for record in metrics:
        if isinstance(record.get("step_time_s"), int | float):
            times.setdefault(str(record["source"]), []).append(float(record["step_time_s"]))
    shares = [_deviation(values) for values in times.values() if len(values) > 1]
    return min(MAX_JITTER, math.sqrt(3) * sum(shares) / len(shares)) if shares else 0.0


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
    return math.sqrt(variance) / mean if mean else 0.0


# ---- from a run to a scenario -----------------------------------------------------------------------


def scenario_of(run: FinishedRun) -> Scenario:
    """Step times and costs as they were measured; everything else is the configuration's."""
    phases = run.result["phases_s"]
    names = run.cfg.island_names()
    step_s = {n: sum(phases[n].get(p, 0.0) for p in STEP_PHASES) / _steps(run.result, n) for n in names}
    steps = sum(_steps(run.result, n) for n in names)
    # What a learner's time goes to besides steps, copies and waiting: its loop, and messages.
    other_s = sum(phases[n].get("other", 0.0) for n in names) / steps
    copy_s = sum(phases[n].get(p, 0.0) for n in names for p in ("gather", "install"))
    return Scenario(
        step_time_s=step_s,
        sizes=run.sizes,
        step_jitter=run.step_jitter,
        costs=Costs(
            merge_bytes_per_s=_rate(run.tape.merged, run.sizes, run.tape.merge_s),
            copy_bytes_per_s=_rate(run.tape.moved, run.sizes, copy_s),
            step_overhead_s=other_s,
        ),
        exact=True,
    )


def _rate(times: Mapping[int, int], sizes: Sequence[int], seconds: float) -> float:
    """Bytes of float32 per second, for so many times each fragment; infinite if it took no time."""
    moved = sum(4 * sizes[fragment] * count for fragment, count in times.items())
    return moved / seconds if seconds > 0 else math.inf


def _inputs(run: FinishedRun, scenario: Scenario) -> dict[str, Any]:
    cfg = run.cfg
    links = {name: cfg.link(name) for name in cfg.island_names()}
    assert isinstance(scenario.step_time_s, Mapping)
    return {
        "step_time_s": {name: _short(s) for name, s in scenario.step_time_s.items()},
        "step_jitter": _short(scenario.step_jitter),
        "step_overhead_s": _short(scenario.costs.step_overhead_s),
        "merge_bytes_per_s": _short(scenario.costs.merge_bytes_per_s),
        "copy_bytes_per_s": _short(scenario.costs.copy_bytes_per_s),
        "up_bps": {name: _short(link.up.rate_bps) for name, link in links.items()},
        "down_bps": {name: _short(link.down.rate_bps) for name, link in links.items()},
        "latency_s": {name: [link.up.latency_s, link.down.latency_s] for name, link in links.items()},
    }


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


# ---- the figures of both sides ----------------------------------------------------------------------


def _measured(run: FinishedRun) -> dict[str, float | None]:
    summary, tokens = run.summary, run.summary["tokens"]
    moved = summary["bytes"].values()
    return _figures(
        run.tape, tokens, summary["goodput"], [b["up"] for b in moved], [b["down"] for b in moved], summary["merges"]
    )


def _predicted(cfg: Config, scenario: Scenario, seed: int) -> dict[str, float | None]:
    tape = Tape()
    world = World(world_spec(cfg, scenario), Streams(cfg.run.seed, seed), on_record=tape.add, jump=False).run()
    tally = world.tally()
    chips = {name: cfg.num_ranks(name) for name in cfg.island_names()}
    goodput = figures(chips, tally)["goodput"]
    up, down = ([m[i] for m in tally.learners.values()] for i in (3, 4))
    return _figures(tape, tally.tokens, goodput, up, down, tally.merges)


def _figures(
    tape: Tape,
    tokens: Mapping[str, float],
    goodput: float | None,
    up: Sequence[float],
    down: Sequence[float],
    merges: float,
) -> dict[str, float | None]:
    processed = tokens["processed"]
    return {
        "tokens_per_s": processed / tape.duration_s,
        "training_time_s": tape.duration_s,
        "goodput": goodput,
        "bytes_up": sum(up) / len(up),
        "bytes_down": sum(down) / len(down),
        "merges": merges,
        "members_per_merge": sum(tape.members) / len(tape.members) if tape.members else None,
        "late_share": tokens["late"] / processed if processed else None,
    }
