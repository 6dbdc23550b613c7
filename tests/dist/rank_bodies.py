"""What the ranks of tests/dist do. Each body runs in a process of its own and returns plain values."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from diloco_cli.config.schema import Config, InnerOptimizerKind, IslandConfig, ModelConfig, Parallel, Schedule
from diloco_cli.core.fragments import FragmentSpec, build_layout
from diloco_cli.train.data import Corpus, Document, TokenStream
from diloco_cli.train.island import Island, micro_batch
from diloco_cli.train.loop import PADDING, Trainer
from diloco_cli.train.model import build_model, state_tensors, tensor_inventory
from diloco_cli.train.tokenizer import ByteTokenizer

VOCAB, SEQ, STEPS = 31, 12, 3


def config(parallel: str = "ddp", world_size: int = 2, *, batch: int = 4, accumulate: int = 1, **inner: Any) -> Config:
    # dim 18 and 3 key/value rows of 6: rows do not divide by 4, and 31 vocabulary rows not by 2.
    model = ModelConfig(dim=18, num_layers=2, num_heads=3, num_kv_heads=1, ffn_dim=23, max_seq_len=64, tied=False)
    cfg = Config(model=model)
    each = cfg.islands.each
    each.parallel, each.nproc_per_node, each.batch, each.accumulate = Parallel(parallel), world_size, batch, accumulate
    cfg.inner.schedule, cfg.inner.warmup_steps, cfg.inner.lr, cfg.inner.clip_norm = Schedule.constant, 0, 1e-2, 0.5
    for key, value in inner.items():
        setattr(cfg.inner, key, value)
    return cfg


def global_batches(steps: int = STEPS, batch: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same uneven batches everywhere: sequence i of a batch has only its first 2 + 3 i targets."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(steps):
        window = torch.randint(0, VOCAB, (batch, SEQ + 1), generator=generator)
        targets = window[:, 1:].clone()
        for i in range(batch):
            targets[i, 2 + 3 * i :] = PADDING
        batches.append((window[:, :-1].clone(), targets))
    return batches


class Shares:
    """A cursor over global_batches: rank r takes the r-th share, in `accumulate` micro-batches."""

    def __init__(self, cfg: Config, rank: int, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        size, accumulate = micro_batch(cfg.islands.each), cfg.islands.each.accumulate
        self._micro = [
            (tokens[start : start + size], targets[start : start + size])
            for tokens, targets in batches
            for part in range(accumulate)
            for start in [(rank * accumulate + part) * size]
        ]
        self._next = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        tokens, targets = self._micro[self._next]
        self._next += 1
        return tokens, targets, [f"{self._next}-{i}" for i in range(len(tokens))]


def make_trainer(cfg: Config, rank: int, world_size: int, store: str, *, dtype: torch.dtype = torch.float64) -> Trainer:
    island = Island(cfg.islands.each, rank=rank, world_size=world_size, init_method=store, timeout_s=30)
    model = build_model(cfg.model, VOCAB, seed=3).to(dtype)
    cursor = Shares(cfg, rank, global_batches(batch=cfg.islands.each.batch))
    return Trainer(cfg, island, model, cursor, total_steps=100)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}


def reference(
    cfg: Config, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """One process, the whole batch at once, plain torch: final parameters and (loss, gradient norm) per step."""
    model = build_model(cfg.model, VOCAB, seed=3).to(dtype)
    roles = {spec.name: spec.role for spec in tensor_inventory(model)}
    named = list(model.named_parameters())
    decayed = [p for n, p in named if p.ndim >= 2 and roles[n] != "embedding"]
    plain = [p for n, p in named if not (p.ndim >= 2 and roles[n] != "embedding")]
    i = cfg.inner
    groups = [{"params": decayed, "weight_decay": i.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=i.lr, betas=(i.beta1, i.beta2), eps=i.eps, fused=False, foreach=False)
    history = []
    for tokens, targets in global_batches(batch=cfg.islands.each.batch):
        log_p = model(tokens).log_softmax(-1)
        kept = targets != PADDING
        loss = -log_p[kept].gather(1, targets[kept][:, None]).sum() / kept.sum()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= min(1.0, i.clip_norm / (norm.item() + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), norm.item()))
    return {n: p.detach() for n, p in named}, history


# ---- bodies -------------------------------------------------------------------------------------


def compare_with_reference(
    rank: int, world_size: int, store: str, parallel: str, accumulate: int, experts: int
) -> dict[str, Any]:
    cfg = config(parallel, world_size, accumulate=accumulate)
    # The balance loss is one of each micro-batch by nature; without it experts too are as in one process.
    cfg.model.num_experts, cfg.model.router_aux_weight = experts, 0.0
    trainer = make_trainer(cfg, rank, world_size, store)
    results = [trainer.step() for _ in range(STEPS)]
    wanted, history = reference(cfg)
    found = full_parameters(trainer.model)
    trainer.island.close()
    return {
        "error": max((found[n] - wanted[n]).abs().max().item() for n in wanted),
        "moved": max(
            (wanted[n] - p).abs().max().item() for n, p in build_model(cfg.model, VOCAB, 3).named_parameters()
        ),
        "loss_error": max(abs(r.loss - h[0]) for r, h in zip(results, history, strict=True)),
        "norm_error": max(abs(r.grad_norm - h[1]) for r, h in zip(results, history, strict=True)),
        "clipped": all(h[1] > cfg.inner.clip_norm for h in history),
        "tokens": [r.tokens for r in results],
    }


def muon_and_experts(rank: int, world_size: int, store: str, parallel: str) -> dict[str, Any]:
    """Two steps with Muon, experts and the balance loss; `direction`: cosine of the first update to one rank's."""
    cfg = config(parallel, world_size, optimizer=InnerOptimizerKind.muon, weight_decay=0.0)
    cfg.model.num_experts, cfg.model.experts_per_token = 4, 2
    trainer = make_trainer(cfg, rank, world_size, store, dtype=torch.float32)
    start = {n: p.clone() for n, p in full_parameters(trainer.model).items()}
    losses = [trainer.step().loss]
    updates = {n: p - start[n] for n, p in full_parameters(trainer.model).items()}
    losses.append(trainer.step().loss)
    sums = [float(p.double().sum()) for p in full_parameters(trainer.model).values()]
    trainer.island.close()

    island = Island(IslandConfig(batch=4), rank=0, world_size=1)
    model = build_model(cfg.model, VOCAB, seed=3)
    alone = Trainer(cfg, island, model, Shares(config(world_size=1), 0, global_batches()), total_steps=100)
    alone.step()
    name = "model.layers.0.self_attn.q_proj.weight"
    wanted = model.get_parameter(name).detach() - start[name]
    direction = torch.nn.functional.cosine_similarity(wanted.flatten(), updates[name].flatten(), 0).item()
    return {"losses": losses, "sums": sums, "direction": direction, "size": float(updates[name].norm() / wanted.norm())}


