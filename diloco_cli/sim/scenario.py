"""What is simulated: a configuration as `train` takes it, and what only a real machine would know, as numbers.

Owns: the Scenario, the sizes of a model without building it, and worlds made from both. Nonsense is refused here, with
one sentence. Must not: import torch, or of run anything but run.settings. Called by: sim.results, cli.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from diloco_cli.config.schema import Config, ModelConfig, ModelKind, WireType
from diloco_cli.core.faults import SYNCER, Fault
from diloco_cli.core.fragments import EMBEDDING, HEAD, TensorSpec, build_layout
from diloco_cli.errors import ConfigError
from diloco_cli.run.settings import learner_settings, syncer_settings
from diloco_cli.sim.scale import FailureModel
from diloco_cli.sim.world import Costs, LearnerSpec, RandomFaults, WorldSpec

WIRE_BITS = {
    WireType.float32: 32,
    WireType.bfloat16: 16,
    WireType.int8: 8,
    WireType.int4: 4,
    WireType.e3m0: 4,
}
_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a configuration does not say.

    Attributes:
        step_time_s: seconds per inner step of an island of speed 1; or per island, its speed included.
        sizes: elements of each fragment; empty: of the configuration's built-in model, or of `parameters`.
        parameters: a model of so many parameters, in equal fragments.
        chips: per island; empty: its ranks.
        step_jitter: half width of the spread of a step's time, as a share of it.
        faults, random_faults: what goes wrong, written down or drawn.
        interruptions: of single chips, of which an island has so many that it shrinks and grows (sim.scale), instead
            of going and coming as a whole.
        restart_s: baselines only: what a global stop (data_parallel) costs besides the repair, and regrouping
            (elastic) when an island goes or comes back, besides noticing it.
        duration_s: stop then.
        exact: simulate every message, however long that takes.
        chip_hour_price, egress_gb_price: of one chip for an hour, and of 1e9 bytes sent (by an island or the syncer).
        notes: what was assumed where nothing was said, in words.
    """

    step_time_s: float | Mapping[str, float] = 1.0
    sizes: tuple[int, ...] = ()
    parameters: int | None = None
    chips: Mapping[str, int] = dataclasses.field(default_factory=dict)
    step_jitter: float = 0.0
    costs: Costs = dataclasses.field(default_factory=Costs)
    faults: tuple[Fault, ...] = ()
    random_faults: RandomFaults | None = None
    restart_s: float = 30.0
    duration_s: float = math.inf
    exact: bool = False
    interruptions: FailureModel | None = None
    chip_hour_price: float | None = None
    egress_gb_price: float | None = None
    notes: tuple[str, ...] = ()

    def step_s(self, cfg: Config, island: str) -> float:
        """Seconds per inner step of one island."""
        if isinstance(self.step_time_s, Mapping):
            return self.step_time_s[island]
        return self.step_time_s / cfg.island(island).speed

    def is_random(self, cfg: Config) -> bool:
        """Whether two trials can differ."""
        links = [cfg.link(name) for name in cfg.island_names()]
        return (
            self.step_jitter > 0
            or self.random_faults is not None
            or self.interruptions is not None
            or any(fault.loss > 0 for fault in self.faults)
            or any(d.jitter_s > 0 for link in links for d in (link.up, link.down))
        )


def check(cfg: Config, scenario: Scenario) -> None:
    """Refuse what makes no sense.

    Raises:
        ConfigError: one sentence and how to put it right.
    """
    count = cfg.islands.count
    if not 1 <= cfg.sync.quorum <= count:
        raise ConfigError(
            f"a quorum of {cfg.sync.quorum} with {count} islands", where="sync.quorum", hint=f"write 1 to {count}"
        )
    times = {name: scenario.step_s(cfg, name) for name in cfg.island_names()}
    if wrong := [name for name, s in times.items() if not 0.0 < s < math.inf]:
        raise ConfigError(
            f"a step of {wrong[0]} takes {times[wrong[0]]:g} s", where="step time", hint="write a time above zero"
        )
    if not 0.0 <= scenario.step_jitter < 1.0:
        raise ConfigError(f"a step jitter of {scenario.step_jitter:g}", where="step jitter", hint="write 0 to 0.99")
    for name in cfg.island_names():
        link = cfg.link(name)
        if min(link.up.rate_bps, link.down.rate_bps) <= 0:
            raise ConfigError(f"the link of {name} has no bandwidth", where="network.bandwidth", hint='write "3gbps"')
    if scenario.duration_s <= 0:
        raise ConfigError("no time to simulate", where="duration", hint="write a time above zero")
    targets = {f.target for f in scenario.faults}
    if unknown := sorted(targets - {SYNCER, *cfg.island_names()}):
        raise ConfigError(f"there is no {unknown[0]}", where="failures", hint=f"islands 0 to {count - 1} are there")
    random_faults = scenario.random_faults
    if random_faults is not None and (random_faults.mean_time_between_s <= 0 or random_faults.mean_repair_s < 0):
        raise ConfigError("times between failures and to repair must be above zero", where="failures")
    prices = (scenario.chip_hour_price, scenario.egress_gb_price)
    if any(price is not None and not 0.0 <= price < math.inf for price in prices):
        raise ConfigError("a price must be zero or more", where="price")


