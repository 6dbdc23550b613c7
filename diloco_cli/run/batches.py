"""`batch: auto`, the launcher's side: has the islands measured (run.measure), and puts numbers into the configuration.

Owns: how long a step should take, which batch each island then gets, and the start and end of the measuring processes.
Called by: run.launcher, before the run's own processes start.

The rule (docs/mixed-hardware.md): where some islands have a batch of their own, the median of their step times is what
the others go for. Where all are auto, it is the step time of the slowest at the usual batch: no island gets less than
that batch, and what is faster takes more. An island's batch is the multiple of ranks * accumulate whose step time
comes closest.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diloco_cli.config.schema import AUTO, Config, IslandConfig, IslandOverride, LauncherKind
from diloco_cli.errors import DilocoError
from diloco_cli.run import measure
from diloco_cli.run.groups import Group
from diloco_cli.run.measure import Found, Told
from diloco_cli.run.rundir import RunDir, write_json


@dataclass(frozen=True)
class Choice:
    """One island's batch.

    Attributes:
        batch: sequences per step.
        step_time_s: what its steps then take, going by what was measured.
        asked: "auto", or the number that was configured.
        found: what was measured.
    """

    batch: int
    step_time_s: float
    asked: int | str
    found: Found


def measured_islands(cfg: Config) -> list[str]:
    """Those that take part: all that have the run folder in common, so that nobody is missing on a shared machine."""
    return [name for name in cfg.island_names() if cfg.launcher_of(name) is not LauncherKind.ssh]


# ---- the rule -----------------------------------------------------------------------------------------


def step_time_s(found: Found, batch: float) -> float:
    """Seconds of a step at a batch, between those that were measured.

    On the straight line between neighbours, since GPUs take equally long up to some batch and then ever longer.
    """
    points = sorted((int(b), s) for b, s in found.times)
    levelled = list(zip((b for b, _ in points), _levelled([s for _, s in points]), strict=True))
    if batch <= levelled[0][0]:
        return levelled[0][1]
    for (low, low_s), (high, high_s) in itertools.pairwise(levelled):
        if batch <= high:
            return low_s + (high_s - low_s) * (batch - low) / (high - low)
    return levelled[-1][1]


def _levelled(times: list[float]) -> list[float]:
    """The nearest times that do not fall: noise can make a larger batch look faster, and then both get their mean."""
    runs: list[tuple[float, int]] = []
    for total, count in ((t, 1) for t in times):
        while runs and runs[-1][0] / runs[-1][1] >= total / count:
            before, more = runs.pop()
            total, count = total + before, count + more
        runs.append((total, count))
    return [total / count for total, count in runs for _ in range(count)]


def wanted_step_time_s(cfg: Config, found: Mapping[str, Found]) -> float:
    """How long a step should take, from what was found at the batches of their own or the usual ones."""
    own = {name: cfg.island(name).batch for name in found}
    fixed = [step_time_s(found[name], batch) for name, batch in own.items() if isinstance(batch, int)]
    if fixed:
        return statistics.median(fixed)
    return max(step_time_s(found[name], measure.usual_batch(cfg.island(name), cfg.num_ranks(name))) for name in found)


def choose(cfg: Config, found: Mapping[str, Found], wanted_s: float) -> dict[str, Choice]:
    """Each measured island's batch; those with a number keep it."""
    return {
        name: _choice(cfg.island(name), cfg.num_ranks(name), of_island, wanted_s) for name, of_island in found.items()
    }


def _choice(island: IslandConfig, num_ranks: int, found: Found, wanted_s: float) -> Choice:
    if isinstance(island.batch, int):
        return Choice(island.batch, step_time_s(found, island.batch), island.batch, found)
    unit = num_ranks * island.accumulate
    largest = int(max(batch for batch, _ in found.times))
    # Of batches that come equally close, the largest: it makes more of the same time.
    batch = min(range(unit, largest + 1, unit), key=lambda b: (abs(step_time_s(found, b) - wanted_s), -b))
    return Choice(batch, step_time_s(found, batch), AUTO, found)


def settled(cfg: Config, choices: Mapping[str, Choice]) -> Config:
    """The configuration with numbers for every auto, and the shares of steps that run.tokens is worked out by."""
    fastest_s = min(choice.step_time_s for choice in choices.values())
    named = dict(cfg.islands.named)
    for name, choice in choices.items():
        own = dataclasses.replace(named.get(name, IslandOverride()))
        own.step_share = round(fastest_s / choice.step_time_s, 4)
        if choice.asked == AUTO:
            own.batch = choice.batch
        named[name] = own
    each = cfg.islands.each
    if each.batch == AUTO:
        # For islands that join later.
        unit = each.nproc_per_node * max(1, len(each.hosts)) * each.accumulate
        typical = statistics.median(choice.batch for choice in choices.values())
        each = dataclasses.replace(each, batch=max(1, round(typical / unit)) * unit)
    return dataclasses.replace(cfg, islands=dataclasses.replace(cfg.islands, each=each, named=named))


def records(choices: Mapping[str, Choice], wanted_s: float) -> list[dict[str, Any]]:
    """What the tape says, one record per island."""
    return [
        {
            "learner": name,
            "asked": choice.asked,
            "batch": choice.batch,
            "step_time_s": round(choice.step_time_s, 6),
            "wanted_step_time_s": round(wanted_s, 6),
            "measured": [[int(batch), round(seconds, 6)] for batch, seconds in choice.found.times],
            "limit": choice.found.limit or None,
            "device": choice.found.device,
        }
        for name, choice in choices.items()
    ]


# ---- the processes ------------------------------------------------------------------------------------


class Measuring:
    """Measures the islands of a run; `poll` until it gives the choices. Whoever made the groups ends them.

    Attributes:
        groups: the processes, by island.
        wanted_s: how long a step should take, once it is known.
    """

    def __init__(self, run: RunDir, cfg: Config, make_group: Callable[[str], Group]) -> None:
        self._run = run
        self._cfg = cfg
        self._told = Told()
        self._end_by_s = float("inf")
        self.wanted_s: float | None = None
        shutil.rmtree(run.measure, ignore_errors=True)
        run.measure.mkdir()
        self._tell()
        self.groups = {name: make_group(name) for name in measured_islands(cfg)}

    def start(self) -> None:
        """Start the processes."""
        for group in self.groups.values():
            group.start()

    def poll(self) -> dict[str, Choice] | None:
        """Look once; the choices when all is measured and all processes have ended.

        Raises:
            DilocoError: an island failed.
        """
        found = {name: measure.read_found(self._run, name) for name in self.groups}
        for name, group in self.groups.items():
            end = group.poll(time.monotonic())
            if end is not None and not self._told.end:
                raise end.error or DilocoError(f"{name} ended while it was measured", where=f"{name}: batch: auto")
        if not self._told.begin and all(f.ready for f in found.values()):
            self._tell(begin=True)
        if self.wanted_s is None and all(f.waits for f in found.values()):
            self.wanted_s = wanted_step_time_s(self._cfg, found)
            self._tell(step_time_s=self.wanted_s)
        if not self._told.end and all(f.done for f in found.values()):
            self._tell(end=True)
            self._end_by_s = time.monotonic() + self._cfg.launcher.stop_timeout_s
        if not self._told.end or self.wanted_s is None:
            return None
        running = [group for group in self.groups.values() if group.runs]
        if running and time.monotonic() < self._end_by_s:
            return None
        return choose(self._cfg, found, self.wanted_s)

    def _tell(self, **changes: Any) -> None:
        self._told = dataclasses.replace(self._told, **changes)
        write_json(measure.told_file(self._run), asdict(self._told))
