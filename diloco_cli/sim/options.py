"""The options of `diloco simulate` as people type them: into settings of the configuration, and into a Scenario.

Owns: the spellings and refusals of the options, the table of chips, and what is assumed where nothing was said (each
assumption is a note that is printed). Must not: compose (cli does), build models (cli does), or print.
Called by: cli.simulate.

What an option says about a setting (`--islands 4`: islands.count=4) becomes an override in front of those that were
typed, so that an explicit one wins. The rest (step time, chips, failures, prices) is the Scenario.

Step time. As given; or from the chip: 6 floating point operations per active parameter and token (forward and
backward), over chips x peak x utilization. With neither, that of H100 at DEFAULT_MFU, but at least SMALL_STEP_S: what
the shipped recipes' small models take on a few processor cores.

Failures. Those of the configuration are the plan of a real run (run.settings.fault_plan). `--mtbi` is of one chip. An
island of at most one slice (sim.scale) goes and comes as a whole, at the rate of its chips: RandomFaults, in the
simulated protocol. A larger island loses slices and goes on: FailureModel.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diloco_cli.config.quantities import format_count, format_duration, parse_count, parse_duration_s, parse_rate_bps
from diloco_cli.config.schema import Config, ModelKind
from diloco_cli.core.faults import CRASH, HANG, Fault
from diloco_cli.errors import ConfigError
from diloco_cli.run.settings import fault_plan
from diloco_cli.sim.results import ALGORITHMS, BANDWIDTH, INNER_STEPS, LEARNERS
from diloco_cli.sim.scale import FailureModel
from diloco_cli.sim.scenario import Scenario, fragment_sizes, llama_tensors
from diloco_cli.sim.world import RESTART_S, RandomFaults

# Peak dense bfloat16 operations per second of one chip, without sparsity: the vendors' public data sheets.
CHIPS: dict[str, float] = {
    "a100": 312e12,
    "h100": 989e12,  # SXM
    "h200": 989e12,
    "b200": 2250e12,
    "l40s": 362e12,
    "rtx4090": 165e12,
    "mi300x": 1307e12,
    "tpu-v4": 275e12,
    "tpu-v5e": 197e12,
    "tpu-v5p": 459e12,
    "tpu-v6e": 918e12,
}
DEFAULT_CHIP, DEFAULT_MFU = "h100", 0.4
SMALL_STEP_S = 0.05
OPERATIONS_PER_PARAMETER_AND_TOKEN = 6
MAX_TRIALS, DEFAULT_TRIALS = 1000, 3
MAX_STEPS = 1_000_000_000
MAX_ISLANDS, MAX_CHIPS = 1024, 1_000_000_000
SOLVES = (BANDWIDTH, LEARNERS, INNER_STEPS)
DEFAULT_UTILIZATION = 0.95


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was typed, unread; None: the option was not given."""

    islands: str | None = None
    bandwidth: str | None = None
    latency: str | None = None
    model: str | None = None
    step_time: str | None = None
    chip: str | None = None
    mfu: str | None = None
    step_jitter: str | None = None
    chips: str | None = None
    mtbi: str | None = None
    repair: str | None = None
    hours: str | None = None
    tokens: str | None = None
    seed: str | None = None
    trials: str | None = None
    algorithm: tuple[str, ...] = ()
    price: str | None = None
    price_egress: str | None = None


@dataclass(frozen=True)
class Target:
    """What `--solve` is to reach: one of results.figures, and from which value on."""

    what: str
    metric: str
    value: float
    note: str = ""


def overrides(asked: Asked, presets: Collection[str]) -> list[str]:
    """The settings that the options stand for, in front of what was typed.

    Args:
        presets: names of conf/model.

    Raises:
        ConfigError: an option that cannot be read, or two that exclude each other.
    """
    _exclusive(asked)
    found: list[str] = []
    if asked.islands is not None:
        found.append(f"islands.count={whole('--islands', asked.islands, 1, MAX_ISLANDS)}")
    if asked.bandwidth is not None:
        parse_rate_bps(asked.bandwidth, "--bandwidth")
        # Of a recipe that has up and down apart, both; single islands keep what they have of their own.
        rate = asked.bandwidth.strip()
        found += [f"network.bandwidth={rate}", "network.up.bandwidth=null", "network.down.bandwidth=null"]
    if asked.latency is not None:
        parse_duration_s(asked.latency, "--latency")
        found += [f"network.latency={asked.latency.strip()}", "network.up.latency=null", "network.down.latency=null"]
    if asked.model is not None and asked.model in presets:
        found.append(f"model={asked.model}")
    elif asked.model is not None:
        _parameters(asked.model, presets)
    if asked.tokens is not None:
        parse_count(asked.tokens, "--tokens")
        found.append(f"run.tokens={asked.tokens.strip()}")
    if asked.seed is not None:
        found.append(f"run.seed={whole('--seed', asked.seed, 0, 2**63 - 1)}")
    return found


