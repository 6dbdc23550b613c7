"""The merge of one fragment: outer gradient, averaging or RDA, Nesterov step. The one rule for it in the program.

Owns: the arithmetic of algorithm.md, Syncer 3 and 4. Pure: tensors in, tensors out, no randomness, no I/O.
Called by: the syncer's merge worker (run.syncer_main), the simulator, tests, and anyone's tools.

Shape of the computation. A fragment is one flat vector; its tensors are *segments* of it. Everything runs in blocks
of 256 Ki elements that stay in the cache (a naive stack-and-sum is eight times slower, spec/environment.md 6).
RDA needs norms before it can combine, so it takes two passes: the first collects the M x M Gram matrix of the
outer gradients, from which all norms, and the norm of any combination, follow; the second combines and steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_NUMEL = 256 * 1024
# Below this length of the mean direction the directions count as cancelling, and RDA falls back to the average.
# The Gram matrix is good to about 1e-6, so a squared length of 1e-4 is still good to a percent.
CANCELLED = 0.01

RDA, AVERAGE, BUFFER = "rda", "average", "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeInput:
    """One learner's contribution to a merge.

    Attributes:
        learner: name; contributions are summed in the order of names, so that arrival order changes no bit.
        values: [n] float32 or bfloat16; the learner's parameters, or its drift since `base` if `is_drift`.
        tokens: tokens since the learner's counters were reset.
        steps: inner steps since then; zero steps weigh zero.
        base: [n] float32; what `values` is measured against; None: the global tensor given to merge().
        is_drift: `values` holds theta_m - base.
    """

    learner: str
    values: Tensor
    tokens: int
    steps: int
    base: Tensor | None = None
    is_drift: bool = False

    @property
    def weight(self) -> float:
        """w = tokens * (tokens / steps): quantity times tokens per step (algorithm.md, Syncer 3)."""
        return self.tokens * (self.tokens / self.steps) if self.steps > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of the fragment: elements [offset, offset + numel), merged by rda | average | buffer.

    buffer: averaged and taken over as it is, without outer optimizer (algorithm.md, Fragments).
    """

    offset: int
    numel: int
    rule: str


