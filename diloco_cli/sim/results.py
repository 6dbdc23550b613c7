"""What a simulation answers: the figures of each algorithm over trials, and what is needed to reach one of them.

Owns: the definitions of the figures, and the documents of `simulate --json` (spec/interface.md). Same seed, same bytes:
figures are rounded to nine digits, since the last ones may differ between machines' libraries.
Called by: cli.

    goodput              chip-seconds computed on steps that end up in the model, over chip-seconds since the first step
    uptime               share of that time in which at least one learner trains
    compute_utilization  computing over computing plus waiting for the network (and, in lock-step, for the others)
    tokens_per_s         processed tokens over the whole time
    bytes_per_link       up and down together, mean over islands
    staleness_steps      mean age of a fragment at a learner, in its steps
    quorum_filled        contributions in a merge over islands, mean over merges
    cost                 chips times hours times price, and what was sent times its price; null without prices

Islands of very many chips (`Scenario.interruptions`) are two simulations: the protocol in sim.world without
interruptions, and the chips in sim.scale; `_interrupted` puts them together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cli.config.quantities import format_rate
from diloco_cli.config.schema import Algorithm, Config
from diloco_cli.core.faults import to_json
from diloco_cli.errors import ConfigError
from diloco_cli.run.settings import is_lockstep
from diloco_cli.sim.baselines import Outcome, run_data_parallel
from diloco_cli.sim.engine import Streams
from diloco_cli.sim.scale import Learner, expected_goodput
from diloco_cli.sim.scale import simulate as simulate_chips
from diloco_cli.sim.scenario import Scenario, check, fragment_sizes, world_spec
from diloco_cli.sim.timeline import Timeline
from diloco_cli.sim.world import RandomFaults, Tally, World, WorldSpec

SCHEMA_VERSION = 1
ELASTIC = "data_parallel_elastic"
ALGORITHMS = ("data_parallel", ELASTIC, "diloco", "streaming", "decoupled")
LOW, HIGH = 0.05, 0.95
"""Quantiles over trials."""

BANDWIDTH, LEARNERS, INNER_STEPS = "bandwidth", "learners", "inner-steps"
TABLE_FACTORS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
MIN_RATE_BPS, MAX_RATE_BPS = 1e3, 1e15
MAX_LEARNERS, MAX_INNER_STEPS = 256, 20_000
MAX_INNER_STEPS_DECOUPLED = 2_048
"""Without waiting, larger H no longer changes what a link can do within overlap_steps."""

ASSUMPTIONS = (
    "links are those of the configuration, one per island and direction; the syncer's own network is not a limit",
    "what a step computes is the same whether data travels or not",
    "data parallelism overlaps nothing: a step computes, then reduces its gradients around a ring of islands",
    "long stretches without failures are taken as the mean of a window in which nothing changed any more",
)

QUORUM_NOTE = (
    "decoupled learners never wait for a link, they miss merges: so a utilization is reached where quorums are, times"
    " it, as full as on unlimited links"
)


def simulate(
    cfg: Config,
    scenario: Scenario,
    *,
    algorithms: Sequence[str] = ALGORITHMS,
    seed: int | None = None,
    trials: int = 1,
) -> dict[str, Any]:
    """Run each algorithm on the same links, speeds and failures: the document of `simulate --json`.

    Args:
        algorithms: of ALGORITHMS. `diloco` sends the model whole, as its preset does.
        seed: of all chance; default run.seed.
        trials: more than one makes sense where there is chance; where there is none, one is run.

    Raises:
        ConfigError: the scenario makes no sense.
    """
    check(cfg, scenario)
    if unknown := [a for a in algorithms if a not in ALGORITHMS]:
        raise ConfigError(f"there is no algorithm {unknown[0]}", hint=f"one of {', '.join(ALGORITHMS)}")
    if trials < 1:
        raise ConfigError(f"{trials} trials", hint="write 1 or more")
    seed = cfg.run.seed if seed is None else seed
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": describe(cfg, scenario, seed=seed, trials=trials),
        "algorithms": {a: _algorithm(cfg, scenario, a, seed, trials) for a in algorithms},
    }


def describe(cfg: Config, scenario: Scenario, *, seed: int, trials: int) -> dict[str, Any]:
    """The scenario in the document: what the figures follow from."""
    names = cfg.island_names()
    links = [cfg.link(name) for name in names]
    random_faults = scenario.random_faults
    return {
        "islands": len(names),
        "steps": cfg.target_steps(),
        "step_time_s": {name: _rounded(scenario.step_s(cfg, name)) for name in names},
        "step_jitter": scenario.step_jitter,
        "tokens_per_step": sum(cfg.batch_tokens(name) for name in names),
        "parameters": sum(fragment_sizes(cfg, scenario)),
        "fragments": len(fragment_sizes(cfg, scenario)),
        "named_model": scenario.parameters is None,
        "inner_steps": cfg.sync.inner_steps,
        "overlap_steps": cfg.sync.overlap_steps,
        "quorum": cfg.sync.quorum,
        "grace_safety": cfg.sync.grace_safety,
        "wire_up": cfg.network.wire_up.value,
        "wire_down": cfg.network.wire_down.value,
        "up_bps": [_finite(link.up.rate_bps) for link in links],
        "down_bps": [_finite(link.down.rate_bps) for link in links],
        "latency_s": [[link.up.latency_s, link.down.latency_s] for link in links],
        "faults": _faults(scenario),
        "random_faults": dataclasses.asdict(random_faults) if random_faults is not None else None,
        "interruptions": dataclasses.asdict(scenario.interruptions) if scenario.interruptions is not None else None,
        "chips": _chips(cfg, scenario),
        "chip_hour_price": scenario.chip_hour_price,
        "egress_gb_price": scenario.egress_gb_price,
        "duration_s": _finite(scenario.duration_s),
        "seed": seed,
        "trials": trials,
        "assumptions": [*scenario.notes, *ASSUMPTIONS],
    }


def configured_for(cfg: Config, algorithm: str) -> Config:
    """The configuration under another algorithm; one that is set there already is taken as it stands."""
    if algorithm == cfg.sync.algorithm.value or algorithm in ("data_parallel", ELASTIC):
        return cfg
    sync = dataclasses.replace(cfg.sync, algorithm=Algorithm(algorithm))
    if sync.algorithm is not Algorithm.decoupled:
        # Lock-step waits for all who are there anyhow; a quorum of all would end the run with the first failure.
        sync.quorum = 1
    if sync.algorithm is Algorithm.diloco:
        sync.fragments = 1
    return dataclasses.replace(cfg, sync=sync)


def run_once(
    cfg: Config,
    scenario: Scenario,
    algorithm: str,
    *,
    seed: int,
    trial: int = 0,
    timeline: Timeline | None = None,
) -> Outcome:
    """One trial of one algorithm; `timeline` records what each island does."""
    streams = Streams(seed, trial)
    if algorithm in ("data_parallel", ELASTIC):
        spec = world_spec(cfg, scenario)
        elastic = algorithm == ELASTIC
        return run_data_parallel(spec, streams, elastic=elastic, restart_s=scenario.restart_s, timeline=timeline)
    own = configured_for(cfg, algorithm)
    if own is not cfg and algorithm == "diloco" and scenario.sizes:
        scenario = dataclasses.replace(scenario, sizes=(sum(scenario.sizes),))
    world = World(world_spec(own, scenario), streams, jump=not scenario.exact, timeline=timeline).run()
    assert world.finish is not None
    return Outcome(world.finish.status, world.tally())


def _faults(scenario: Scenario) -> list[dict[str, Any]]:
    """As core.faults writes them; without end: null."""
    plan = to_json(scenario.faults)
    return [{**f, "duration_s": _finite(f["duration_s"])} if "duration_s" in f else f for f in plan]


def figures(spec_chips: Mapping[str, int], tally: Tally) -> dict[str, float | None]:
    """The figures of one trial, from what happened in it; see the module's docstring."""
    learners = tally.learners
    processed = tally.tokens["processed"]
    useful = 1.0 - tally.wasted / processed if processed else None
    computed_s = sum(m[1] for m in learners.values())
    waited_s = sum(m[2] for m in learners.values())
    busy_s = sum(learners[name][1] * chips for name, chips in spec_chips.items())
    allotted_s = sum(spec_chips.values()) * tally.running_s
    return {
        "goodput": useful * busy_s / allotted_s if useful is not None and allotted_s else None,
        "uptime": tally.training_s / tally.running_s if tally.running_s else None,
        "compute_utilization": computed_s / (computed_s + waited_s) if computed_s else None,
        "tokens_per_s": processed / tally.time_s if tally.time_s else None,
        "wall_time_s": tally.time_s,
        "bytes_per_link": sum(m[3] + m[4] for m in learners.values()) / len(learners),
        "staleness_steps": tally.stale / tally.stale_steps if tally.stale_steps else None,
        "quorum_filled": tally.members / tally.merges / len(learners) if tally.merges else None,
        "merges": tally.merges,
    }