def scenario(
    asked: Asked, cfg: Config, presets: Collection[str], *, sizes: Sequence[int] = (), length_typed: bool = False
) -> tuple[Config, Scenario]:
    """What is simulated, with notes of everything that was assumed.

    Args:
        cfg: composed with `overrides`.
        sizes: elements of each fragment, where only a model that was built tells them.
        length_typed: run.steps or run.tokens was typed, and so holds beside --hours.

    Returns:
        The configuration (with --hours: of as many steps as fit), and the scenario.
    """
    parameters = None
    if asked.model is not None and asked.model not in presets:
        parameters = _parameters(asked.model, presets)
    base = Scenario(parameters=parameters, sizes=() if parameters else tuple(sizes))
    chips = _chips(asked, cfg)
    step_time_s, note = _step_time(asked, cfg, base, chips)
    notes = [note]
    duration_s = math.inf
    if asked.hours is not None:
        duration_s = number("--hours", asked.hours, above=0) * 3600
    faults, random_faults, interruptions, more = _failures(asked, cfg, chips)
    found = dataclasses.replace(
        base,
        step_time_s=step_time_s,
        step_jitter=0.0 if asked.step_jitter is None else number("--step-jitter", asked.step_jitter),
        chips=chips if asked.chips is not None else {},
        faults=faults,
        random_faults=random_faults,
        interruptions=interruptions,
        duration_s=duration_s,
        chip_hour_price=None if asked.price is None else number("--price", asked.price),
        egress_gb_price=None if asked.price_egress is None else number("--price-egress", asked.price_egress),
        notes=(*notes, *more),
    )
    if asked.hours is not None and not length_typed:
        fastest_s = min(found.step_s(cfg, name) for name in cfg.island_names())
        if fastest_s > 0:
            if duration_s / fastest_s > MAX_STEPS:
                raise ConfigError(
                    f"--hours: {asked.hours} hours are more than {format_count(MAX_STEPS)} steps of"
                    f" {format_duration(fastest_s)}",
                    where=f"--hours {asked.hours}",
                    hint="--step-time 1s, or fewer hours",
                )
            run = dataclasses.replace(cfg.run, steps=math.ceil(duration_s / fastest_s) + 1, tokens=None)
            cfg = dataclasses.replace(cfg, run=run)
    return cfg, found


def algorithms(asked: Asked) -> list[str]:
    """`--algorithm`, several times or with commas; all if it was not given."""
    names = [name.strip().replace("-", "_") for text in asked.algorithm for name in text.split(",")]
    for name in names:
        if name not in ALGORITHMS:
            raise _unknown("--algorithm", name, ALGORITHMS)
    return [a for a in ALGORITHMS if a in names] if names else list(ALGORITHMS)


def trials(asked: Asked) -> int:
    """`--trials`."""
    return DEFAULT_TRIALS if asked.trials is None else whole("--trials", asked.trials, 1, MAX_TRIALS)


def target(
    what: str | None, *, utilization: str | None, goodput: str | None, uptime: str | None, tokens_per_s: str | None
) -> Target | None:
    """`--solve` and the one figure that it is to reach; None without `--solve`."""
    texts = {
        "compute_utilization": ("--utilization", utilization),
        "goodput": ("--goodput", goodput),
        "uptime": ("--uptime", uptime),
        "tokens_per_s": ("--tokens-per-s", tokens_per_s),
    }
    given = {metric: (name, text) for metric, (name, text) in texts.items() if text is not None}
    if what is None:
        if given:
            name, text = next(iter(given.values()))
            raise ConfigError(
                f"{name} says what to reach, but not by what", where=name, hint=f"--solve bandwidth {name} {text}"
            )
        return None
    if what not in SOLVES:
        raise _unknown("--solve", what, SOLVES)
    if len(given) > 1:
        names = " and ".join(name for name, _ in given.values())
        raise ConfigError(f"{names} are two things to reach; one at a time", where=f"--solve {what}")
    if not given:
        if what == INNER_STEPS:
            note = f"no target was given: the smallest H with a compute utilization of {DEFAULT_UTILIZATION:g}"
            return Target(what, "compute_utilization", DEFAULT_UTILIZATION, note)
        raise ConfigError(
            f"--solve {what}: say what is to be reached",
            where=f"--solve {what}",
            hint="one of --utilization 0.95, --goodput 0.9, --uptime 0.99, --tokens-per-s 20k",
        )
    ((metric, (name, text)),) = given.items()
    assert text is not None
    return Target(what, metric, float(parse_count(text, name)) if metric == "tokens_per_s" else share(name, text))


