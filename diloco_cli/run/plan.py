"""What a run will be, worked out before anything starts: fragments, links, memory, steps, processes, faults.

Owns: the numbers of `diloco train --dry-run` and how they are laid out as text. The model is built without storage.
Must not start, open or write anything.
Called by: cli.commands (`--dry-run`).
"""

from __future__ import annotations

import math
from typing import Any

from diloco_cli.config.quantities import format_bytes, format_count, format_duration, format_rate
from diloco_cli.config.schema import Config, InnerOptimizerKind, LinkDirection, Parallel, WireType
from diloco_cli.core.faults import describe, from_json, to_json
from diloco_cli.run.settings import fault_plan

_FLOAT32 = 4
_BLOCK = 256
MAX_FAULT_LINES = 30
_WIRE_BITS = {
    WireType.float32: 32,
    WireType.bfloat16: 16,
    WireType.int8: 8,
    WireType.int4: 4,
    WireType.e3m0: 4,
}


def make_plan(cfg: Config) -> dict[str, Any]:
    """Everything that follows from `cfg` without running it; JSON-able, sizes in bytes, times in seconds."""
    from diloco_cli.core.fragments import build_layout
    from diloco_cli.train.model import meta_model, tensor_inventory

    vocab_size = _vocab_size(cfg)
    inventory = tensor_inventory(meta_model(cfg.model, vocab_size))
    layout = build_layout(
        inventory,
        num_fragments=cfg.sync.fragments,
        strategy=cfg.sync.strategy.value,
        min_fragment_bytes=cfg.sync.min_fragment_num_bytes,
    )
    sizes = [fragment.numel for fragment in layout.fragments]
    steps = cfg.planned_steps()
    # What hangs on a batch that is measured when the run starts is not known before.
    per_step = None if cfg.open_batches() else sum(cfg.batch_tokens(name) for name in cfg.island_names())
    return {
        "algorithm": cfg.sync.algorithm.value,
        "parameters": sum(t.numel for t in inventory if t.role != "buffer"),
        "vocab_size": vocab_size,
        "steps": steps,
        "tokens_per_step": per_step,
        "tokens": None if per_step is None or steps is None else _tokens(cfg, steps),
        "fragments": {
            "requested": layout.requested,
            "count": len(sizes),
            "reason": layout.reason,
            "sizes": [_fragment(cfg, f.fragment, f.numel, [s.name for s in f.slices]) for f in layout.fragments],
        },
        "links": [_link(cfg, name, sizes) for name in cfg.island_names()],
        "faults": to_json(fault_plan(cfg)),
        "processes": [_learner(cfg, name, sizes) for name in cfg.island_names()] + [_syncer(cfg, sizes)],
    }


def wire_bytes(numel: int, wire: WireType) -> int:
    """Payload of `numel` elements; blocks of 256 elements below bfloat16 carry a float32 scale."""
    scales = math.ceil(numel / _BLOCK) * _FLOAT32 if _WIRE_BITS[wire] < 16 else 0
    return math.ceil(numel * _WIRE_BITS[wire] / 8) + scales


def _vocab_size(cfg: Config) -> int:
    """What the model is built for: model.vocab_size, else 256 for bytes, else what the tokenizer's file has."""
    if cfg.model.vocab_size is not None:
        return cfg.model.vocab_size
    if cfg.data.tokenizer == "bytes":
        return 256
    from diloco_cli.train.tokenizer import load_tokenizer

    return int(load_tokenizer(cfg.data.tokenizer).vocab_size)


def _tokens(cfg: Config, steps: int) -> int:
    """Tokens of all islands by the time the fastest has made `steps`."""
    return sum(round(steps * share) * cfg.batch_tokens(name) for name, share in cfg.step_shares().items())


