"""The papers' experiments that the simulator is held to: their settings, their figures, and what our models say.

Owns: the figures of ../shared/oracles (tests compare the copies), the models of the two small experiments (mixed chips,
borrowed capacity), and `reproduce`, which puts paper and ours side by side. What the papers' tables leave open here
(rows with paper=None) follows from the same parameters.
Must not: hold a parameter per cell.
Called by: `diloco simulate --reproduce`; tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diloco_cli.errors import ConfigError
from diloco_cli.sim.scale import FailureModel, expected_goodput, fleet, simulate
from diloco_cli.sim.utilization import Method, StepModel, needed_gbps, read_off_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of a table; `paper` is None where the paper's figure is not known to us."""

    row: str
    column: str
    paper: float | None
    ours: float


# ---- goodput: Decoupled DiLoCo (arXiv 2604.21428), Table 1, percent ------------------------------------------------

GOODPUT_CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
# (system, learners, elastic) -> goodput for each number of chips; None: left out.
GOODPUT: dict[tuple[str, int, bool], tuple[float, ...] | None] = {
    ("data_parallel", 1, False): (72, 57, 38, 27, 18),
    ("data_parallel", 1, True): (88, 80, 69, 58, 40),
    ("decoupled_diloco", 2, True): None,
    ("decoupled_diloco", 4, True): None,
    ("decoupled_diloco", 8, True): (98, 96, 94, 88, 80),
    ("decoupled_diloco", 16, True): None,
}
# Enough that chance moves no cell by more than about half a point.
INTERRUPTIONS_PER_CELL = 8_000


def _known(paper: Sequence[float] | None, place: int) -> float | None:
    return None if paper is None else paper[place]


def goodput_cells(model: FailureModel | None = None, *, seed: int = 0) -> list[Cell]:
    """Goodput in percent by simulation, for as long as some 8,000 interruptions take."""
    model = model or FailureModel()
    cells = []
    for (system, learners, elastic), paper in GOODPUT.items():
        row = system + (f" M={learners}" if system == "decoupled_diloco" else " elastic" * elastic)
        for k, chips in enumerate(GOODPUT_CHIPS):
            learners_of_cell = fleet(chips, learners, elastic=elastic)
            # Only running chips are interrupted, so a cell of low goodput takes longer to gather as many.
            running_chips = chips * expected_goodput(learners_of_cell, model)
            hours = INTERRUPTIONS_PER_CELL * model.mtbi_s / running_chips / 3600
            outcome = simulate(learners_of_cell, model, hours=hours, seed=seed)
            column = f"{chips:,} chips"
            cells.append(Cell(row=row, column=column, paper=_known(paper, k), ours=100 * outcome.goodput))
    return cells


# ---- utilization: Streaming DiLoCo (arXiv 2501.18512), Table 4, Gbit/s -----------------------------------------------

UTILIZATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
TABLE_INNER_STEPS = 100
FRAGMENT_LAYERS = 3
# The paper does not say which gigabit it means. Its table wants 7 percent less traffic than 16 bits a parameter in
# units of 10**9; counted in 2**30, which is that, 34 of the 35 known cells are met and no factor is left to choose.
PAPER_GBIT = 2**30
TABLE_MODELS = {
    "1B": StepModel(parameters=1e9, layers=24, step_time_s=0.1),
    "10B": StepModel(parameters=1e10, layers=48, step_time_s=0.8),
    "100B": StepModel(parameters=1e11, layers=108, step_time_s=4.9),
}
NEEDED_GBPS: dict[tuple[str, str], tuple[float, ...]] = {
    ("1B", "data_parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming_overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming_overlap_fp4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("100B", "data_parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "streaming_overlap"): (1.7, 3.6, 4.3, 5.2, 5.2),
}


def table_method(name: str, layers: int) -> Method:
    """The methods of the table: bfloat16 on the wire, or four bits; three strided layers to a fragment."""
    fragments = layers // FRAGMENT_LAYERS
    streaming = Method(inner_steps=TABLE_INNER_STEPS, fragments=fragments)
    return {
        "data_parallel": Method(inner_steps=1),
        "diloco": Method(inner_steps=TABLE_INNER_STEPS),
        "streaming": streaming,
        "streaming_overlap": replace(streaming, overlap_steps=1),
        "streaming_overlap_fp4": replace(streaming, overlap_steps=1, wire_bits=4.0),
    }[name]


def utilization_cells() -> list[Cell]:
    """Gbit/s for each utilization, read off the paper's grid of bandwidths."""
    cells = []
    for size, model in TABLE_MODELS.items():
        for name in ("data_parallel", "diloco", "streaming", "streaming_overlap", "streaming_overlap_fp4"):
            paper = NEEDED_GBPS.get((size, name))
            method = table_method(name, model.layers)
            for k, utilization in enumerate(UTILIZATIONS):
                ours = read_off_grid(needed_gbps(model, method, utilization) * 1e9 / PAPER_GBIT)
                cells.append(Cell(row=f"{size} {name}", column=f"{utilization:.0%}", paper=_known(paper, k), ours=ours))
    return cells


# ---- heterogeneous: mixed chip generations, percent ----------------------------------------------------------------

