"""Checks of a whole configuration: ranges, and rules between settings.

Owns: every rule that the types in config.schema cannot say. One sentence each, with the full key.
Must not touch anything but the file system's "is it there"; nothing is opened, created or imported.
Called by: config.compose (before anything is started), tests.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco_cli.config.quantities import is_step, parse_count, parse_duration_s, parse_rate_bps, parse_step
from diloco_cli.config.schema import (
    AUTO,
    Algorithm,
    Config,
    DataKind,
    FailureEvent,
    IslandConfig,
    IslandOverride,
    LauncherKind,
    ModelKind,
    Schedule,
    Tunnel,
    WireType,
)
from diloco_cli.errors import ConfigError

# Allowed range of each number, in interval notation; "oo" is infinity.
_RANGES: dict[str, str] = {
    "model.max_seq_len": "[1, oo)",
    "data.seq_len": "[2, oo)",
    "data.heterogeneity": "[0, 1]",
    "islands.count": "[1, 1024]",
    "network.port": "[0, 65535]",
    "network.streams": "[1, 64]",
    "sync.shards": "[1, 64]",
    "inner.lr": "(0, oo)",
    "inner.muon_lr": "(0, oo)",
    "inner.beta1": "[0, 1)",
    "inner.beta2": "[0, 1)",
    "inner.eps": "(0, oo)",
    "inner.weight_decay": "[0, oo)",
    "inner.clip_norm": "[0, oo)",
    "inner.warmup_steps": "[0, oo)",
    "inner.rejoin_warmup_steps": "[0, oo)",
    "inner.min_lr_ratio": "[0, 1]",
    "outer.lr": "(0, oo)",
    "outer.momentum": "[0, 1)",
    "sync.fragments": "[1, oo)",
    "sync.inner_steps": "[1, oo)",
    "sync.overlap_steps": "[1, oo)",
    "sync.grace_safety": "[0, 1)",
    "sync.alpha": "[0, 1]",
    "sync.max_drift_steps": "[1, oo)",
    "run.steps": "[1, oo)",
    "run.seed": "[0, 9223372036854775807]",
    "run.finish_tolerance": "[0, 1)",
    "run.eval_every_steps": "[0, oo)",
    "run.eval_sequences": "[1, oo)",
    "run.snapshot_keep": "[1, oo)",
    "launcher.max_restarts": "[0, oo)",
    "islands.joined": "[0, oo)",
}
_LLAMA_RANGES: dict[str, str] = {
    "model.dim": "[1, oo)",
    "model.num_layers": "[1, oo)",
    "model.num_heads": "[1, oo)",
    "model.num_kv_heads": "[1, oo)",
    "model.ffn_dim": "[1, oo)",
    "model.vocab_size": "[2, oo)",
    "model.rope_theta": "(0, oo)",
    "model.norm_eps": "(0, oo)",
    "model.num_experts": "[0, oo)",
    "model.router_aux_weight": "[0, oo)",
}
_ISLAND_RANGES: dict[str, str] = {
    "nproc_per_node": "[1, oo)",
    "batch": "[1, oo)",
    "accumulate": "[1, oo)",
    "speed": "(0, 1]",
    "step_share": "(0, 1]",
    "threads": "[1, oo)",
}
FAILURE_KINDS = ("crash", "hang", "slow", "partition", "degrade", "preempt", "corrupt", "disk-full")
"""As in core.faults, which this layer does not import."""
_SYNCER_KINDS = ("crash", "hang", "slow", "disk-full")
_LINK_KINDS = ("partition", "degrade")
_RANK_KINDS = ("crash", "hang", "slow")
_RANDOM_KINDS = FAILURE_KINDS[:-1]
_DISTRIBUTIONS = ("exponential", "weibull", "fixed")
_PAYLOADS = ("nan", "bytes")
MAX_RANDOM_FAILURES = 100_000
_NEED_PATH = (DataKind.auto, DataKind.text, DataKind.jsonl, DataKind.huggingface, DataKind.tokens)


def validate(cfg: Config, environment: Mapping[str, str] | None = None) -> None:
    """Raise the first of `problems`."""
    for problem in problems(cfg, environment):
        raise problem


def problems(cfg: Config, environment: Mapping[str, str] | None = None) -> Iterator[ConfigError]:
    """Everything that is wrong with `cfg` (and with the environment variables that we read), in order."""
    found = False
    for problem in _range_problems(cfg):
        found = True
        yield problem
    if found:
        # The rules below divide and compare; numbers out of range would only add nonsense.
        return
    for check in (_model, _data, _islands, _network, _failures, _inner, _sync, _times, _run, _not_built):
        yield from check(cfg)
    yield from _environment(os.environ if environment is None else environment)


def nearest(word: str, known: list[str]) -> str:
    """The closest of `known` to `word`, or ""."""
    lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return lower[close[0]] if close else ""


def _error(key: str, says: str, hint: str = "") -> ConfigError:
    return ConfigError(f"{key}: {says}", where=key, hint=hint)


def _get(cfg: object, key: str) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def _outside(value: float | None, interval: str) -> str:
    """ "" if `value` lies in `interval`, else what is wanted, in words."""
    if value is None:
        return ""
    low_text, high_text = interval[1:-1].split(", ")
    low, high = float(low_text), math.inf if high_text == "oo" else float(high_text)
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    if math.isfinite(value) and above and below:
        return ""
    if high == math.inf:
        return f"above {low_text}" if interval[0] == "(" else f"{low_text} or more"
    open_low, open_high = interval[0] == "(", interval[-1] == ")"
    return f"{'above' if open_low else 'from'} {low_text} {'to below' if open_high else 'to'} {high_text}"


def _range_problems(cfg: Config) -> Iterator[ConfigError]:
    ranges = dict(_RANGES)
    if cfg.model.kind == ModelKind.llama:
        ranges |= _LLAMA_RANGES
    for key, interval in ranges.items():
        yield from _range_problem(key, _get(cfg, key), interval)
    islands: list[tuple[str, object]] = [("islands.each", cfg.islands.each)]
    islands += [(f"islands.named.{name}", own) for name, own in cfg.islands.named.items()]
    for where, island in islands:
        for name, interval in _ISLAND_RANGES.items():
            value = getattr(island, name)
            inherited = value is None and where != "islands.each"
            if name != "batch" or inherited or (isinstance(value, int) and not isinstance(value, bool)):
                yield from _range_problem(f"{where}.{name}", value, interval)
            elif value != AUTO:
                close = nearest(str(value), [AUTO])
                yield _error(
                    f"{where}.{name}",
                    f"{value!r} is neither a whole number nor auto",
                    hint=f"{where}.{name}={close}" if close else "",
                )


def _range_problem(key: str, value: float | None, interval: str) -> Iterator[ConfigError]:
    wanted = _outside(value, interval)
    if wanted:
        yield _error(key, f"{value} is out of range; it must be {wanted}")


def _model(cfg: Config) -> Iterator[ConfigError]:
    model = cfg.model
    if model.max_seq_len < cfg.data.seq_len:
        yield _error("model.max_seq_len", f"{model.max_seq_len} is below data.seq_len {cfg.data.seq_len}")
    if model.kind == ModelKind.huggingface:
        if not model.hf_config:
            yield _error("model.hf_config", "say which config.json (a file, or the folder that holds it)")
        elif not Path(model.hf_config).exists():
            yield _error("model.hf_config", f"there is no {model.hf_config!r}")
    elif model.kind == ModelKind.entry_point:
        yield from _entry_point(model.entry_point)
    else:
        yield from _llama(cfg)


def _entry_point(entry_point: str | None) -> Iterator[ConfigError]:
    key, example = "model.entry_point", "model.entry_point=package.module:function"
    if not entry_point:
        yield _error(key, "say which function builds your model", hint=example)
    elif not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", entry_point):
        yield _error(key, f"{entry_point!r} does not name a function of a module", hint=example)


def _llama(cfg: Config) -> Iterator[ConfigError]:
    model = cfg.model
    if model.dim % model.num_heads:
        yield _error("model.num_heads", f"{model.num_heads} does not divide model.dim {model.dim}")
    elif (model.dim // model.num_heads) % 2:
        yield _error(
            "model.num_heads",
            f"model.dim {model.dim} / {model.num_heads} heads = {model.dim // model.num_heads} is odd, "
            "and rotary positions need an even head size",
        )
    if model.num_heads % model.num_kv_heads:
        yield _error("model.num_kv_heads", f"{model.num_kv_heads} does not divide model.num_heads {model.num_heads}")
    if model.num_experts and not 1 <= model.experts_per_token <= model.num_experts:
        yield _error(
            "model.experts_per_token",
            f"{model.experts_per_token} is out of range; it must be from 1 to model.num_experts {model.num_experts}",
        )
    if model.vocab_size is not None and cfg.data.tokenizer == "bytes" and model.vocab_size < 256:
        yield _error("model.vocab_size", f"{model.vocab_size} is below the 256 that data.tokenizer bytes needs")


def _data(cfg: Config) -> Iterator[ConfigError]:
    data = cfg.data
    if data.path is None and data.kind in _NEED_PATH:
        yield _error("data.path", "say which file or folder", hint="data.path=FILE_OR_FOLDER")
    for name in ("path", "validation_path"):
        path = getattr(data, name)
        if path is not None and not Path(path).exists():
            yield _error(f"data.{name}", f"there is no {path!r}")
    if data.tokenizer != "bytes" and not Path(data.tokenizer).is_file():
        yield _error(
            "data.tokenizer", f"{data.tokenizer!r} is neither bytes nor a file", hint="data.tokenizer=tokenizer.json"
        )
    if data.token_dtype not in ("uint16", "uint32"):
        yield _error("data.token_dtype", f"{data.token_dtype!r} is neither uint16 nor uint32")
    if not data.pattern:
        yield _error("data.pattern", "empty; **/* takes every file")
    held_out = data.validation_fraction
    if data.validation_path is None and _outside(held_out, "(0, 1)"):
        yield _error(
            "data.validation_fraction", f"{held_out} is out of range; it must be {_outside(held_out, '(0, 1)')}"
        )


def _islands(cfg: Config) -> Iterator[ConfigError]:
    yield from _names(cfg, "islands.named", list(cfg.islands.named))
    # islands.each need not fit by itself where every island has its own.
    shown: dict[str, IslandConfig] = {
        f"islands.named.{name}" if name in cfg.islands.named else "islands.each": cfg.island(name)
        for name in cfg.island_names()
    }
    for where, island in shown.items():
        parts = island.nproc_per_node * max(1, len(island.hosts)) * island.accumulate
        if island.batch == AUTO:
            yield from _auto_batch(cfg, where)
        elif island.sequences % parts:
            yield _error(
                f"{where}.batch",
                f"{island.batch} does not divide by nproc_per_node {island.nproc_per_node} * "
                f"accumulate {island.accumulate} = {parts}",
                hint=f"{where}.batch={max(1, round(island.sequences / parts)) * parts}",
            )


def _auto_batch(cfg: Config, where: str) -> Iterator[ConfigError]:
    """What cannot be where an island's batch is measured."""
    if cfg.run.deterministic:
        yield _error(
            f"{where}.batch",
            "auto is measured, and so differs from run to run; run.deterministic=true needs numbers",
            hint=f"{where}.batch=8",
        )
    names = [n for n in cfg.open_batches() if where in (f"islands.named.{n}", "islands.each")]
    if far := [n for n in names if cfg.launcher_of(n) is LauncherKind.ssh]:
        yield _error(
            f"{where}.batch",
            f"auto cannot be measured over ssh ({', '.join(far)}): it needs the run folder in common",
            hint=f"{where}.batch=8",
        )


