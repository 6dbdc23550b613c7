"""Compute utilization against bandwidth between sites: an analytic model of one training step and its transfers.

Theory. A step is a forward pass over the layers 0..L-1 and a backward pass over L-1..0, which costs twice as much (for
the activations and for the weights). A layer may leave for the other sites as soon as its own backward pass is done,
while earlier layers still run backward. Each site's link is one first-in-first-out resource; a layer is on it for
`wire_gbit / bandwidth` seconds. A layer that was sent must be back before its forward pass `1 + overlap_steps` steps
later; where it is not, the site waits. Compute utilization is compute over compute plus waiting (algorithm.md, Goodput
and uptime). Left out: latency (the tables' cells are all bound by bandwidth), and the time of merging.

Owns: that model, and the search for the bandwidth that a utilization needs, read off a geometric grid like the paper's.
Must not know the paper's results: those are in sim.paper.
Called by: sim.paper and `diloco simulate`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from diloco_cli.errors import ConfigError

# The all-reduce factor: bits that each site's link carries in one direction per bit synchronised. Two sites that
# exchange their values send each bit once; a syncer in the middle takes each bit once from every site as well.
SITES_EXCHANGE = 1.0
# Streaming DiLoCo (arXiv 2501.18512, Table 4) tried 50 bandwidths from 0.1 to 1000 Gbit/s: neighbours 1.207 apart.
GRID_GBPS: tuple[float, ...] = tuple(10 ** (-1 + 4 * k / 49) for k in range(50))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """What one step of one site is made of.

    Attributes:
        parameters: of the whole model, spread evenly over the layers.
        layers: number of layers.
        step_time_s: forward and backward pass without any waiting; a third of it is the forward pass.
    """

    parameters: float
    layers: int
    step_time_s: float

    def __post_init__(self) -> None:
        """Refuse a model that cannot be."""
        if not (self.parameters > 0 and self.layers >= 1 and self.step_time_s > 0):
            raise ConfigError("a model needs parameters, layers and a step time above zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What is sent between sites, and when.

    Attributes:
        inner_steps: steps between two syncs of the same parameters (1: gradients, at each step).
        fragments: parts that are synchronised apart, with offsets spread evenly over `inner_steps`; layers are
            strided over them (layer l is in fragment l mod fragments).
        overlap_steps: whole steps that a sync may take in the background.
        wire_bits: bits per parameter on the wire.
        traffic_factor: bits on a site's link per bit synchronised (the all-reduce factor).
    """

    inner_steps: int
    fragments: int = 1
    overlap_steps: int = 0
    wire_bits: float = 16.0
    traffic_factor: float = SITES_EXCHANGE

    def __post_init__(self) -> None:
        """Refuse a schedule that cannot be."""
        if self.inner_steps < 1 or self.fragments < 1 or self.overlap_steps < 0:
            raise ConfigError("inner steps and fragments must be one or more, and overlap steps zero or more")
        if self.wire_bits <= 0 or self.traffic_factor <= 0:
            raise ConfigError("bits on the wire and the traffic factor must be above zero")


def _sends(model: StepModel, method: Method) -> list[tuple[int, list[int]]]:
    """(step, layers that leave after it, last layer first) within one cycle of `inner_steps`, in order of steps."""
    due: dict[int, list[int]] = {}
    for layer in reversed(range(model.layers)):
        due.setdefault(layer % method.fragments * method.inner_steps // method.fragments, []).append(layer)
    return sorted(due.items())


def cycle_s(model: StepModel, method: Method, gbps: float, *, cycles: int = 3) -> float:
    """Seconds for one cycle of `inner_steps`, in the steady state (the last of `cycles`).

    Walks from sync to sync; steps in which nothing is awaited take `step_time_s` and are not looked at one by one.
    """
    if not gbps > 0:
        raise ConfigError(f"the bandwidth between sites must be above zero, not {gbps} Gbit/s")
    on_link_s = model.parameters / model.layers * method.wire_bits * method.traffic_factor / (gbps * 1e9)
    layer_s = model.step_time_s / 3 / model.layers  # forward; the backward pass takes twice as long
    awaited: list[tuple[int, int, float]] = []  # (step whose forward pass needs it, layer, when it is back), sorted
    now_s = link_free_s = started_s = 0.0
    at_step = 0

    def advance(to_step: int) -> None:
        """Run whole steps up to the start of `to_step`, waiting for what is due in them."""
        nonlocal now_s, at_step, awaited
        while at_step < to_step:
            due_step = min(max(awaited[0][0], at_step), to_step) if awaited else to_step
            now_s += (due_step - at_step) * model.step_time_s  # nothing is due in these
            at_step = due_step
            if at_step < to_step:
                due = [(layer, back_s) for step, layer, back_s in awaited if step <= at_step]
                awaited = awaited[len(due) :]
                now_s = _forward(now_s, layer_s, due, model.layers) + 2 * layer_s * model.layers
                at_step += 1

    for cycle in range(cycles):
        first = cycle * method.inner_steps
        advance(first)
        started_s = now_s
        for step, layers in _sends(model, method):
            advance(first + step + 1)  # what is due after a step leaves during and after its backward pass
            for layer in layers:
                link_free_s = max(link_free_s, now_s - 2 * layer_s * layer) + on_link_s
                awaited.append((first + step + 1 + method.overlap_steps, layer, link_free_s))
            awaited.sort()
    advance(cycles * method.inner_steps)
    return now_s - started_s


def _forward(now_s: float, layer_s: float, due: list[tuple[int, float]], layers: int) -> float:
    """End of a forward pass that starts at `now_s`; `due`: (layer, when it is back)."""
    done = 0
    for layer, back_s in sorted(due):
        now_s = max(now_s + (layer - done) * layer_s, back_s)
        done = layer
    return now_s + (layers - done) * layer_s


def compute_utilization(model: StepModel, method: Method, gbps: float) -> float:
    """Compute time over compute time plus waiting for the link, 0..1."""
    return method.inner_steps * model.step_time_s / cycle_s(model, method, gbps)


def needed_gbps(model: StepModel, method: Method, utilization: float) -> float:
    """The bandwidth in Gbit/s at which the utilization is reached, by bisection (to a millionth)."""
    if not 0 < utilization < 1:
        raise ConfigError(f"a compute utilization lies between 0 and 1, without either; not {utilization}")
    low, high = 1e-9, 1e9
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if compute_utilization(model, method, middle) >= utilization else (middle, high)
    return high


def read_off_grid(gbps: float) -> float:
    """The grid's bandwidth nearest to `gbps` (in ratio)."""
    place = min(max(bisect_left(GRID_GBPS, gbps), 1), len(GRID_GBPS) - 1)
    below, above = GRID_GBPS[place - 1], GRID_GBPS[place]
    return below if gbps / below < above / gbps else above
