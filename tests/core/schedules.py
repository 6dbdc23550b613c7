"""Deterministic simulation testing: random schedules of faults, thrown at the protocol in tests/core/world.py.

A schedule is a value (world.Rules): links, speeds, and a list of faults, all drawn from a seed before anything runs. So
a seed always fails in the same way, and a failing schedule can be made smaller by leaving things out: `shrink`.

    python tests/core/schedules.py --seconds 600 [--seed 0]       # as long as asked; prints the shortest schedule found

What is checked is in world.World: after every event, and at the end.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from world import Fault, Rules, World

KINDS = (
    "kill",
    "hang",
    "join",
    "reconnect",
    "poison",
    "heal",
    "duplicate",
    "slow",
    "cut",
    "slow_link",
    "clock",
    "syncer",
    "shard",
)
MAX_EVENT = 600

Fails = Callable[[Rules], str]
"""What is wrong with a schedule; empty: nothing."""


def schedule(seed: int) -> Rules:
    """The schedule of a seed."""
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    names = [f"i{k}" for k in range(count)]
    inner_steps = chance.randint(2, 8)
    target = chance.randint(3, 30)
    lockstep = chance.random() < 0.35
    horizon_s = target * 0.12 + 1.0
    faults = sorted(
        (_fault(chance, names, horizon_s) for _ in range(chance.randint(0, 10))),
        key=lambda f: (f.at_s, f.at_event or 0, f.kind, f.learner),
    )
    bounded = not lockstep and chance.random() < 0.3
    return Rules(
        step_s={name: chance.choice([0.05, 0.06, 0.1, 0.4]) for name in names},
        num_fragments=chance.randint(1, 5),
        inner_steps=inner_steps,
        overlap_steps=chance.randint(1, inner_steps),
        quorum=chance.randint(1, count),
        grace_safety=chance.choice([0.0, 0.5, 0.9]),
        target_steps=target,
        keep_late=chance.random() < 0.5,
        lockstep=lockstep,
        same_offset=lockstep and chance.random() < 0.5,
        max_drift_steps=chance.randint(inner_steps, 2 * inner_steps) if bounded else None,
        quorum_timeout_s=chance.choice([0.0, 1.0, 8.0]),
        latency_s=chance.choice([(0.0, 0.0), (0.001, 0.01), (0.001, 0.3), (0.1, 0.1)]),
        merge_s=chance.choice([(0.0, 0.0), (0.001, 0.02), (0.1, 0.4)]),
        report_every=chance.choice([1, 1, 3]),
        present=None if chance.random() < 0.7 else frozenset(n for n in names if chance.random() < 0.7),
        faults=tuple(f for f in faults if not (bounded and f.kind == "poison")),
        stop_at_s=round(chance.uniform(0.0, horizon_s), 3) if chance.random() < 0.15 else None,
        finish_tolerance=chance.choice([0.0, 0.1, 0.5]),
        finish_wait_s=chance.choice([0.0, 0.5, 10.0]),
        seed=chance.randrange(2**16),
    )


def _fault(chance: random.Random, names: list[str], horizon_s: float) -> Fault:
    kind = chance.choice(KINDS)
    factor = {
        "slow": chance.choice([0.5, 4.0]),
        "cut": chance.choice([0.2, 1.0, 3.0, 9.0]),
        "slow_link": chance.choice([3.0, 10.0]),
        "syncer": chance.choice([0.01, 0.2, 1.0, 6.0]),
        "shard": chance.choice([0.01, 0.2, 1.0, 6.0]),
        "clock": chance.choice([0.01, 0.5, 3.0, 30.0]),
    }.get(kind, 1.0)
    learner = chance.choice(names)
    if chance.random() < 0.5:
        return Fault(0.0, kind, learner, factor, at_event=chance.randint(1, MAX_EVENT))
    return Fault(round(chance.uniform(0.0, horizon_s), 3), kind, learner, factor)


def violation(rules: Rules, make: Callable[[Rules], World] = World) -> str:
    """What is wrong when the schedule runs; empty: nothing."""
    try:
        make(rules).run()
    except AssertionError as error:  # a Violation, or an assertion of the cores
        return f"{type(error).__name__}: {error}"
    except (KeyError, IndexError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- making a failing schedule smaller --------------------------------------------------------------


def shrink(rules: Rules, fails: Fails, budget: int = 2_000) -> Rules:
    """The smallest schedule found that still fails: faults left out, then everything else made plainer."""
    tried = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(rules):
            tried += 1
            if tried > budget:
                return rules
            if fails(smaller):
                rules, progress = smaller, True
                break
    return rules


def _smaller(rules: Rules) -> Iterator[Rules]:
    """Plainer schedules, the boldest steps first."""
    n = len(rules.faults)
    for size in (n // 2, 1):
        for start in range(0, n, max(1, size)):
            if size:
                yield replace(rules, faults=rules.faults[:start] + rules.faults[start + size :])
    names = list(rules.step_s)
    for name in names if len(names) > 1 else ():
        step_s = {k: v for k, v in rules.step_s.items() if k != name}
        present = None if rules.present is None else rules.present - {name}
        faults = tuple(f for f in rules.faults if f.learner != name)
        yield replace(rules, step_s=step_s, present=present, faults=faults, quorum=min(rules.quorum, len(step_s)))
    plain = Rules(step_s=rules.step_s)
    for key in ("present", "stop_at_s", "keep_late", "same_offset", "max_drift_steps", "report_every", "latency_s"):
        if getattr(rules, key) != getattr(plain, key):
            yield replace(rules, **{key: getattr(plain, key)})
    for key, least in (
        ("num_fragments", 1),
        ("target_steps", 1),
        ("inner_steps", 2),
        ("overlap_steps", 1),
        ("quorum", 1),
    ):
        value = getattr(rules, key)
        for other in sorted({least, (least + value) // 2, value - 1}):
            if least <= other < value and (key != "inner_steps" or other >= rules.overlap_steps):
                yield replace(rules, **{key: other})
    for key in ("latency_s", "merge_s"):
        if getattr(rules, key) != (0.0, 0.0):
            yield replace(rules, **{key: (0.0, 0.0)})
    for i, fault in enumerate(rules.faults):
        if fault.at_event is not None and fault.at_event > 1:
            earlier = replace(fault, at_event=fault.at_event // 2)
            yield replace(rules, faults=(*rules.faults[:i], earlier, *rules.faults[i + 1 :]))
    if rules.seed:
        yield replace(rules, seed=0)


def as_code(rules: Rules) -> str:
    """The schedule as it may be pasted into a test: only what differs from the defaults."""
    plain = Rules(step_s={})
    lines = [
        f"    {f.name}={getattr(rules, f.name)!r},"
        for f in fields(rules)
        if getattr(rules, f.name) != getattr(plain, f.name)
    ]
    return "Rules(\n" + "\n".join(lines) + "\n)"


def report(seed: int, fails: Fails = violation) -> str:
    """What is wrong with a seed's schedule, and the shortest one found; empty: nothing is wrong."""
    rules = schedule(seed)
    if not (problem := fails(rules)):
        return ""
    small = shrink(rules, fails)
    return f"seed {seed}: {problem}\nshortest schedule found: {fails(small)}\n{as_code(small)}"


def main() -> int:
    """The long mode."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others follow")
    args = parser.parse_args()
    until_s, seed, failed = time.monotonic() + args.seconds, args.seed, Counter[str]()
    while time.monotonic() < until_s:
        if found := report(seed):
            kind = found.partition(": ")[2][:60]
            failed[kind] += 1
            if failed[kind] == 1:  # the next ones of the same kind say nothing new
                print(found, flush=True)
        seed += 1
    print(f"{seed - args.seed} schedules, {failed.total()} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