def _names(cfg: Config, where: str, names: list[str]) -> Iterator[ConfigError]:
    known = cfg.island_names()
    for name in names:
        if name not in known:
            span = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
            close = nearest(name, known)
            hint = f"{where}.{close}" if close else ""
            yield _error(
                f"{where}.{name}", f"there is no island {name!r}; with islands.count={len(known)}: {span}", hint
            )


def _network(cfg: Config) -> Iterator[ConfigError]:
    yield from _names(cfg, "network.named", list(cfg.network.named))
    for where, layer in _link_layers(cfg):
        for setting, parse in (
            ("bandwidth", parse_rate_bps),
            ("latency", parse_duration_s),
            ("jitter", parse_duration_s),
        ):
            text = getattr(layer, setting)
            if text is not None:
                try:
                    parse(text, f"{where}.{setting}")
                except ConfigError as error:
                    yield _located(error)
    if cfg.network.bind == "":
        yield _error("network.bind", "empty; 127.0.0.1 is this machine only")


def _not_built(cfg: Config) -> Iterator[ConfigError]:
    """Settings that have a name and no meaning yet (issue 5): refused, so that none is taken for done."""
    shown: dict[str, IslandConfig | IslandOverride] = {"islands.each": cfg.islands.each}
    shown |= {f"islands.named.{name}": own for name, own in cfg.islands.named.items()}
    for where, island in shown.items():
        for name, value in (("launcher", island.launcher), ("tunnel", island.tunnel)):
            if value in (LauncherKind.ssh, LauncherKind.slurm, Tunnel.ssh):
                usual = LauncherKind.torchrun if name == "launcher" else Tunnel.none
                yield _error(f"{where}.{name}", f"{value} is not built yet", hint=f"{where}.{name}={usual}")
        if island.hosts:
            yield _error(f"{where}.hosts", "islands on other machines are not built yet", hint=f"{where}.hosts=[]")
    if cfg.launcher.kind in (LauncherKind.ssh, LauncherKind.slurm):
        yield _error("launcher.kind", f"{cfg.launcher.kind} is not built yet", hint="launcher.kind=torchrun")
    if cfg.network.streams not in (None, 1):
        yield _error("network.streams", "more than one stream per island is not built yet", hint="network.streams=1")
    for name in ("wire_up", "wire_down"):
        if getattr(cfg.network, name) is WireType.auto:
            yield _error(f"network.{name}", "auto is not built yet", hint=f"network.{name}=bfloat16")
    if cfg.sync.shards != 1:
        yield _error("sync.shards", "more than one syncer process is not built yet", hint="sync.shards=1")


