"""`batch: auto`, the island's side: how long its steps take at several batches, on its own hardware.

Owns: what is measured, and the two files in RUN/measure/ by which island and launcher talk: ISLAND.json (what was
found so far) and told.json (when to begin, how long a step should take, when to end). Decides no batch: run.batches,
on the launcher's side, does. Called by: run.learner_main, in a start of the island that serves nothing else.

Theory: islands of one machine share its cores, so all of them are measured at once, and one that has nothing more to
measure goes on taking steps until the last one is done. Steps are those of training, with the real model, data, ranks
and emulated speed; the first ones of each batch are left out (buffers, kernels), and of the others the median is taken.
An island tries twice the batch each time. Beyond the usual batch it waits to be told how long a step should take, so
that it never needs more memory than a batch twice as large as it will have.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_cli.config.schema import AUTO, IslandConfig
from diloco_cli.run.rundir import RunDir, write_json

if TYPE_CHECKING:
    from diloco_cli.train.island import Island
    from diloco_cli.train.loop import BatchSource, Trainer

log = logging.getLogger(__name__)

VARIABLE = "DILOCO_MEASURE"
"""Set in the environment of an island that is started to be measured."""

WARM_UP_STEPS = 2
LEAST_STEPS = 3
MOST_STEPS = 40
# So long is each batch measured, if that is more than the fewest steps: short steps are disturbed by each other.
SIZE_S = 0.4
MOST_DOUBLINGS = 24
# Of a device's memory; what is predicted to need more is not tried.
MEMORY_SHARE = 0.9


@dataclass
class Found:
    """What an island says of itself, ISLAND.json.

    Attributes:
        ready: it takes steps, and waits for the others.
        times: [batch, median seconds per step] in the order in which they were measured.
        limit: why no larger batch was tried although it was asked for; empty if that is not so.
        waits: it has measured up to the usual batch and is to be told the time to go for.
        done: it has all that it was to measure.
        device: cpu, cuda or mps.
    """

    ready: bool = False
    times: list[list[float]] = field(default_factory=list)
    limit: str = ""
    waits: bool = False
    done: bool = False
    device: str = ""


@dataclass
class Told:
    """What the launcher says to all islands, told.json.

    Attributes:
        begin: all of them take steps.
        step_time_s: how long a step should take; None: not known yet.
        end: all of them are done.
    """

    begin: bool = False
    step_time_s: float | None = None
    end: bool = False


def usual_batch(cfg: IslandConfig, num_ranks: int) -> int:
    """The default batch, or the next larger one that can be shared out."""
    unit = num_ranks * cfg.accumulate
    return -(-IslandConfig.batch // unit) * unit if isinstance(IslandConfig.batch, int) else unit


def found_file(run: RunDir, island: str) -> Path:
    """Where an island's Found is."""
    return run.measure / f"{island}.json"


def told_file(run: RunDir) -> Path:
    """Where the launcher's Told is."""
    return run.measure / "told.json"


def read_found(run: RunDir, island: str) -> Found:
    """What the island has said so far."""
    return Found(**_read(found_file(run, island)))


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return dict(said)


def measure(run: RunDir, name: str, island: Island, trainer: Trainer, cursor_of: Callable[[int], BatchSource]) -> None:
    """Take steps until the launcher ends it. Collective over the island's ranks.

    Args:
        trainer: thrown away afterwards; its model learns on the way.
        cursor_of: this rank's part of the island's batches of that many sequences.
    """
    _Measuring(run, name, island, trainer, cursor_of).run()