def _algorithm(cfg: Config, scenario: Scenario, algorithm: str, seed: int, trials: int) -> dict[str, Any]:
    count = trials if scenario.is_random(cfg) else 1
    if scenario.interruptions is None:
        outcomes = [run_once(cfg, scenario, algorithm, seed=seed, trial=i) for i in range(count)]
    else:
        calm = dataclasses.replace(scenario, interruptions=None)
        # Where chips are the only chance, the protocol is the same in every trial.
        runs = count if calm.is_random(cfg) else 1
        alone = [run_once(cfg, calm, algorithm, seed=seed, trial=i) for i in range(runs)]
        outcomes = [_interrupted(cfg, scenario, algorithm, alone[i % runs], seed, i) for i in range(count)]
    chips = _chips(cfg, scenario)
    rows = [figures(chips, o.tally) for o in outcomes]
    statuses = [o.status for o in outcomes]
    costs = [_cost(scenario, chips, o.tally) for o in outcomes]
    return {
        **{name: spread([row[name] for row in rows]) for name in rows[0]},
        "cost": None if costs[0] is None else spread(costs),
        "bytes": _bytes(outcomes),
        "tokens": {k: round(_mean([o.tally.tokens.get(k, 0.0) for o in outcomes])) for k in outcomes[0].tally.tokens},
        "status": {s: statuses.count(s) for s in sorted(set(statuses))},
        "trials": count,
    }