def _link_layers(cfg: Config) -> Iterator[tuple[str, object]]:
    """Every place where a bandwidth, latency and jitter may be written, with its key."""
    groups: list[tuple[str, Any]] = [("network", cfg.network)]
    groups += [(f"network.named.{name}", own) for name, own in cfg.network.named.items()]
    for where, group in groups:
        yield where, group
        yield f"{where}.up", group.up
        yield f"{where}.down", group.down


def _located(error: ConfigError) -> ConfigError:
    """Quantities name their key in the sentence; put it in `where` too."""
    key = error.what.partition(":")[0]
    return ConfigError(error.what, where=error.where or key, why=error.why, hint=error.hint)


def _failures(cfg: Config) -> Iterator[ConfigError]:
    for i, event in enumerate(cfg.failures.events):
        where = f"failures.events.{i}"
        kind = event.kind.replace("_", "-")
        if kind in FAILURE_KINDS:
            yield from _failure_target(cfg, event, kind, where)
            yield from _failure_figures(event, kind, where)
        else:
            yield _unknown_kind(f"{where}.kind", event.kind, FAILURE_KINDS)
        yield from _failure_times(event, where)
    yield from _random_failures(cfg)


def _unknown_kind(key: str, kind: str, known: tuple[str, ...]) -> ConfigError:
    close = nearest(kind, list(known))
    return _error(key, f"there is no {kind!r}; there are {', '.join(known)}", close and f"kind: {close}")


