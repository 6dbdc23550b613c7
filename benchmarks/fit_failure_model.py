"""Fit sim.scale.FailureModel to oracles/goodput.json: few parameters, one set for all cells.

    python benchmarks/fit_failure_model.py ORACLES_DIR

Searches with the closed forms, multiplied for each cell by simulation over closed form at the point where the search
began, and begins again from what it found. Prints the best set for some slice sizes and the errors of the shipped one
(all by simulation). Nobody calls it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diloco_cli.sim.scale import FailureModel, Learner, expected_goodput, fleet, simulate

FITTED = {"notice_s": (0.1, 30.0), "shrink_s": (1.0, 60.0), "grow_s": (1.0, 60.0), "return_s": (10.0, 600.0)}
INTERRUPTIONS = 16_000
# The table allows 3 points in any cell; beyond this the search pays, so that chance does not push a cell over.
COMFORTABLE_POINTS = 2.4

Cells = list[tuple[list[Learner], float]]


def read_cells(oracles: Path) -> Cells:
    table = json.loads((oracles / "goodput.json").read_text())
    return [
        (fleet(chips, row["learners"], elastic=row["elastic"]), paper)
        for row in table["rows"]
        for chips, paper in zip(table["chips"], row["goodput"], strict=True)
    ]


def simulated(cells: Cells, model: FailureModel) -> list[float]:
    """Goodput of every cell in percent."""
    found = []
    for learners, paper in cells:
        chips = sum(learner.chips for learner in learners)
        hours = INTERRUPTIONS * model.mtbi_s / chips / 3600 * 100 / paper
        found.append(100 * simulate(learners, model, hours=hours, seed=1).goodput)
    return found


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def fit(cells: Cells, start: FailureModel, names: Sequence[str] = tuple(FITTED), tries: int = 2000) -> FailureModel:
    """The best of `tries` random steps from `start`, each kept if it is better."""
    correction = [
        s / (100 * expected_goodput(c[0], start)) for s, c in zip(simulated(cells, start), cells, strict=True)
    ]

    def badness(model: FailureModel) -> float:
        errors = [
            abs(100 * expected_goodput(learners, model) * by - paper)
            for by, (learners, paper) in zip(correction, cells, strict=True)
        ]
        return sum(errors) / len(errors) + 2 * max(0.0, max(errors) - COMFORTABLE_POINTS)

    stream = random.Random(0)
    best, best_value = start, badness(start)
    for k in range(tries):
        width = 0.4 * (1 - k / tries) + 0.01
        changed = {
            name: _within(getattr(best, name) * stream.lognormvariate(0, width), FITTED[name])
            for name in names
            if stream.random() < 0.6
        }
        candidate = replace(best, **changed)
        if (value := badness(candidate)) < best_value:
            best, best_value = candidate, value
    return best


def show(label: str, cells: Cells, model: FailureModel) -> None:
    errors = [s - paper for s, (_, paper) in zip(simulated(cells, model), cells, strict=True)]
    mean, most = sum(map(abs, errors)) / len(errors), max(map(abs, errors))
    print(f"{label:12} mean {mean:.2f} max {most:.2f}  ", *(f"{n}={getattr(model, n):.4g}" for n in FITTED))
    print(" " * 12, *(f"{e:+.1f}" for e in errors), flush=True)


def main() -> None:
    cells = read_cells(Path(sys.argv[1]))
    for chips in (256, 4096):
        model = FailureModel(chips_per_slice=chips)
        for _ in range(3):
            model = fit(cells, model)
        show(f"slice {chips}", cells, model)
    model, names = FailureModel(notice_s=0.0), [name for name in FITTED if name != "notice_s"]
    for _ in range(3):
        model = fit(cells, model, names)
    show("no notice", cells, model)
    show("shipped", cells, FailureModel())


if __name__ == "__main__":
    main()
