"""The inner loop: one learner's training step on one rank of its island, and its validation.

Owns: gradient accumulation, token weighting, clipping, precision, the emulated speed, and timing of a step.
Must not know of the syncer, fragments or files. Called by: run.learner_main, benchmarks, train.export.

The loss of a step is the mean over all its real targets: those of all micro-batches of all ranks, each counting once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_cli.config.schema import Autocast, Config, ModelKind
from diloco_cli.train.inner import build_optimizer, lr_factor
from diloco_cli.train.island import Island

PADDING = -100  # target of a position that is not trained on, as in torch's cross_entropy


class BatchSource(Protocol):
    """What a Trainer needs of train.data.ShardCursor."""

    def next_batch(self) -> tuple[Tensor, Tensor, list[str]]:
        """One micro-batch of this rank: tokens and targets int64 [B, T] (PADDING where there is none), sample ids."""


class StepResult(NamedTuple):
    """One inner step, the same on all ranks but for the times and the sample ids.

    Attributes:
        tokens: real targets over all ranks and micro-batches.
        loss: mean nats per token; NaN if there was no token.
        grad_norm: before clipping.
        lr: of the first parameter group.
        step_time_s: the whole step, including data and emulated slowness.
        data_time_s: fetching batches.
        compute_time_s: forward, backward, waiting for the island's other ranks, optimizer.
        slowed_time_s: slept to emulate slower hardware.
        skipped: the optimizer did not step (no token, or a gradient that is not finite).
        ids: of this rank's samples.
    """

    tokens: int
    loss: float
    grad_norm: float
    lr: float
    step_time_s: float
    data_time_s: float
    compute_time_s: float
    slowed_time_s: float
    skipped: bool
    ids: list[str]


class Evaluation(NamedTuple):
    """loss: mean nats per token (NaN if there was none); tokens: over how many."""

    loss: float
    tokens: int


class Trainer:
    """Training of one model on one rank.

    Args:
        cfg: the whole configuration (model, inner, data.seq_len are read).
        island: not yet set up; this calls island.setup(model). All ranks make their Trainer together.
        model: on the CPU, the same on all ranks.
        cursor: this rank's micro-batches, micro_batch(island.cfg) sequences each
            (ShardCursor(..., batch=island.cfg.sequences // island.cfg.accumulate)).
        total_steps: length of the learning-rate schedule.
        corpus: for evaluate (train.data.Corpus); may be None where nobody evaluates.
        step: inner steps already behind this learner (joining or resuming).
    """

    def __init__(
        self,
        cfg: Config,
        island: Island,
        model: nn.Module,
        cursor: BatchSource,
        total_steps: int,
        *,
        corpus: Any = None,
        step: int = 0,
    ) -> None:
        self.cfg = cfg
        self.island = island
        self.cursor = cursor
        self.corpus = corpus
        self.total_steps = total_steps
        self.step_index = step
        self._warm_from: int | None = None
        self._autocast = wants_bfloat16(cfg.inner.autocast, island.device)
        self.module = island.setup(
            model,
            # Foreign models may leave parameters out of a step, which DDP must then look for (slower).
            unused_parameters=cfg.model.kind is not ModelKind.llama,
            compile_model=cfg.inner.compile,
            low_precision=self._autocast,
        )
        self.model = island.model
        self.optimizer = build_optimizer(self.model, cfg.inner)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._sparse = cfg.model.kind is ModelKind.llama and cfg.model.num_experts > 0

    def set_step(self, step: int) -> None:
        """Go on as if `step` inner steps were done: the schedule is a function of the step alone."""
        self.step_index = step

    def place(self, steps: int) -> None:
        """Go to the place in the data at which this island is after so many steps of its own."""
        self.cursor.position = steps * self.island.cfg.sequences  # type: ignore[attr-defined]

    def warm_up_again(self) -> None:
        """From here on the rate grows from zero once more: the optimizer has no state yet (algorithm.md, Failure)."""
        self._warm_from = self.step_index

    def _rate(self) -> float:
        """Share of the peak learning rate for the step to come."""
        factor = lr_factor(self.step_index, self.total_steps, self.cfg.inner)
        steps = self.cfg.inner.rejoin_warmup_steps
        if self._warm_from is not None and steps > 0:
            factor *= min(1.0, (self.step_index + 1 - self._warm_from) / steps)
        return factor

    # ---- one step -------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """One inner step. Collective over the island's ranks."""
        began = time.perf_counter()
        batches = [self.cursor.next_batch() for _ in range(self.island.cfg.accumulate)]
        ids = [sample for batch in batches for sample in batch[2]]
        counts = [int((batch[1] != PADDING).sum()) for batch in batches]
        fetched = time.perf_counter()

        tokens = int(self.island.all_reduce_sum(sum(counts))[0])
        factor = self._rate()
        self.optimizer.set_lr_factor(factor)
        loss, norm = self._gradients(batches, counts, tokens) if tokens else (float("nan"), 0.0)
        skipped = not tokens or not (norm < float("inf"))  # also true for NaN
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_index += 1

        slowed = self._slow_down(time.perf_counter() - fetched)
        ended = time.perf_counter()
        return StepResult(
            tokens=tokens,
            loss=loss,
            grad_norm=norm,
            lr=self.cfg.inner.lr * factor,
            step_time_s=ended - began,
            data_time_s=fetched - began,
            compute_time_s=ended - fetched - slowed,
            slowed_time_s=slowed,
            skipped=skipped,
            ids=ids,
        )

    def _gradients(self, batches: list[Any], counts: list[int], tokens: int) -> tuple[float, float]:
        """Clipped gradients of the step's mean loss in .grad; returns (loss, gradient norm before clipping)."""
        device = self.island.device
        # DDP and FSDP2 average gradients over the ranks; the mean wanted here is over tokens.
        scale = self.island.world_size / tokens
        total: Tensor | None = None
        for index, (inputs, targets, _) in enumerate(batches):
            with self.island.no_sync(last=index == len(batches) - 1):
                with self._precision():
                    logits = self.module(inputs.to(device, non_blocking=True))
                    summed = token_loss_sum(logits, targets.to(device, non_blocking=True))
                objective = summed * scale
                if self._sparse:
                    objective = objective + self._auxiliary() * (counts[index] * scale)
                torch.autograd.backward(objective)
            total = summed.detach() if total is None else total + summed.detach()
        assert total is not None
        norm = self._clip()
        # The one place where the host waits for the device; before the optimizer, so that a bad step can be left out.
        loss_sum, norm_value = torch.stack((total.to(norm.dtype), norm.to(total.device))).tolist()
        return self.island.all_reduce_sum(loss_sum)[0] / tokens, norm_value

    def _auxiliary(self) -> Tensor:
        from diloco_cli.train.model import aux_loss

        return cast(Tensor, aux_loss(self.model)) * self.cfg.model.router_aux_weight

    def _clip(self) -> Tensor:
        """Total gradient norm (0-d, before clipping); gradients are scaled down to cfg.inner.clip_norm in place."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.cfg.inner.clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.cfg.inner.clip_norm, norm)
        return cast(Tensor, cast(Any, norm).full_tensor()) if hasattr(norm, "full_tensor") else norm

    def _precision(self) -> AbstractContextManager[Any]:
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self.island.device.type, dtype=torch.bfloat16)

    def _slow_down(self, compute_s: float) -> float:
        """Sleep as long as hardware of `speed` would have taken longer; returns the seconds slept."""
        speed = self.island.cfg.speed
        if speed >= 1.0:
            return 0.0
        began = time.perf_counter()
        time.sleep(compute_s * (1.0 / speed - 1.0))
        return time.perf_counter() - began

    # ---- validation -----------------------------------------------------------------------------

    def evaluate(self, max_sequences: int) -> Evaluation:
        """Loss over the first `max_sequences` validation windows, shared out among the ranks. Collective."""
        from diloco_cli.train.data import validation_batches

        batches = list(validation_batches(self.corpus, self.cfg.data.seq_len, self._validation_batch(), max_sequences))
        if not batches:
            return Evaluation(float("nan"), 0)
        loss_sum, tokens = 0.0, 0
        with evaluating(self.model):
            try:
                # Every rank runs equally many forwards, since each is a collective under FSDP2.
                for first in range(0, len(batches), self.island.world_size):
                    index = first + self.island.rank
                    part = self._evaluate_batch(batches[min(index, len(batches) - 1)])
                    if index < len(batches):
                        loss_sum, tokens = loss_sum + part.loss, tokens + part.tokens
            finally:
                self.island.free_unsharded()
        all_loss, all_tokens = self.island.all_reduce_sum(loss_sum, tokens)
        return Evaluation(all_loss / all_tokens if all_tokens else float("nan"), int(all_tokens))

    def _evaluate_batch(self, batch: Any) -> Evaluation:
        """The summed loss (not the mean) and the tokens of one batch."""
        inputs, targets = batch[0], batch[1]
        device = self.island.device
        with self._precision():
            summed = token_loss_sum(self.model(inputs.to(device)), targets.to(device))
        return Evaluation(float(summed), int((targets != PADDING).sum()))

    def _validation_batch(self) -> int:
        from diloco_cli.train.island import micro_batch

        return micro_batch(self.island.cfg)

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on: parameters, step, optimizer, data position, random state.

        Under FSDP2 the tensors are this rank's shards. They are the live ones: copy them before the next step.
        """
        return {
            "step": self.step_index,
            "warm_from": self._warm_from,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "cursor": cast(Any, self.cursor).state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.island.device) if self.island.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict, on the same rank of an island of the same shape."""
        self.step_index = int(state["step"])
        self._warm_from = state["warm_from"]
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                local(tensor).copy_(state["model"][name])
        self.load_optimizer(state["optimizer"])
        cast(Any, self.cursor).load_state_dict(state["cursor"])
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None and self.island.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"], self.island.device)

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """The optimizer's part of a state_dict alone: of this learner's past, or of a peer of the same shape."""
        self.optimizer.load_state_dict(state)
        for optimizer in self.optimizer.optimizers:
            for parameter, values in optimizer.state.items():
                for name, value in values.items():
                    if isinstance(value, Tensor) and hasattr(parameter, "to_local") and value.ndim:
                        values[name] = _sharded_like(cast(Any, parameter), value)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 has sharded; any other as it is."""
    return cast(Tensor, cast(Any, tensor).to_local()) if hasattr(tensor, "to_local") else tensor


def _sharded_like(parameter: Any, value: Tensor) -> Tensor:
    if hasattr(value, "to_local"):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats over the targets int64 [B, T] that are not PADDING; logits [B, T, V]."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")


def wants_bfloat16(setting: Autocast, device: torch.device) -> bool:
    """Whether to compute in bfloat16. auto: cuda with bfloat16 units only; on CPUs without AMX it is half as fast."""
    if setting is Autocast.auto:
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return setting is Autocast.bfloat16


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; training mode is as before afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def seed_everything(seed: int, learner_index: int, rank: int) -> None:
    """torch's global random state (dropout of foreign models): different on every rank of every learner."""
    torch.manual_seed(seed * 1_000_003 + learner_index * 1_009 + rank)