def _failure_target(cfg: Config, event: FailureEvent, kind: str, where: str) -> Iterator[ConfigError]:
    """Exactly one of island, link and syncer, of a sort that this can happen to; and a rank that it has."""
    given = [name for name in ("island", "link") if getattr(event, name) is not None]
    given += ["syncer"] if event.syncer else []
    if len(given) != 1:
        says = f"{' and '.join(given)} are {len(given)} targets" if given else "it has no target"
        yield _error(where, f"{says}; give one of island, link and syncer", "island: island-0")
        return
    if event.syncer and kind not in _SYNCER_KINDS:
        yield _error(f"{where}.syncer", f"{kind} cannot happen to the syncer; {_or(_SYNCER_KINDS)} can")
    if event.link is not None and kind not in _LINK_KINDS:
        yield _error(
            f"{where}.link", f"{kind} cannot happen to a link; {_or(_LINK_KINDS)} can", f"island: {event.link}"
        )
    name = event.island if event.island is not None else event.link
    known = cfg.island_names()
    if name is not None and name not in known:
        span = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
        close = nearest(name, known)
        yield _error(
            f"{where}.{given[0]}", f"there is no island {name!r}; there are {span}", close and f"{given[0]}: {close}"
        )
    elif event.rank is not None:
        ranks = 1 if name is None else cfg.num_ranks(name)
        if kind not in _RANK_KINDS or event.syncer:
            whom = "the syncer" if event.syncer else f"a {kind}"
            yield _error(f"{where}.rank", f"{whom} has no rank; {_or(_RANK_KINDS)} of an island may have one")
        elif not 0 <= event.rank < ranks:
            yield _error(f"{where}.rank", f"{event.rank} is out of range; {name} has the ranks 0 to {ranks - 1}")