def merge(
    global_tensor: Tensor,
    outer_state: Tensor,
    contributions: Sequence[MergeInput],
    *,
    lr: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    rule: str = RDA,
    segments: Sequence[Segment] | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Merge contributions into a global tensor and take one outer step.

    With D_m = Theta - theta_m and w_m = tokens_m^2 / steps_m:

        average: D = sum(w_m D_m) / sum(w_m)
        rda:     D = (sum(w_m |D_m|) / sum(w_m)) * unit(sum(w_m unit(D_m)) / sum(w_m)), per segment
        B <- momentum * B + D
        Theta <- Theta - lr * (D + momentum * B)     (nesterov; without it: Theta - lr * B)

    Args:
        global_tensor: Theta, [n] float32 (any shape; it is seen flat).
        outer_state: B, the momentum buffer, same shape, float32; zeros at the start.
        contributions: at most one entry per learner and base; those of weight zero change nothing.
        rule: for the whole tensor, when `segments` is None.
        segments: the tensors inside a fragment with their own rules; they cover what they cover, the rest is kept.
        in_place: overwrite the arguments instead of copying them first.

    Returns:
        The new global tensor and the new outer state. Without any weight: both unchanged.

    Source: Decoupled DiLoCo, arXiv 2604.21428; DiLoCo, arXiv 2311.08105; algorithm.md, Syncer 3 and 4.
    """
    assert global_tensor.dtype == outer_state.dtype == torch.float32, "global tensor and outer state are float32"
    assert global_tensor.numel() == outer_state.numel()
    theta_out = global_tensor if in_place else global_tensor.clone()
    state_out = outer_state if in_place else outer_state.clone()
    theta, state = theta_out.view(-1), state_out.view(-1)
    # A learner has two entries if a late one was kept: steps and tokens then tell them apart.
    in_order = sorted(contributions, key=lambda c: (c.learner, c.steps, c.tokens))
    members = [c for c in in_order if c.weight > 0.0]
    if not members:
        return theta_out, state_out
    inputs = [_Drift(c, theta) for c in members]
    heaviest = max(c.weight for c in members)
    weights = [c.weight / heaviest for c in members]
    scratch = _Scratch(len(members), min(BLOCK_NUMEL, theta.numel()))
    for segment in segments if segments is not None else [Segment(0, theta.numel(), rule)]:
        coefficients = _average(weights)
        if segment.rule == RDA and len(members) > 1:
            coefficients = _rda(_gram(inputs, segment, scratch), weights)
        _step(inputs, coefficients, theta, state, segment, scratch, lr, momentum, nesterov)
    return theta_out, state_out


class _Drift:
    """D_m of one member, block by block, in as few passes as its form allows."""

    def __init__(self, member: MergeInput, theta: Tensor) -> None:
        self.values = member.values.view(-1)
        assert self.values.numel() == theta.numel(), (member.learner, self.values.numel(), theta.numel())
        self.base = None if member.is_drift else theta if member.base is None else member.base.view(-1)

    def write(self, out: Tensor, start: int, end: int) -> None:
        """out <- D_m[start:end]."""
        if self.base is None:
            torch.neg(self.values[start:end], out=out) if self.values.dtype == out.dtype else out.copy_(
                self.values[start:end]
            ).neg_()
        else:
            torch.sub(self.base[start:end], self.values[start:end], out=out)

    def add_to(self, out: Tensor, start: int, end: int, coefficient: float) -> None:
        """Add coefficient * D_m[start:end] to out."""
        if self.base is not None:
            out.add_(self.base[start:end], alpha=coefficient)
        out.add_(self.values[start:end], alpha=-coefficient)


class _Scratch:
    """Block-sized buffers that are made once per merge."""

    def __init__(self, num_members: int, numel: int) -> None:
        self.drifts = torch.empty(num_members, numel)
        self.combined = torch.empty(numel)


def _blocks(segment: Segment) -> Sequence[tuple[int, int]]:
    end = segment.offset + segment.numel
    return [(i, min(i + BLOCK_NUMEL, end)) for i in range(segment.offset, end, BLOCK_NUMEL)]


def _gram(inputs: Sequence[_Drift], segment: Segment, scratch: _Scratch) -> list[list[float]]:
    """[M][M] inner products <D_i, D_j> over the segment, summed over blocks in float64."""
    total = torch.zeros(len(inputs), len(inputs), dtype=torch.float64)
    for start, end in _blocks(segment):
        drifts = scratch.drifts[:, : end - start]
        for row, member in zip(drifts, inputs, strict=True):
            member.write(row, start, end)
        products = torch.mm(drifts, drifts.T)
        if not bool(products.isfinite().all()):
            # Finite drifts of a diverging learner, whose squares overflow float32.
            wide = drifts.double()
            products = torch.mm(wide, wide.T)
        total += products
    rows: list[list[float]] = total.tolist()
    return rows


def _average(weights: Sequence[float]) -> list[float]:
    """Coefficients c_m such that D = sum(c_m D_m) is the weighted average."""
    total = math.fsum(weights)
    return [w / total for w in weights]


def _rda(gram: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Coefficients c_m such that D = sum(c_m D_m) is the radial-directional average.

    With shares s_m = w_m / sum(w): radius r = sum(s_m |D_m|); direction u = sum(a_m D_m), a_m = s_m / |D_m|;
    D = r * u / |u|, and |u|^2 = a' G a.
    """
    shares = _average(weights)
    norms = [math.sqrt(max(0.0, gram[i][i])) for i in range(len(weights))]
    radius = math.fsum(s * n for s, n in zip(shares, norms, strict=True))
    direction = [s / n if n > 0.0 else 0.0 for s, n in zip(shares, norms, strict=True)]
    squared = math.fsum(
        direction[i] * direction[j] * gram[i][j] for i in range(len(weights)) for j in range(len(weights))
    )
    if squared <= CANCELLED**2:
        return shares
    return [a * radius / math.sqrt(squared) for a in direction]


def _step(
    inputs: Sequence[_Drift],
    coefficients: Sequence[float],
    theta: Tensor,
    state: Tensor,
    segment: Segment,
    scratch: _Scratch,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Combine the outer gradients with the coefficients and step theta and state, in place, block by block."""
    # Of plain parameters the mean itself is taken, not theta less the mean difference: so a buffer becomes the mean,
    # and at rate 1 without momentum theta becomes the one learner's parameters, to the bit.
    is_mean = segment.rule != RDA or len(inputs) == 1
    plain = is_mean and all(member.base is theta for member in inputs)
    for start, end in _blocks(segment):
        combined = scratch.combined[: end - start].zero_()
        block, velocity = theta[start:end], state[start:end]
        if plain:
            for member, coefficient in zip(inputs, coefficients, strict=True):
                combined.add_(member.values[start:end], alpha=coefficient)
            if segment.rule == BUFFER:
                block.copy_(combined)
                continue
            drift = torch.sub(block, combined, out=scratch.drifts[0, : end - start])
            block.lerp_(combined, lr)
        else:
            drift = combined
            for member, coefficient in zip(inputs, coefficients, strict=True):
                if coefficient:
                    member.add_to(drift, start, end, coefficient)
            block.add_(drift, alpha=-1.0 if segment.rule == BUFFER else -lr)
            if segment.rule == BUFFER:
                continue
        velocity.mul_(momentum)
        if nesterov:
            block.add_(velocity.add_(drift), alpha=-lr * momentum)
        else:
            block.add_(velocity, alpha=-lr)
            velocity.add_(drift)