# ---- reading ----------------------------------------------------------------------------------------


def number(option: str, text: str, *, above: float | None = None) -> float:
    """A plain number, zero or more (or above something)."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(
            f"{option}: {text!r} is not a number", where=f"{option} {text}", hint=f"{option} 24"
        ) from None
    low = 0.0 if above is None else above
    if not math.isfinite(value) or value < low or (above is not None and value == above):
        wanted = f"above {low:g}" if above is not None else "zero or more"
        raise ConfigError(
            f"{option}: {text} is out of range; it must be {wanted}", where=f"{option} {text}", hint=f"{option} 24"
        )
    return value


def whole(option: str, text: str, low: int, high: int) -> int:
    """A whole number, digits only, in a range."""
    if not re.fullmatch(r"-?[0-9]{1,20}", text.strip()):
        raise ConfigError(
            f"{option}: {text!r} is not a whole number", where=f"{option} {text}", hint=f"{option} {max(low, 4)}"
        )
    if not low <= int(text) <= high:
        raise ConfigError(
            f"{option}: {text} is out of range; it must be {low} to {high}",
            where=f"{option} {text}",
            hint=f"{option} {min(max(low, int(text)), high)}",
        )
    return int(text)


def share(option: str, text: str) -> float:
    """A share above 0, up to 1: 0.95 or 95%."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,12})?|\.[0-9]{1,12}) ?(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0.0 < value <= 1.0:
        hint = f"{option} {text.strip()}%" if match and not match[2] and 1 < value <= 100 else f"{option} 0.4"
        raise ConfigError(f"{option}: {text!r} is not a share above 0, up to 1", where=f"{option} {text}", hint=hint)
    return value


def _positive_time(option: str, text: str) -> float:
    value = parse_duration_s(text, option)
    if value <= 0:
        raise ConfigError(
            f"{option}: {text} is out of range; it must be above zero", where=f"{option} {text}", hint=f"{option} 1h"
        )
    return value


def _unknown(option: str, name: str, known: Collection[str]) -> ConfigError:
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    hint = f"{option} {close[0]}" if close else f"one of {', '.join(known)}"
    return ConfigError(
        f"{option}: there is no {name!r}; there are {', '.join(known)}", where=f"{option} {name}", hint=hint
    )


def _exclusive(asked: Asked) -> None:
    """Options that say the same thing twice, or half of a thing."""
    for one, other in (("hours", "tokens"), ("step_time", "chip"), ("step_time", "mfu")):
        if getattr(asked, one) is not None and getattr(asked, other) is not None:
            first, second = f"--{one.replace('_', '-')}", f"--{other}"
            raise ConfigError(f"{first} and {second} exclude each other", where=second, hint=f"leave out {second}")
    if asked.mfu is not None and asked.chip is None:
        raise ConfigError(
            "--mfu is a share of a chip's peak: say which chip",
            where="--mfu",
            hint=f"--chip {DEFAULT_CHIP} --mfu {asked.mfu}",
        )


def _parameters(text: str, presets: Collection[str]) -> int:
    try:
        return parse_count(text, "--model")
    except ConfigError:
        if text[:1].isdigit():
            raise
        close = difflib.get_close_matches(text.lower(), list(presets), n=1, cutoff=0.5)
        raise ConfigError(
            f"--model: {text!r} is neither a preset ({', '.join(presets)}) nor a number of parameters",
            where=f"--model {text}",
            hint=f"--model {close[0]}" if close else "--model 700m",
        ) from None


# ---- chips and steps --------------------------------------------------------------------------------


def _chips(asked: Asked, cfg: Config) -> dict[str, int]:
    """Chips of each island: --chips dealt out evenly, else its ranks."""
    names = cfg.island_names()
    if asked.chips is None:
        return {name: cfg.num_ranks(name) for name in names}
    total = parse_count(asked.chips, "--chips")
    if not len(names) <= total <= MAX_CHIPS:
        raise ConfigError(
            f"--chips: {asked.chips} for {len(names)} islands; it must be {len(names)} to {format_count(MAX_CHIPS)}",
            where=f"--chips {asked.chips}",
            hint=f"--chips {len(names)}" if total < len(names) else f"--chips {format_count(MAX_CHIPS)}",
        )
    each, more = divmod(total, len(names))
    return {name: each + (i < more) for i, name in enumerate(names)}