def _cost(scenario: Scenario, chips: Mapping[str, int], tally: Tally) -> float | None:
    """Of the chips for the whole time, and of all bytes, each paid once by its sender; None without prices."""
    if scenario.chip_hour_price is None and scenario.egress_gb_price is None:
        return None
    sent_gb = sum(m[3] + m[4] for m in tally.learners.values()) / 1e9
    chip_hours = sum(chips.values()) * tally.time_s / 3600
    return chip_hours * (scenario.chip_hour_price or 0.0) + sent_gb * (scenario.egress_gb_price or 0.0)


def _interrupted(cfg: Config, scenario: Scenario, algorithm: str, calm: Outcome, seed: int, trial: int) -> Outcome:
    """What was simulated without interruptions, with the chips' share of goodput (sim.scale) taken off.

    All learners of data parallelism are one fleet that stops as a whole. So they are where merges wait for everybody
    (diloco, streaming): every stop of one is taken as a stop of all, which is the most that it can cost. Decoupled
    learners stop one by one. A learner that stops computes, sends and contributes nothing; steps take as long as
    before, with fewer samples while slices are away.
    """
    model = scenario.interruptions
    assert model is not None
    chips = _chips(cfg, scenario)
    together = algorithm in ("data_parallel", ELASTIC) or is_lockstep(configured_for(cfg, algorithm))
    if together:
        fleet = [Learner(name="all", chips=sum(chips.values()), elastic=algorithm != "data_parallel")]
    else:
        fleet = [Learner(name=name, chips=count) for name, count in chips.items()]
    tally = calm.tally
    if not tally.time_s:
        return calm
    # Till the target is reached, or till the time is over.
    lasts_s = tally.time_s if calm.status == "stopped" else tally.time_s / expected_goodput(fleet, model)
    lasts_s = min(lasts_s, scenario.duration_s)
    outcome = simulate_chips(fleet, model, hours=lasts_s / 3600, seed=seed + 1_000_003 * trial)
    share = outcome.goodput
    status, longer = calm.status, 1.0
    if status != "stopped" and share > 0:
        longer = 1 / share
        if tally.time_s * longer > scenario.duration_s:
            status, longer = "stopped", scenario.duration_s / tally.time_s
    done = share * longer
    merged = outcome.uptime * longer
    return Outcome(
        status,
        dataclasses.replace(
            tally,
            time_s=tally.time_s * longer,
            running_s=tally.running_s * longer,
            training_s=tally.training_s * outcome.uptime * longer,
            tokens={k: v * done for k, v in tally.tokens.items()},
            wasted=tally.wasted * done,
            merges=tally.merges * (done if together else merged),
            members=tally.members * done,
            learners={name: [v * done for v in m] for name, m in tally.learners.items()},
        ),
    )


def _chips(cfg: Config, scenario: Scenario) -> dict[str, int]:
    return {name: scenario.chips.get(name, cfg.num_ranks(name)) for name in cfg.island_names()}