# Four learners on each of two generations 18 percent apart: mean seconds for the same work, relative to the faster.
MIXED_STEP_TIMES = (1.0,) * 4 + (1.18,) * 4
INJECTED_VARIANCE = 0.10
HETEROGENEOUS: dict[tuple[int, bool], float] = {(8, False): 84, (1, False): 100, (1, True): 100}


def quorum_goodput(
    step_times_s: Sequence[float], *, quorum: int, speed_variance: float, rounds: int = 20_000, seed: int = 0
) -> float:
    """Share of the learners' time that is not spent waiting until `quorum` of them have come, 0..1.

    In each round a learner's time is spread evenly around its mean, with the standard deviation `speed_variance` of it
    (as in scale.FailureModel). Who is faster than the quorum waits for it; who is slower is waited for by nobody. The
    grace window adds no wait: it only uses slack in which the learners go on.
    """
    if not 1 <= quorum <= len(step_times_s):
        raise ConfigError(f"a quorum of {quorum} is not possible with {len(step_times_s)} learners")
    half = math.sqrt(3) * speed_variance
    streams = [random.Random(f"{seed}/learner-{i}/speed") for i in range(len(step_times_s))]
    worked = lasted = 0.0
    for _ in range(rounds):
        times = [t * (1 + half * s.uniform(-1, 1)) for t, s in zip(step_times_s, streams, strict=True)]
        quorum_s = sorted(times)[quorum - 1]
        worked += sum(times)
        lasted += sum(max(t, quorum_s) for t in times)
    return worked / lasted


def heterogeneous_cells(*, seed: int = 0) -> list[Cell]:
    """Goodput in percent; the quality that goes with it takes a real model (`diloco simulate --learn`)."""
    return [
        Cell(
            row=f"quorum {quorum}, {'grace' if grace else 'no grace'}",
            column="goodput",
            paper=paper,
            ours=100 * quorum_goodput(MIXED_STEP_TIMES, quorum=quorum, speed_variance=INJECTED_VARIANCE, seed=seed),
        )
        for (quorum, grace), paper in HETEROGENEOUS.items()
    ]


# ---- scavenging: borrowed capacity, training time relative to none -------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareCapacity:
    """How much others leave over, in units of the job's own chips.

    At any time nothing is over with the chance 1 - `share_of_time`; otherwise an amount that is exponentially
    distributed. It stays so for `hold_s`, and is then drawn anew. Of it the job takes whole pieces of `piece`, up to
    what it asks for. The table tells `hold_s` only as a multiple of the job's stops (docs/failure-model.md).
    """

    share_of_time: float = 0.54
    mean_amount: float = 1.55
    hold_s: float = 33.5
    piece: float = 0.25

    def taken(self, asked: float) -> list[tuple[float, float]]:
        """(probability, amount) of what a job that asks for `asked` has at a time, smallest amount first."""
        pieces = round(asked / self.piece)
        at_least = [1.0] + [
            self.share_of_time * math.exp(-k * self.piece / self.mean_amount) for k in range(1, pieces + 1)
        ]
        beyond = [*at_least[1:], 0.0]
        return [(p - q, k * self.piece) for k, (p, q) in enumerate(zip(at_least, beyond, strict=True))]


EXTRA_PERCENT = (0, 25, 50, 100, 300)
SCAVENGING: dict[str, tuple[float, ...]] = {
    "data_parallel": (1.0, 1.07, 1.09, 1.02, 0.8),
    "decoupled_diloco": (1.0, 0.9, 0.83, 0.75, 0.62),
}


def training_time(asked: float, *, decoupled: bool, spare: SpareCapacity, model: FailureModel) -> float:
    """Training time with borrowed chips over that without any, in the long run.

    Each change of what the job has costs elastic data parallel a stop of all its chips (`shrink_s`, `grow_s`); with
    decoupled learners those that come spend `grow_s` on joining, and nobody else does anything.
    """
    levels = spare.taken(asked)
    speed = 0.0
    for p, before in levels:
        for q, after in levels:
            stop_s = model.grow_s if after > before else model.shrink_s if after < before else 0.0
            if decoupled:
                worked = 1 + after - max(0.0, after - before) * min(1.0, model.grow_s / spare.hold_s)
            else:
                worked = (1 + after) * max(0.0, 1 - stop_s / spare.hold_s)
            speed += p * q * worked
    return 1 / speed


def scavenging_cells() -> list[Cell]:
    """Training time relative to no extra compute."""
    spare, model = SpareCapacity(), FailureModel()
    return [
        Cell(
            row=system,
            column=f"+{percent}%",
            paper=paper,
            ours=training_time(percent / 100, decoupled=system == "decoupled_diloco", spare=spare, model=model),
        )
        for system, row in SCAVENGING.items()
        for percent, paper in zip(EXTRA_PERCENT, row, strict=True)
    ]


TABLES: dict[str, Callable[[], list[Cell]]] = {
    "goodput": goodput_cells,
    "utilization": utilization_cells,
    "heterogeneous": heterogeneous_cells,
    "scavenging": scavenging_cells,
}


def reproduce(name: str) -> list[Cell]:
    """The cells of a paper's table, row by row: goodput, utilization, heterogeneous or scavenging."""
    if name not in TABLES:
        raise ConfigError(f"there is no table {name!r} to reproduce", hint=f"one of {', '.join(TABLES)}")
    return TABLES[name]()