def active_parameters(cfg: Config, scenario: Scenario) -> int:
    """Parameters that each token passes: of a mixture of experts, only the chosen ones."""
    total = sum(fragment_sizes(cfg, scenario))
    model = cfg.model
    if scenario.sizes or scenario.parameters is not None or model.kind is not ModelKind.llama or not model.num_experts:
        return total
    experts = sum(math.prod(t.shape) for t in llama_tensors(model, 2) if ".experts." in t.name)
    return total - round(experts * (1 - model.experts_per_token / model.num_experts))


def _step_time(
    asked: Asked, cfg: Config, base: Scenario, chips: Mapping[str, int]
) -> tuple[float | dict[str, float], str]:
    """Seconds per step, and where they come from."""
    if asked.step_time is not None:
        step_s = _positive_time("--step-time", asked.step_time)
        return step_s, f"a step takes {format_duration(step_s)}, as given (an island's speed comes on top)"
    chip = DEFAULT_CHIP if asked.chip is None else asked.chip.lower()
    if chip not in CHIPS:
        raise _unknown("--chip", chip, CHIPS)
    mfu = DEFAULT_MFU if asked.mfu is None else share("--mfu", asked.mfu)
    parameters = active_parameters(cfg, base)
    work = OPERATIONS_PER_PARAMETER_AND_TOKEN * parameters
    times = {
        name: work * cfg.batch_tokens(name) / (chips[name] * CHIPS[chip] * mfu * cfg.island(name).speed)
        for name in cfg.island_names()
    }
    rule = (
        f"6 x {format_count(parameters)} parameters x the tokens of a step, over chips x {CHIPS[chip] / 1e12:.0f}"
        f" TFLOP/s ({chip}, bfloat16) x {mfu:.0%}{'' if asked.mfu is not None else ' (assumed)'}"
    )
    if asked.chip is not None:
        return times, f"step time from --chip: {rule}"
    if all(s >= SMALL_STEP_S / cfg.island(name).speed for name, s in times.items()):
        return times, f"no --step-time or --chip was given: {rule}"
    return (
        {name: max(s, SMALL_STEP_S / cfg.island(name).speed) for name, s in times.items()},
        f"no --step-time or --chip was given: {format_duration(SMALL_STEP_S)} a step, as of a small model on a few"
        f" cores (more where {DEFAULT_CHIP} at {DEFAULT_MFU:.0%} would need more)",
    )


# ---- failures ---------------------------------------------------------------------------------------


def _failures(
    asked: Asked, cfg: Config, chips: Mapping[str, int]
) -> tuple[tuple[Fault, ...], RandomFaults | None, FailureModel | None, list[str]]:
    """The configuration's plan, and random ones of islands or of chips as the command line says."""
    repair_s = None if asked.repair is None else parse_duration_s(asked.repair, "--repair")
    notes: list[str] = []
    faults = tuple(
        dataclasses.replace(f, duration_s=repair_s) if f.duration_s is None and f.kind in (CRASH, HANG) else f
        for f in fault_plan(cfg)
    )
    if any(f.duration_s is None and f.kind in (CRASH, HANG) for f in faults):
        notes.append(
            f"an island that crashes without a duration is back after {format_duration(RESTART_S)}, one that hangs"
            f" {cfg.sync.heartbeat_timeout} later, as no --repair was given"
        )
    typical = FailureModel()
    if asked.mtbi is not None:
        mtbi_s = _positive_time("--mtbi", asked.mtbi)
        per_island = sum(chips.values()) / len(chips)
        if per_island > typical.chips_per_slice:
            model = dataclasses.replace(
                typical, mtbi_s=mtbi_s, return_s=typical.return_s if repair_s is None else repair_s
            )
            stop, back = format_duration(model.shrink_s), format_duration(model.return_s)
            notes.append(
                f"chips fail in slices of {model.chips_per_slice}; an island stops for {stop} to go on without one,"
                f" which is back after {back} (docs/failure-model.md)"
            )
            return faults, None, model, notes
        if repair_s is None:
            repair_s = typical.return_s + typical.grow_s
            notes.append(
                f"an island is back {format_duration(repair_s)} after a failure on average, as no --repair was given"
            )
        return faults, RandomFaults(mean_time_between_s=mtbi_s / per_island, mean_repair_s=repair_s), None, notes
    if repair_s is not None and not faults:
        raise ConfigError(
            "--repair, but nothing fails", where=f"--repair {asked.repair}", hint="--mtbi 30d, or failures.events"
        )
    return faults, None, None, notes