class _Measuring:
    def __init__(
        self, run: RunDir, name: str, island: Island, trainer: Trainer, cursor_of: Callable[[int], BatchSource]
    ) -> None:
        self._dir = run
        self._name = name
        self._island = island
        self._trainer = trainer
        self._cursor_of = cursor_of
        self._found = Found(device=island.device.type)
        # (batch, peak bytes) of what was measured.
        self._peaks: list[tuple[int, int]] = []

    def run(self) -> None:
        unit = self._island.world_size * self._island.cfg.accumulate
        is_auto = self._island.cfg.batch == AUTO
        first = unit if is_auto else self._island.cfg.sequences
        self._use(first)
        for _ in range(WARM_UP_STEPS):
            self._trainer.step()
        self._say(ready=True)
        self._step_until(lambda told: told.begin)
        self._measure(first)
        if is_auto:
            for batch in self._wanted(first):
                if not self._measure(batch):
                    break
        self._say(waits=True, done=True)
        log.info("%s: %s", self._name, self._found)
        self._step_until(lambda told: told.end)

    def _wanted(self, first: int) -> Iterator[int]:
        """The batches after the first one, each twice as large, until a step takes as long as it should."""
        usual = usual_batch(self._island.cfg, self._island.world_size)
        wanted_us: int | None = None
        batch = first
        for _ in range(MOST_DOUBLINGS):
            if batch >= usual and wanted_us is None:
                self._say(waits=True)
                wanted_us = self._step_until(lambda told: told.step_time_s is not None)
            if self._agree(wanted_us is not None and round(self._found.times[-1][1] * 1e6) >= wanted_us):
                return
            batch *= 2
            yield batch

    def _measure(self, batch: int) -> bool:
        """Measure steps of that batch; False if memory does not allow it."""
        if not self._fits(batch):
            self._found.limit = f"memory: a batch of {batch} does not fit"
            return False
        try:
            self._use(batch)
            times = self._time_steps()
        except Exception as error:
            # Where ranks share the work, the others now wait for this one: only an island of one can go on.
            if not _is_out_of_memory(error) or self._island.world_size > 1 or not self._found.times:
                raise
            self._found.limit = f"memory: a batch of {batch} does not fit"
            self._recover()
            return False
        self._peaks.append((batch, self._peak_bytes()))
        self._found.times.append([batch, statistics.median(times)])
        self._say()
        return True

    def _time_steps(self) -> list[float]:
        for _ in range(WARM_UP_STEPS):
            self._trainer.step()
        times: list[float] = []
        enough = False
        while not enough:
            times.append(self._trainer.step().step_time_s)
            enough = len(times) >= MOST_STEPS or (len(times) >= LEAST_STEPS and sum(times) >= SIZE_S)
            enough = self._agree(enough)
        return times

    def _step_until(self, condition: Callable[[Told], bool]) -> int:
        """Take steps until the launcher has said it; microseconds of a step that it asks for, on all ranks."""
        while True:
            self._trainer.step()
            told = Told(**_read(told_file(self._dir))) if self._island.is_main else Told()
            over, wanted_us = self._island.broadcast_plan(
                [int(condition(told)), round((told.step_time_s or 0.0) * 1e6)] if self._island.is_main else None
            )
            if over:
                return wanted_us

    def _agree(self, flag: bool) -> bool:
        """What the main rank says."""
        return bool(self._island.broadcast_plan([int(flag)] if self._island.is_main else None)[0])

    def _use(self, batch: int) -> None:
        self._trainer.cursor = self._cursor_of(batch)

    def _say(self, **changes: Any) -> None:
        for key, value in changes.items():
            setattr(self._found, key, value)
        if self._island.is_main:
            write_json(found_file(self._dir, self._name), asdict(self._found))

    # ---- memory of a device (on CPUs nothing says when there is too little) --------------------------

    def _peak_bytes(self) -> int:
        if self._island.device.type != "cuda":
            return 0
        import torch

        return int(torch.cuda.max_memory_reserved(self._island.device))

    def _fits(self, batch: int) -> bool:
        """Whether the device's memory is enough, going by the two largest batches so far. Collective."""
        too_large = False
        if self._island.device.type == "cuda" and len(self._peaks) >= 2:
            import torch

            (small, before), (large, after) = self._peaks[-2:]
            needed = after + (after - before) / (large - small) * (batch - large)
            free, _ = torch.cuda.mem_get_info(self._island.device)
            too_large = needed > MEMORY_SHARE * (free + torch.cuda.memory_reserved(self._island.device))
        return not self._island.any_rank(too_large)

    def _recover(self) -> None:
        import torch

        self._trainer.optimizer.zero_grad()
        if self._island.device.type == "cuda":
            torch.cuda.empty_cache()
        self._use(int(self._found.times[-1][0]))


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
