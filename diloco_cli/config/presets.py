"""Where the outer step's settings were measured, and one line for each setting outside of that or known to hurt.

Owns: the bounds behind the warnings of algorithm.md ("presets are measured ... a configuration outside what was
measured gets a one-line warning"); docs/outer-presets.md has the measurements. Pure: reads a Config, changes nothing.
Called by: cli.commands and run.launcher before a run.
"""

from __future__ import annotations

from diloco_cli.config.schema import Algorithm, Config, ModelConfig, ModelKind, OuterOptimizerKind

# lr / (1 - momentum): how far the outer step finally goes per unit of merged drift. Measured at 24 and 48 inner steps:
# 1.4 is the best, 2.3 is worse by 3% (1000 steps), and the stock 7 by 13% (300 steps).
MOST_OUTER_GAIN = 2.0
# Others report that the stock step costs little at long H (0.3% over real links); where that begins is our choice.
LONG_INNER_STEPS = 200
MEASURED_INNER_STEPS = (24, 48)
MEASURED_ISLANDS = 4
# A grace window that needs steps no longer than this is open on every machine we know of.
SHORT_STEP_S = 0.025
_SIZE = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "num_experts")


def preset_warnings(cfg: Config) -> list[str]:
    """One line each; empty for what was measured and found good, for one island, and for the other algorithms."""
    if cfg.islands.count < 2 or cfg.sync.algorithm is not Algorithm.decoupled:
        return []
    lines = [_outer_gain(cfg), _grace(cfg), _quorum(cfg), _outside(cfg)]
    return [line for line in lines if line]


def grace_step_s(cfg: Config) -> float:
    """Seconds per inner step above which the grace window is open at all.

    The window is what tau steps leave of the sync: asking, half a step to the next boundary, sending, and sending the
    result back (core.quorum.grace_window_s). Transfer and merge times are left out, so this is a lower bound.
    """
    links = [cfg.link(name) for name in cfg.island_names()]
    flight_s = max(2 * link.down.latency_s + link.up.latency_s for link in links)
    return flight_s / (cfg.sync.overlap_steps - 0.5)


def _outer_gain(cfg: Config) -> str:
    outer, steps = cfg.outer, cfg.sync.inner_steps
    momentum = outer.momentum if outer.optimizer is OuterOptimizerKind.nesterov else 0.0
    gain = outer.lr / (1.0 - momentum)
    if gain <= MOST_OUTER_GAIN or steps >= LONG_INNER_STEPS:
        return ""
    return (
        f"outer.lr={outer.lr:g} with outer.momentum={momentum:g} takes each merged drift {gain:.2g} times over, which "
        f"hurts at sync.inner_steps={steps}: outer.lr=0.7 outer.momentum=0.5 measured better"
    )


def _grace(cfg: Config) -> str:
    sync, count = cfg.sync, cfg.islands.count
    step_s = grace_step_s(cfg)
    if 2 * sync.quorum > count or step_s <= SHORT_STEP_S:
        return ""
    return (
        f"sync.quorum={sync.quorum} of {count} with sync.overlap_steps={sync.overlap_steps}: unless a step takes over "
        f"{step_s * 1000:.0f} ms, merges hold {sync.quorum} and the others' work is lost; raise either"
    )


def _quorum(cfg: Config) -> str:
    if cfg.sync.quorum < cfg.islands.count:
        return ""
    return f"sync.quorum={cfg.sync.quorum} of {cfg.islands.count}: the run ends as soon as one island is lost"


def _outside(cfg: Config) -> str:
    """What this run has that the measurements had not."""
    low, high = MEASURED_INNER_STEPS
    differs = []
    if cfg.model.kind is not ModelKind.llama or any(getattr(cfg.model, n) != getattr(ModelConfig, n) for n in _SIZE):
        differs.append(f"model {cfg.model.name}")
    if cfg.islands.count != MEASURED_ISLANDS:
        differs.append(f"{cfg.islands.count} islands")
    if not low <= cfg.sync.inner_steps <= high:
        differs.append(f"sync.inner_steps={cfg.sync.inner_steps}")
    if not differs:
        return ""
    return (
        f"the outer step was measured with model tiny, {MEASURED_ISLANDS} islands, sync.inner_steps {low} to {high}; "
        f"this run has {', '.join(differs)} (docs/outer-presets.md)"
    )
