"""The optimizer inside a learner, and its learning-rate schedule.

Owns: which parameter gets which optimizer (torch.optim's own AdamW and Muon), where weight decay applies,
and the schedule as a pure function of the step. Must not know of ranks, islands or the syncer.
Called by: train.loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from diloco_cli.config.schema import InnerConfig, InnerOptimizerKind, Schedule

MUON_MOMENTUM = 0.95  # torch.optim.Muon's and the Muon authors' value; nobody has asked to change it
FUSED_DEVICES = ("cpu", "cuda", "mps")


def lr_factor(step: int, total_steps: int, cfg: InnerConfig) -> float:
    """Share of the peak learning rate for the inner step with index `step` (0-based).

    Written with t = step + 1, the number of steps after this one, T = total_steps and m = min_lr_ratio:
    warm-up t / w up to t = w (w = warmup_steps, at most T // 2 so that short runs still have a peak), then
    cosine m + (1 - m) (1 + cos(pi (t - w) / (T - w))) / 2; wsd 1 until the last decay_fraction T steps,
    then linear to m; constant 1. The last step has m exactly, and so has every step after it.
    """
    t = step + 1
    warmup = min(cfg.warmup_steps, total_steps // 2)
    if t <= warmup:
        return t / warmup
    if cfg.schedule is Schedule.constant:
        return 1.0
    low = cfg.min_lr_ratio
    if t >= total_steps:
        return low
    if cfg.schedule is Schedule.cosine:
        progress = (t - warmup) / (total_steps - warmup)
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
    decay_steps = min(total_steps - warmup, round(cfg.decay_fraction * total_steps))
    into_decay = t - (total_steps - decay_steps)
    return 1.0 - (1.0 - low) * into_decay / decay_steps if into_decay > 0 else 1.0


class InnerOptimizer:
    """One or two torch optimizers that step together, each group with its own peak learning rate."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self._groups = [(group, float(group["lr"])) for opt in optimizers for group in opt.param_groups]

    def set_lr_factor(self, factor: float) -> None:
        """Every group's learning rate becomes its peak times `factor`."""
        for group, peak in self._groups:
            group["lr"] = peak * factor

    def step(self) -> None:
        """One update from the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """State of all optimizers: tensors, numbers and lists only (safe to load with weights_only)."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict; peak learning rates stay those of today's configuration."""
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        # load_state_dict replaces the groups, and its learning rates are those of the step it was saved at.
        peaks = [peak for _, peak in self._groups]
        groups = [group for opt in self.optimizers for group in opt.param_groups]
        self._groups = list(zip(groups, peaks, strict=True))


def build_optimizer(model: nn.Module, cfg: InnerConfig, roles: Mapping[str, str] | None = None) -> InnerOptimizer:
    """AdamW for everything, or Muon for the hidden matrices and AdamW for the rest.

    Weight decay is for weights of two or more dimensions that are not embeddings. Under muon, the 2-D
    weights of role "weight" go to torch.optim.Muon; embeddings, head, vectors, and expert weights that are
    stored stacked (3-D) go to AdamW: torch.optim.Muon takes matrices only. Muon's decay coefficient is scaled so
    that a step shrinks its matrices by as much as AdamW's would (lr * weight_decay), whatever muon_lr is.

    Args:
        model: already on its device, already sharded (under FSDP2 its parameters are DTensors, which both take).
        roles: parameter name -> role as in core.fragments.TensorSpec; None: ask train.model.
    """
    if roles is None:
        from diloco_cli.train.model import tensor_inventory

        roles = {spec.name: spec.role for spec in tensor_inventory(model)}
    matrices, decayed, plain = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role = roles.get(name, "weight")
        if cfg.optimizer is InnerOptimizerKind.muon and parameter.ndim == 2 and role == "weight":
            matrices.append(parameter)
        elif parameter.ndim >= 2 and role != "embedding":
            decayed.append(parameter)
        else:
            plain.append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if decayed or plain:
        optimizers.append(_adamw(decayed, plain, cfg))
    if matrices:
        decay = cfg.weight_decay * cfg.lr / cfg.muon_lr
        optimizers.append(torch.optim.Muon(matrices, lr=cfg.muon_lr, weight_decay=decay, momentum=MUON_MOMENTUM))
    return InnerOptimizer(optimizers)


def _adamw(decayed: list[nn.Parameter], plain: list[nn.Parameter], cfg: InnerConfig) -> torch.optim.Optimizer:
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    # One fused kernel per group instead of a dozen passes: on the tiny model that is a tenth of the step.
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in (*decayed, *plain))
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.eps,
        fused=fused,
    )