def _or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _failure_figures(event: FailureEvent, kind: str, where: str) -> Iterator[ConfigError]:
    """factor, loss, payload, bandwidth and latency: in range, and only where they mean something."""
    for name, interval in (("factor", "(0, 1)"), ("loss", "[0, 1)")):
        value = getattr(event, name)
        if wanted := _outside(value, interval):
            yield _error(f"{where}.{name}", f"{value} is out of range; it must be {wanted}")
    if event.payload not in _PAYLOADS:
        yield _error(f"{where}.payload", f"{event.payload!r} is neither nan nor bytes")
    worse = {"bandwidth": event.bandwidth, "latency": event.latency, "loss": event.loss or None}
    if kind == "degrade" and not any(value is not None for value in worse.values()):
        yield _error(where, "degrade: say what gets worse: bandwidth, latency or loss", "latency: 200ms")
    for name, value in worse.items():
        if kind != "degrade" and value is not None:
            yield _error(f"{where}.{name}", f"{kind} does not change it; degrade does", "kind: degrade")


def _failure_times(event: FailureEvent, where: str) -> Iterator[ConfigError]:
    readers: list[tuple[str, str | None, Callable[[str, str], float]]] = [
        ("at", event.at, parse_step if is_step(event.at) else parse_duration_s),
        ("duration", event.duration, parse_duration_s),
        ("bandwidth", event.bandwidth, parse_rate_bps),
        ("latency", event.latency, parse_duration_s),
    ]
    for name, text, read in readers:
        if text is None:
            continue
        try:
            value = read(text, f"{where}.{name}")
        except ConfigError as error:
            yield _located(error)
            continue
        if name == "duration" and event.kind == "corrupt":
            yield _error(f"{where}.duration", "corrupt is about one contribution and has no duration; leave it out")
        elif name == "duration" and value <= 0:
            yield _error(f"{where}.duration", f"{text} is out of range; it must be above zero")


def _random_failures(cfg: Config) -> Iterator[ConfigError]:
    chance, where = cfg.failures.random, "failures.random"
    if chance.distribution not in _DISTRIBUTIONS:
        close = nearest(chance.distribution, list(_DISTRIBUTIONS))
        yield _error(
            f"{where}.distribution",
            f"there is no {chance.distribution!r}; there are {', '.join(_DISTRIBUTIONS)}",
            close and f"{where}.distribution={close}",
        )
    if not chance.kinds:
        yield _error(f"{where}.kinds", "empty; nothing could happen", f"{where}.kinds=[crash]")
    for kind in chance.kinds:
        if kind not in _RANDOM_KINDS:
            yield _unknown_kind(f"{where}.kinds", kind, _RANDOM_KINDS)
    if chance.seed is not None and _outside(chance.seed, _RANGES["run.seed"]):
        wanted = _outside(chance.seed, _RANGES["run.seed"])
        yield _error(f"{where}.seed", f"{chance.seed} is out of range; it must be {wanted}")
    values: dict[str, float] = {}
    for name in ("mean_time_between", "repair_time", "horizon"):
        text = getattr(chance, name)
        if text is None:
            continue
        try:
            values[name] = parse_duration_s(text, f"{where}.{name}")
        except ConfigError as error:
            yield _located(error)
            continue
        if values[name] <= 0:
            yield _error(f"{where}.{name}", f"{text} is out of range; it must be above zero")
    between_s = values.get("mean_time_between", 0.0)
    if between_s > 0 and values.get("horizon", 0.0) * len(cfg.island_names()) / between_s > MAX_RANDOM_FAILURES:
        yield _error(
            f"{where}.mean_time_between",
            f"{chance.mean_time_between} in {chance.horizon} makes more than {MAX_RANDOM_FAILURES} failures",
            f"{where}.horizon=1h",
        )