def with_buffers(cfg: Config, dtype: torch.dtype) -> nn.Module:
    model = build_model(cfg.model, VOCAB, seed=3).to(dtype)
    model.register_buffer("running", torch.arange(5, dtype=torch.float32))
    model.register_buffer("seen", torch.tensor(7, dtype=torch.int64))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    return model


def fragment_round_trip(rank: int, world_size: int, store: str, parallel: str) -> dict[str, Any]:
    """Gather every fragment; install known values with several alphas; train on; gather again."""
    cfg = config(parallel, world_size)
    island = Island(cfg.islands.each, rank=rank, world_size=world_size, init_method=store, timeout_s=30)
    model = with_buffers(cfg, torch.float32)
    start = {name: tensor.detach().clone().float() for name, tensor in state_tensors(model).items()}
    layout = build_layout(tensor_inventory(model), num_fragments=40, min_fragment_bytes=64)
    cut = [s for f in layout.fragments for s in f.slices if s.num_rows < max(1, *start[s.name].shape[:1], 1)]
    trainer = Trainer(cfg, island, model, Shares(cfg, rank, global_batches()), total_steps=100)
    island.free_unsharded()

    def flat_of(fragment: FragmentSpec, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        flat = torch.full((fragment.numel,), float("nan"))
        for piece in fragment.slices:
            tensor = tensors[piece.name] if tensors[piece.name].ndim else tensors[piece.name][None]
            flat[piece.offset : piece.offset + piece.numel] = tensor[piece.row_start :][: piece.num_rows].flatten()
        return flat

    def gather_all() -> list[torch.Tensor | None]:
        return [island.gather_fragment(f) for f in layout.fragments]

    report: dict[str, Any] = {"row_cuts": len(cut)}
    gathered = gather_all()
    report["exact"] = rank != 0 or all(
        torch.equal(g, flat_of(f, start)) for f, g in zip(layout.fragments, gathered, strict=True)
    )
    report["others_none"] = rank == 0 or all(g is None for g in gathered)

    trainer.step()  # FSDP2 has now gathered and freed its parameters once
    before = [g.clone() if g is not None else None for g in gather_all()]
    generator = torch.Generator().manual_seed(9)
    values = [torch.randn(f.numel, generator=generator) for f in layout.fragments]
    alpha_errors = []
    for alpha in (0.0, 0.25, 1.0):
        previous = gather_all()
        for fragment, value in zip(layout.fragments, values, strict=True):
            island.install_fragment(fragment, value if rank == 0 else None, alpha)
        after = gather_all()
        if rank == 0:
            floats = [_float_positions(f) for f in layout.fragments]
            mixed = [alpha * p + (1 - alpha) * v for p, v in zip(previous, values, strict=True)]
            alpha_errors.append(
                max((a - m)[i].abs().max().item() for a, m, i in zip(after, mixed, floats, strict=True) if i.any())
            )
        values = [v + 1 for v in values]
    report["alpha_errors"] = alpha_errors
    parameters = full_parameters(model)
    report["sums"] = [float(p.double().sum()) for p in parameters.values()]
    report["buffers"] = [b.float().flatten().tolist() for _, b in sorted(model.named_buffers())]

    # What was installed is what the next forward computes with.
    for fragment in layout.fragments:
        island.install_fragment(fragment, flat_of(fragment, start) if rank == 0 else None, 0.0)
    restored = full_parameters(model)
    restored |= {n: b.float() for n, b in model.named_buffers()}
    report["restored"] = all(torch.equal(restored[n], start[n]) for n in start)
    report["dtypes"] = {n: str(b.dtype) for n, b in model.named_buffers()}
    report["trained"] = rank != 0 or any(
        not torch.equal(b, flat_of(f, start)) for f, b in zip(layout.fragments, before, strict=True)
    )
    trainer.cursor = Shares(cfg, rank, global_batches())
    report["loss_after"] = trainer.step().loss
    island.close()
    return report


def _float_positions(fragment: FragmentSpec) -> torch.Tensor:
    kept = torch.ones(fragment.numel, dtype=torch.bool)
    for piece in fragment.slices:
        if piece.name in ("seen", "flags"):
            kept[piece.offset : piece.offset + piece.numel] = False
    return kept


def evaluate_then_install(rank: int, world_size: int, store: str, parallel: str) -> dict[str, Any]:
    """An install right after a validation pass must reach the parameters, and validation must not depend on ranks."""
    cfg = config(parallel, world_size)
    cfg.data.seq_len = SEQ
    trainer = make_trainer(cfg, rank, world_size, store, dtype=torch.float32)
    text = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(2))
    stream = TokenStream([Document("text", "", text.numpy())])  # 9 windows, the last of 3 targets: 5 batches of 2
    trainer.corpus = Corpus(stream, stream, ByteTokenizer(), VOCAB, SEQ, "")
    first = trainer.evaluate(1000)
    specs = tensor_inventory(build_model(cfg.model, VOCAB, 3))
    for fragment in build_layout(specs, num_fragments=3, min_fragment_bytes=64).fragments:
        trainer.island.install_fragment(fragment, torch.zeros(fragment.numel) if rank == 0 else None, 0.0)
    second = trainer.evaluate(1000)
    training = trainer.model.training
    trainer.island.close()
    model = build_model(cfg.model, VOCAB, seed=3)
    nats = 0.0
    with torch.no_grad():
        for start in range(0, 99, SEQ):
            piece = text[start : start + SEQ + 1]
            nats -= float(model(piece[None, :-1])[0].log_softmax(-1).gather(1, piece[1:, None]).sum())
    return {"first": first, "second": second, "wanted": nats / 99, "training": training}