def _bytes(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    names = outcomes[0].tally.learners
    return {
        name: {
            "up": round(_mean([o.tally.learners[name][3] for o in outcomes])),
            "down": round(_mean([o.tally.learners[name][4] for o in outcomes])),
        }
        for name in names
    }


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and quantiles of what was measured; all null where nothing was."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return {"mean": None, "low": None, "high": None}
    return {
        "mean": _rounded(_mean(known)),
        "low": _rounded(_quantile(known, LOW)),
        "high": _rounded(_quantile(known, HIGH)),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear between the neighbours; `values` is in order."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- what is needed ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Search:
    """How one quantity is varied: `apply` makes the configuration and scenario for a value."""

    apply: Callable[[Config, Scenario, float], tuple[Config, Scenario]]
    low: float
    high: float
    whole: bool


def solve(
    cfg: Config,
    scenario: Scenario,
    what: str,
    *,
    metric: str,
    target: float,
    algorithm: str = "decoupled",
    seed: int | None = None,
    trials: int = 1,
) -> dict[str, Any]:
    """The smallest bandwidth (bit/s), number of learners or H at which `metric` reaches `target`, and its table.

    `learners` deals the chips of all islands out to so many (a failure takes a whole island, so that smaller islands
    lose less); random failures hit an island as often as its chips say. Where the scenario has no chips, each learner
    brings its own. Step time and batch of a learner stay as they are.

    A decoupled learner waits for nobody, whatever its link: on a thin one its contributions miss their merges instead.
    So for it a compute utilization of x also asks for quorums that are x as full as on links without a limit.

    Args:
        what: bandwidth | learners | inner-steps.
        metric: compute_utilization | goodput | uptime (0 to 1) | tokens_per_s.

    Raises:
        ConfigError: nonsense, or no value in reach does it.
    """
    check(cfg, scenario)
    seed = cfg.run.seed if seed is None else seed
    searches = _searches(cfg, scenario)
    if what not in searches:
        raise ConfigError(f"cannot solve for {what}", hint=f"one of {', '.join(searches)}")
    if metric != "tokens_per_s" and not 0.0 < target <= 1.0:
        raise ConfigError(f"{metric} of {target:g}", hint="write a share above 0, up to 1")
    counts_quorum = metric == "compute_utilization" and algorithm not in ("data_parallel", ELASTIC)
    counts_quorum = counts_quorum and not is_lockstep(configured_for(cfg, algorithm))
    search = searches[what]
    if what == INNER_STEPS and counts_quorum:
        search = dataclasses.replace(search, high=MAX_INNER_STEPS_DECOUPLED)
    known: dict[float, dict[str, Any]] = {}
    full: dict[float, float] = {}

    def row(value: float) -> dict[str, Any]:
        if value not in known:
            own = search.apply(cfg, scenario, value)
            found = _algorithm(*own, algorithm, seed, trials)
            known[value] = {"value": value, **{m: found[m]["mean"] for m in ROW}, "status": found["status"]}
        return known[value]

    def full_quorum(value: float) -> float:
        """How full quorums are on links without a limit."""
        place = 0.0 if what == BANDWIDTH else value
        if place not in full:
            free = with_bandwidth(*search.apply(cfg, scenario, value), math.inf)
            full[place] = _algorithm(*free, algorithm, seed, trials)["quorum_filled"]["mean"] or 0.0
        return full[place]

    def reached(value: float) -> bool:
        found = row(value)
        # A run that ended early for want of learners has no figures that could be compared.
        if (found[metric] or 0.0) < target or "quorum_lost" in found["status"]:
            return False
        return not counts_quorum or (found["quorum_filled"] or 0.0) >= target * full_quorum(value)

    answer = _smallest(reached, search)
    if answer is None:
        best = max((r[metric] or 0.0 for r in known.values()), default=0.0)
        raise ConfigError(
            f"no {what} from {search.low:g} to {search.high:g} reaches a {metric} of {target:g}",
            why=f"the best is {best:.4g}"
            + (", or quorums stay emptier than on unlimited links" if counts_quorum else ""),
            hint="another limit binds: step time, latency, overlap_steps or failures",
        )
    table = sorted({_value(search, answer * f) for f in TABLE_FACTORS})
    described = describe(cfg, scenario, seed=seed, trials=trials)
    return {
        "schema_version": SCHEMA_VERSION,
        "solve": what,
        "metric": metric,
        "target": target,
        "algorithm": algorithm,
        "answer": _rounded(answer),
        "answer_text": format_rate(float(f"{answer:.4g}")) if what == BANDWIDTH else f"{answer:g}",
        "table": [row(v) for v in table],
        "scenario": {
            **described,
            "assumptions": [*([QUORUM_NOTE] if counts_quorum else []), *described["assumptions"]],
        },
    }


ROW = ("compute_utilization", "goodput", "uptime", "tokens_per_s", "wall_time_s", "quorum_filled")


def _searches(cfg: Config, scenario: Scenario) -> dict[str, Search]:
    # Below this rate the model alone takes as long to hand out as the steps take.
    run_s = cfg.target_steps() * max(scenario.step_s(cfg, name) for name in cfg.island_names())
    lowest_bps = max(MIN_RATE_BPS, 4 * sum(fragment_sizes(cfg, scenario)) / run_s)
    return {
        BANDWIDTH: Search(with_bandwidth, lowest_bps, MAX_RATE_BPS, whole=False),
        LEARNERS: Search(
            _with_learners, cfg.sync.quorum, min(MAX_LEARNERS, sum(scenario.chips.values()) or MAX_LEARNERS), whole=True
        ),
        INNER_STEPS: Search(_with_inner_steps, 1, MAX_INNER_STEPS, whole=True),
    }


def _value(search: Search, value: float) -> float:
    """A value that can be tried: within the bounds, whole if it must be, four digits otherwise."""
    value = min(max(value, search.low), search.high)
    return float(round(value)) if search.whole else float(f"{value:.4g}")


def _smallest(reached: Callable[[float], bool], search: Search) -> float | None:
    """Bisection on a logarithmic scale, down to neighbours or half a percent; what is reached is taken to stay so."""
    low = _value(search, search.low)
    if reached(low):
        return low
    high = low
    # From below, as larger values may be slower to simulate.
    while not reached(high):
        if high >= search.high:
            return None
        low, high = high, _value(search, high * 8)
    while high - low > (1 if search.whole else 0.005 * high):
        middle = _value(search, math.sqrt(low * high))
        if middle in (low, high):
            middle = _value(search, (low + high) / 2)
            if middle in (low, high):
                break
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def with_bandwidth(cfg: Config, scenario: Scenario, rate_bps: float) -> tuple[Config, Scenario]:
    """Every link with this rate in both directions."""
    text = "unlimited" if math.isinf(rate_bps) else f"{rate_bps:.0f}bps"
    network = dataclasses.replace(cfg.network, bandwidth=text)
    for own in ("up", "down"):
        setattr(network, own, dataclasses.replace(getattr(network, own), bandwidth=None))
    network.named = {
        name: dataclasses.replace(
            island,
            bandwidth=None,
            up=dataclasses.replace(island.up, bandwidth=None),
            down=dataclasses.replace(island.down, bandwidth=None),
        )
        for name, island in network.named.items()
    }
    return dataclasses.replace(cfg, network=network), scenario


def _with_learners(cfg: Config, scenario: Scenario, count: float) -> tuple[Config, Scenario]:
    """So many islands of the same size: of all chips together, or where no chips were said, each with its own."""
    before, after = cfg.islands.count, round(count)
    own = dataclasses.replace(cfg, islands=dataclasses.replace(cfg.islands, count=after, named={}))
    step_time_s = scenario.step_time_s
    if isinstance(step_time_s, Mapping):
        step_time_s = _mean(list(step_time_s.values()))
    if not scenario.chips:
        return own, dataclasses.replace(scenario, step_time_s=step_time_s)
    share, rest = divmod(sum(scenario.chips.values()), after)
    random_faults = scenario.random_faults
    if random_faults is not None:
        random_faults = RandomFaults(
            mean_time_between_s=random_faults.mean_time_between_s * after / before,
            mean_repair_s=random_faults.mean_repair_s,
        )
    return own, dataclasses.replace(
        scenario,
        step_time_s=step_time_s,
        chips={name: share + (i < rest) for i, name in enumerate(own.island_names())},
        random_faults=random_faults,
    )


def _with_inner_steps(cfg: Config, scenario: Scenario, inner_steps: float) -> tuple[Config, Scenario]:
    """This H, over a run of at least a few of them, so that there is something to measure."""
    steps = round(inner_steps)
    run = dataclasses.replace(cfg.run, steps=max(cfg.target_steps(), 8 * steps + steps // 2), tokens=None)
    return dataclasses.replace(cfg, sync=dataclasses.replace(cfg.sync, inner_steps=steps), run=run), scenario


def spec_of(cfg: Config, scenario: Scenario, algorithm: str) -> WorldSpec:
    """The world of one algorithm, for whoever wants its tape."""
    return world_spec(configured_for(cfg, algorithm), scenario)