def _inner(cfg: Config) -> Iterator[ConfigError]:
    inner = cfg.inner
    if inner.schedule == Schedule.wsd and _outside(inner.decay_fraction, "(0, 1]"):
        wanted = _outside(inner.decay_fraction, "(0, 1]")
        yield _error("inner.decay_fraction", f"{inner.decay_fraction} is out of range; it must be {wanted}")


def _sync(cfg: Config) -> Iterator[ConfigError]:
    sync, count = cfg.sync, cfg.islands.count
    if not 1 <= sync.quorum <= count:
        yield _error(
            "sync.quorum", f"{sync.quorum} is out of range; with islands.count={count} it must be 1 to {count}"
        )
    if sync.max_drift_steps is not None and sync.max_drift_steps < sync.inner_steps:
        # Learners would stop before a merge is due, and nothing else would bring one.
        yield _error(
            "sync.max_drift_steps",
            f"{sync.max_drift_steps} is less than sync.inner_steps={sync.inner_steps}: every learner would wait for "
            "merges that are not due yet",
            hint=f"sync.max_drift_steps={2 * sync.inner_steps}",
        )
    if sync.algorithm == Algorithm.data_parallel:
        yield _error(
            "sync.algorithm",
            "data_parallel is for the simulator; train runs decoupled, streaming or diloco",
            hint="algorithm=decoupled",
        )


def _times(cfg: Config) -> Iterator[ConfigError]:
    """Durations and sizes: readable, above zero, and in an order that can work."""
    wanted: dict[str, Callable[[], float]] = {
        "network.connect_timeout": lambda: cfg.network.connect_timeout_s,
        "sync.heartbeat_interval": lambda: cfg.sync.heartbeat_interval_s,
        "sync.heartbeat_timeout": lambda: cfg.sync.heartbeat_timeout_s,
        "sync.quorum_timeout": lambda: cfg.sync.quorum_timeout_s,
        "launcher.restart_backoff": lambda: cfg.launcher.restart_backoff_s,
        "launcher.start_timeout": lambda: cfg.launcher.start_timeout_s,
        "launcher.stop_timeout": lambda: cfg.launcher.stop_timeout_s,
        "logging.interval": lambda: cfg.logging.interval_s,
        "run.finish_wait": lambda: cfg.run.finish_wait_s,
        "sync.min_fragment_bytes": lambda: cfg.sync.min_fragment_num_bytes,
    }
    values: dict[str, float] = {}
    for key, read in wanted.items():
        try:
            values[key] = read()
        except ConfigError as error:
            yield _located(error)
            continue
        if values[key] <= 0 and key not in ("run.finish_wait", "sync.quorum_timeout", "launcher.restart_backoff"):
            yield _error(key, f"{_get(cfg, key)} is out of range; it must be above zero")
    for below, above in (
        ("sync.heartbeat_interval", "sync.heartbeat_timeout"),
        ("network.connect_timeout", "launcher.start_timeout"),
    ):
        if below in values and above in values and values[below] >= values[above]:
            yield _error(below, f"{_get(cfg, below)} must be below {above} ({_get(cfg, above)})")


def _run(cfg: Config) -> Iterator[ConfigError]:
    run = cfg.run
    if run.tokens is not None:
        try:
            parse_count(run.tokens, "run.tokens")
        except ConfigError as error:
            yield _located(error)
    if run.snapshot_every is not None:
        try:
            every = run.snapshot_every_s if run.snapshot_every_steps is None else float(run.snapshot_every_steps)
        except ConfigError as error:
            yield _located(error)
        else:
            if not every:
                yield _error("run.snapshot_every", f"{run.snapshot_every} is out of range; it must be above zero")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}", run.name):
        yield _error("run.name", f"{run.name!r} cannot begin a folder name; use letters, digits and _.+-")
    if not run.dir:
        yield _error("run.dir", "empty; runs is the usual place")


def _environment(environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """OMP_NUM_THREADS, where the user sets it, is what every rank takes if islands.each.threads is null."""
    threads = environment.get("OMP_NUM_THREADS", "").strip()
    if threads and not re.fullmatch(r"[1-9][0-9]{0,5}", threads):
        yield ConfigError(
            f"OMP_NUM_THREADS: {threads!r} is not a number of threads",
            where="environment variable OMP_NUM_THREADS",
            hint="OMP_NUM_THREADS=2, or unset it",
        )