def _fragment(cfg: Config, fragment: int, numel: int, tensors: list[str]) -> dict[str, Any]:
    return {
        "fragment": fragment,
        "elements": numel,
        "float32_bytes": numel * _FLOAT32,
        "up_bytes": wire_bytes(numel, cfg.network.wire_up),
        "down_bytes": wire_bytes(numel, cfg.network.wire_down),
        "tensors": tensors,
    }


def _link(cfg: Config, name: str, sizes: list[int]) -> dict[str, Any]:
    """What one island's link carries in H inner steps (each fragment once), and how long the largest takes."""
    link = cfg.link(name)
    up = _direction(link.up, sizes, cfg.network.wire_up, cfg.sync.inner_steps)
    down = _direction(link.down, sizes, cfg.network.wire_down, cfg.sync.inner_steps)
    return {
        "island": name,
        "up": up,
        "down": down,
        # With shorter steps than these the rate is too low, or tau steps are over before one sync is done.
        "full_link_step_time_s": max(d["round_time_s"] for d in (up, down)) / cfg.sync.inner_steps,
        "hidden_step_time_s": (up["fragment_time_s"] + down["fragment_time_s"]) / cfg.sync.overlap_steps,
    }


def _direction(direction: LinkDirection, sizes: list[int], wire: WireType, inner_steps: int) -> dict[str, Any]:
    total, largest = sum(wire_bytes(n, wire) for n in sizes), wire_bytes(max(sizes), wire)
    limited = math.isfinite(direction.rate_bps)
    return {
        "rate_bps": direction.rate_bps if limited else None,
        "latency_s": direction.latency_s,
        "jitter_s": direction.jitter_s,
        "bytes_per_round": total,
        "bytes_per_step": total / inner_steps,
        "round_time_s": total * 8 / direction.rate_bps,
        "fragment_time_s": largest * 8 / direction.rate_bps + direction.latency_s,
    }


def _learner(cfg: Config, name: str, sizes: list[int]) -> dict[str, Any]:
    """Memory of one rank: activations come on top and depend on the batch."""
    from diloco_cli.run.children import threads_per_rank

    island = cfg.island(name)
    shards = island.nproc_per_node if island.parallel == Parallel.fsdp else 1
    parameters = math.ceil(sum(sizes) / shards) * _FLOAT32
    # AdamW keeps two moments; muon keeps one for the matrices, which are nearly everything.
    moments = 1 if cfg.inner.optimizer == InnerOptimizerKind.muon else 2
    residual = sum(sizes) * _FLOAT32 if _WIRE_BITS[cfg.network.wire_up] < 16 else 0
    memory = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": moments * parameters,
        "exchange": 2 * _in_flight(cfg, sizes) * _FLOAT32 + residual,
    }
    return {
        "process": name,
        "ranks": island.nproc_per_node,
        "threads_per_rank": threads_per_rank(cfg, name),
        "device": island.device.value,
        "parallel": island.parallel.value,
        "speed": island.speed,
        "batch": island.batch,
        "memory_bytes": {**memory, "total": sum(memory.values())},
    }


def _syncer(cfg: Config, sizes: list[int]) -> dict[str, Any]:
    memory = {
        "parameters": sum(sizes) * _FLOAT32,
        "momentum": sum(sizes) * _FLOAT32,
        "contributions": cfg.islands.count * _in_flight(cfg, sizes) * _FLOAT32,
    }
    return {
        "process": "syncer",
        "ranks": 1,
        "threads_per_rank": None,
        "device": "cpu",
        "memory_bytes": {**memory, "total": sum(memory.values())},
    }


def _in_flight(cfg: Config, sizes: list[int]) -> int:
    """Elements of the most (and largest) fragments under way at once."""
    return sum(sorted(sizes, reverse=True)[: cfg.sync.overlap_steps])


# ---- text -----------------------------------------------------------------------------------------