# ---- sizes ----------------------------------------------------------------------------------------


def wire_bytes(numel: int, wire: WireType) -> int:
    """Payload of `numel` elements; blocks of 256 elements below bfloat16 carry a float32 scale."""
    scales = math.ceil(numel / _BLOCK) * 4 if WIRE_BITS[wire] < 16 else 0
    return math.ceil(numel * WIRE_BITS[wire] / 8) + scales


def llama_tensors(model: ModelConfig, vocab_size: int) -> list[TensorSpec]:
    """The tensors of the built-in model, without building it: those that train.model.tensor_inventory finds."""
    dim, ffn, kv = model.dim, model.ffn_dim, model.num_kv_heads * (model.dim // model.num_heads)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(model.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (dim,)
        for name, rows in (("q_proj", dim), ("k_proj", kv), ("v_proj", kv), ("o_proj", dim)):
            shapes[f"{layer}.self_attn.{name}.weight"] = (rows, dim)
        if model.num_experts:
            moe = f"{layer}.block_sparse_moe"
            shapes[f"{moe}.gate.weight"] = (model.num_experts, dim)
            for e in range(model.num_experts):
                shapes[f"{moe}.experts.{e}.w1.weight"] = shapes[f"{moe}.experts.{e}.w3.weight"] = (ffn, dim)
                shapes[f"{moe}.experts.{e}.w2.weight"] = (dim, ffn)
        else:
            shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (ffn, dim)
            shapes[f"{layer}.mlp.down_proj.weight"] = (dim, ffn)
    shapes["model.norm.weight"] = (dim,)
    tensors = [TensorSpec(name, shape) for name, shape in shapes.items()]
    tensors.append(TensorSpec("model.embed_tokens.weight", (vocab_size, dim), EMBEDDING))
    if not model.tied:
        tensors.append(TensorSpec("lm_head.weight", (vocab_size, dim), HEAD))
    return sorted(tensors, key=lambda t: t.name)


def fragment_sizes(cfg: Config, scenario: Scenario) -> tuple[int, ...]:
    """Elements of each fragment.

    Raises:
        ConfigError: a model of which neither the configuration nor the scenario tells the size.
    """
    if scenario.sizes:
        return scenario.sizes
    if scenario.parameters is not None:
        share, rest = divmod(scenario.parameters, cfg.sync.fragments)
        return tuple(n for i in range(cfg.sync.fragments) if (n := share + (i < rest)))
    vocab_size = cfg.model.vocab_size or (256 if cfg.data.tokenizer == "bytes" else None)
    if cfg.model.kind is not ModelKind.llama or vocab_size is None:
        raise ConfigError("the size of this model is not known without loading it", hint="give a number of parameters")
    layout = build_layout(
        llama_tensors(cfg.model, vocab_size),
        num_fragments=cfg.sync.fragments,
        strategy=cfg.sync.strategy.value,
        min_fragment_bytes=int(cfg.sync.min_fragment_num_bytes),
    )
    return tuple(f.numel for f in layout.fragments)


# ---- worlds ---------------------------------------------------------------------------------------


def world_spec(cfg: Config, scenario: Scenario) -> WorldSpec:
    """The world of one configuration; `cfg.sync.algorithm` is one that has a syncer."""
    check(cfg, scenario)
    sizes = fragment_sizes(cfg, scenario)
    settings = syncer_settings(cfg, len(sizes))
    settings = dataclasses.replace(settings, chips={**settings.chips, **scenario.chips})
    learners = {
        name: LearnerSpec(
            step_s=scenario.step_s(cfg, name),
            tokens=cfg.batch_tokens(name),
            link=cfg.link(name),
            chips=settings.chips[name],
        )
        for name in cfg.island_names()
    }
    return WorldSpec(
        syncer=settings,
        learner=learner_settings(cfg, len(sizes)),
        learners=learners,
        sizes=sizes,
        up_bytes=tuple(wire_bytes(n, cfg.network.wire_up) for n in sizes),
        down_bytes=tuple(wire_bytes(n, cfg.network.wire_down) for n in sizes),
        heartbeat_interval_s=cfg.sync.heartbeat_interval_s,
        step_jitter=scenario.step_jitter,
        costs=scenario.costs,
        faults=scenario.faults,
        random_faults=scenario.random_faults,
        duration_s=scenario.duration_s,
    )