def plans(rank: int, world_size: int, store: str) -> list[Any]:
    cfg = config("ddp", world_size)
    island = Island(cfg.islands.each, rank=rank, world_size=world_size, init_method=store, timeout_s=30)
    sent = [[], [5], [-1, 2**62], list(range(63)), list(range(64)), list(range(200))]
    got = [island.broadcast_plan(plan if rank == 0 else None) for plan in sent]
    flags = [island.any_rank(False), island.any_rank(rank == 1)]
    sums = island.all_reduce_sum(10**12 + rank, 0.5)
    island.close()
    return [got == sent, flags, sums]


def one_rank_dies(rank: int, world_size: int, store: str) -> float:
    """Rank 1 is gone without a word; seconds until rank 0 has its error."""
    cfg = config("ddp", world_size)
    island = Island(cfg.islands.each, rank=rank, world_size=world_size, init_method=store, timeout_s=30)
    island.broadcast_plan([] if rank == 0 else None)
    if rank == 1:
        island.close()
        return 0.0
    began = time.monotonic()
    try:
        for _ in range(1000):
            island.any_rank(False)
    except RuntimeError:
        return time.monotonic() - began
    raise AssertionError("rank 0 noticed nothing")


def one_rank_hangs(rank: int, world_size: int, store: str, timeout_s: float) -> float:
    cfg = config("ddp", world_size)
    island = Island(cfg.islands.each, rank=rank, world_size=world_size, init_method=store, timeout_s=timeout_s)
    began = time.monotonic()
    if rank == 0:
        try:
            island.any_rank(False)
        except RuntimeError:
            pass
        else:
            raise AssertionError("no time-out")
        open(f"{store.removeprefix('file://')}.done", "w").close()
    else:
        while not os.path.exists(f"{store.removeprefix('file://')}.done"):  # hangs until rank 0 gave up
            time.sleep(0.01)
    return time.monotonic() - began