def render_plan(plan: dict[str, Any]) -> str:
    """The plan for people, at most 120 columns."""
    fragments = plan["fragments"]
    cut = f" ({fragments['requested']} asked for: {fragments['reason']})" if fragments["reason"] else ""
    lines = [
        "plan",
        f"  model       {format_count(plan['parameters'])} parameters, vocabulary {plan['vocab_size']}",
        f"  length      {_length(plan)}",
        f"  algorithm   {plan['algorithm']}, {fragments['count']} fragments{cut}",
        "",
        *_table(
            ["fragment", "elements", "float32", "up", "down", "tensors"],
            [
                [
                    str(f["fragment"]),
                    format_count(f["elements"]),
                    format_bytes(f["float32_bytes"]),
                    format_bytes(f["up_bytes"]),
                    format_bytes(f["down_bytes"]),
                    _few(f["tensors"]),
                ]
                for f in fragments["sizes"]
            ],
        ),
        "",
        *_table(
            [
                "link",
                "rate",
                "latency",
                "each H steps",
                "bytes/s per step/s",
                "largest fragment",
                "hidden if a step takes",
            ],
            [row for links in _alike(plan["links"], "island") for row in _link_rows(links)],
        ),
        "",
        *_table(
            ["process", "ranks", "threads", "device", "parallel", "batch", "memory per rank, without activations"],
            [_process_row(processes) for processes in _alike(plan["processes"], "process")],
        ),
        *_fault_lines(plan["faults"]),
    ]
    return "\n".join(lines)


def _length(plan: dict[str, Any]) -> str:
    steps = "as many steps as run.tokens comes to" if plan["steps"] is None else f"{plan['steps']} steps"
    if plan["tokens"] is None:
        return f"{steps} of the fastest learner; batch: auto is measured when the run starts"
    return (
        f"{steps} of the fastest learner, {format_count(plan['tokens'])} tokens "
        f"({format_count(plan['tokens_per_step'])} per step over all islands)"
    )


def _fault_lines(faults: list[dict[str, Any]]) -> list[str]:
    if not faults:
        return []
    more = len(faults) - MAX_FAULT_LINES
    return [
        "",
        f"  {len(faults)} fault{'' if len(faults) == 1 else 's'} on purpose",
        *(f"    {describe(fault)}" for fault in from_json(faults[:MAX_FAULT_LINES])),
        *([f"    and {more} more"] if more > 0 else []),
    ]


def _alike(items: list[dict[str, Any]], name: str) -> list[tuple[str, dict[str, Any]]]:
    """Neighbours that differ in nothing but their name, as one: ("island-0 .. island-3", the first of them)."""
    groups: list[list[dict[str, Any]]] = []
    for item in items:
        if groups and {**groups[-1][0], name: ""} == {**item, name: ""}:
            groups[-1].append(item)
        else:
            groups.append([item])
    return [(g[0][name] if len(g) == 1 else f"{g[0][name]} .. {g[-1][name]}", g[0]) for g in groups]


def _link_rows(links: tuple[str, dict[str, Any]]) -> list[list[str]]:
    names, link = links
    rows = []
    for direction in ("up", "down"):
        d = link[direction]
        rows.append(
            [
                f"{names} {direction}",
                format_rate(d["rate_bps"] if d["rate_bps"] is not None else math.inf),
                format_duration(d["latency_s"]),
                format_bytes(d["bytes_per_round"]),
                format_bytes(d["bytes_per_step"]),
                _duration(d["fragment_time_s"]),
                f"{_duration(link['hidden_step_time_s'])} or more" if direction == "up" else "",
            ]
        )
    return rows


def _process_row(processes: tuple[str, dict[str, Any]]) -> list[str]:
    names, process = processes
    memory = process["memory_bytes"]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items() if name != "total")
    return [
        names,
        str(process["ranks"]),
        str(process["threads_per_rank"] or "-"),
        process["device"],
        process.get("parallel", "-"),
        str(process.get("batch", "-")),
        f"{format_bytes(memory['total'])} ({parts})",
    ]


def _duration(seconds: float) -> str:
    """Two or three digits are enough for an estimate."""
    return format_duration(float(f"{seconds:.3g}"))


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]
