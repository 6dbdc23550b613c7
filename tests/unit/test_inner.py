"""The inner step on one rank: schedule, optimizer groups, token weighting, clipping, emulated speed."""

from __future__ import annotations

import copy
import math
import time

import pytest
import torch
from torch import nn

from diloco_cli.config.schema import (
    Autocast,
    Config,
    InnerConfig,
    InnerOptimizerKind,
    IslandConfig,
    ModelConfig,
    Schedule,
)
from diloco_cli.errors import ConfigError
from diloco_cli.train.inner import build_optimizer, lr_factor
from diloco_cli.train.island import Island, _mix, micro_batch
from diloco_cli.train.loop import PADDING, Trainer, wants_bfloat16
from diloco_cli.train.model import build_model

VOCAB = 17


class Batches:
    def __init__(self, batches):
        self._batches = iter(batches)

    def next_batch(self):
        tokens, targets = next(self._batches)
        return tokens, targets, ["x"] * len(tokens)


class Table(nn.Module):
    """Logits of the next token given this one: losses can be set by hand."""

    def __init__(self, logits):
        super().__init__()
        self.table = nn.Parameter(logits)

    def forward(self, tokens):
        return self.table[tokens]


def small_config(**inner) -> Config:
    cfg = Config(model=ModelConfig(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24, max_seq_len=32))
    cfg.islands.each = IslandConfig(batch=4)
    cfg.inner = InnerConfig(schedule=Schedule.constant, warmup_steps=0, lr=1e-2, **inner)
    return cfg


def trainer(cfg, batches, model=None, *, total_steps=100) -> Trainer:
    if model is None:
        model = build_model(cfg.model, VOCAB, seed=1).double()
    island = Island(cfg.islands.each, rank=0, world_size=1)
    return Trainer(cfg, island, model, Batches(batches), total_steps)


def windows(count, batch, length=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        window = torch.randint(0, VOCAB, (batch, length + 1), generator=generator)
        yield window[:, :-1].clone(), window[:, 1:].clone()


# ---- schedule -----------------------------------------------------------------------------------


def test_cosine_in_closed_form():
    cfg = InnerConfig(schedule=Schedule.cosine, warmup_steps=10, min_lr_ratio=0.1)
    factors = [lr_factor(step, 110, cfg) for step in range(110)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[59] == pytest.approx(0.55)  # half-way through the cosine
    assert factors[34] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert factors[109] == pytest.approx(0.1)
    assert lr_factor(500, 110, cfg) == 0.1
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_wsd_in_closed_form():
    cfg = InnerConfig(schedule=Schedule.wsd, warmup_steps=4, min_lr_ratio=0.2, decay_fraction=0.25)
    factors = [lr_factor(step, 40, cfg) for step in range(40)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[4:30] == [1.0] * 26
    assert factors[30:] == pytest.approx([1 - 0.8 * i / 10 for i in range(1, 11)])
    assert lr_factor(40, 40, cfg) == 0.2


def test_constant_and_the_edges():
    constant = InnerConfig(schedule=Schedule.constant, warmup_steps=2)
    assert [lr_factor(step, 9, constant) for step in (0, 1, 2, 8, 100)] == [0.5, 1.0, 1.0, 1.0, 1.0]
    # Warm-up longer than the run: at most half of it, so the peak is reached.
    short = InnerConfig(schedule=Schedule.cosine, warmup_steps=50, min_lr_ratio=0.0)
    assert [lr_factor(step, 4, short) for step in range(4)] == pytest.approx([0.5, 1.0, 0.5, 0.0])
    for schedule in Schedule:
        for fraction in (0.0, 1.0):
            cfg = InnerConfig(schedule=schedule, warmup_steps=3, decay_fraction=fraction)
            for total in (1, 2, 3, 4, 7):
                assert all(0 < lr_factor(step, total, cfg) <= 1 for step in range(total + 2))


# ---- optimizer groups ---------------------------------------------------------------------------


def test_weight_decay_spares_vectors_and_embeddings():
    model = build_model(ModelConfig(dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, tied=False), VOCAB, seed=0)
    optimizer = build_optimizer(model, InnerConfig(weight_decay=0.1))
    decay = {id(p): g["weight_decay"] for o in optimizer.optimizers for g in o.param_groups for p in g["params"]}
    by_name = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert by_name["model.embed_tokens.weight"] == 0.0
    assert by_name["model.norm.weight"] == 0.0
    assert by_name["lm_head.weight"] == 0.1
    assert by_name["model.layers.0.mlp.up_proj.weight"] == 0.1


def test_muon_takes_the_hidden_matrices_only():
    model = build_model(ModelConfig(dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, tied=False), VOCAB, seed=0)
    model.stacked = nn.Parameter(torch.zeros(3, 4, 5))
    cfg = InnerConfig(optimizer=InnerOptimizerKind.muon, lr=1e-3, muon_lr=0.02, weight_decay=0.1)
    adamw, muon = build_optimizer(model, cfg).optimizers
    names = {id(p): n for n, p in model.named_parameters()}
    matrices = {names[id(p)] for p in muon.param_groups[0]["params"]}
    assert matrices == {n for n in names.values() if ".layers." in n and "layernorm" not in n}
    assert isinstance(muon, torch.optim.Muon)
    others = {names[id(p)] for g in adamw.param_groups for p in g["params"]}
    assert others | matrices == set(names.values())
    assert not others & matrices
    assert muon.param_groups[0]["lr"] * muon.param_groups[0]["weight_decay"] == pytest.approx(1e-3 * 0.1)


@pytest.mark.parametrize("kind", list(InnerOptimizerKind))
def test_optimizer_state_goes_on_where_it_stopped(kind):
    cfg = small_config(optimizer=kind)
    cfg.inner.schedule, cfg.inner.warmup_steps = Schedule.cosine, 3
    batches = list(windows(6, 4))
    model = build_model(cfg.model, VOCAB, seed=1)
    whole = trainer(cfg, batches, copy.deepcopy(model))
    lrs = [whole.step().lr for _ in range(6)]
    first = trainer(cfg, batches[:3], copy.deepcopy(model))
    for _ in range(3):
        first.step()
    second = trainer(cfg, batches[3:], first.model)
    second.set_step(3)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert [second.step().lr for _ in range(3)] == lrs[3:]
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_both_optimizers_learn():
    for kind in InnerOptimizerKind:
        cfg = small_config(optimizer=kind)
        fixed = next(windows(1, 4))
        run = trainer(cfg, [fixed] * 30, build_model(cfg.model, VOCAB, seed=1))
        losses = [run.step().loss for _ in range(30)]
        assert losses[-1] < 0.6 * losses[0]


# ---- the step -----------------------------------------------------------------------------------


def test_micro_batches_weigh_by_their_tokens():
    """10 tokens at loss 2.0 and 90 at loss 1.0 are 1.1, not 1.5."""
    table = torch.zeros(2, 2, dtype=torch.float64)
    table[0, 1] = math.log(math.expm1(2.0))  # target 0 after token 0 costs log(1 + e^x) = 2
    table[1, 1] = math.log(math.expm1(1.0))
    cfg = small_config()
    cfg.islands.each = IslandConfig(batch=2, accumulate=2)
    ten = torch.full((1, 100), PADDING)
    ten[0, :10] = 0
    ninety = torch.zeros(1, 100, dtype=torch.int64)
    ninety[0, 90:] = PADDING
    batches = [(torch.zeros(1, 100, dtype=torch.int64), ten), (torch.ones(1, 100, dtype=torch.int64), ninety)]
    result = trainer(cfg, batches, Table(table)).step()
    assert result.loss == pytest.approx(1.1, abs=1e-12)
    assert result.tokens == 100


def test_accumulation_equals_the_big_batch_in_float64():
    big = list(windows(3, 4))
    for row in range(4):
        big[1][1][row, 1 + 2 * row :] = PADDING  # uneven, and so is nothing a mean of means would survive
    runs = []
    for accumulate in (1, 2, 4):
        cfg = small_config()
        cfg.islands.each = IslandConfig(batch=4, accumulate=accumulate)
        parts = [pair for x, y in big for pair in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True)]
        run = trainer(cfg, parts)
        results = [run.step() for _ in range(3)]
        runs.append(([r.loss for r in results], [p.detach().clone() for p in run.model.parameters()]))
    for losses, parameters in runs[1:]:
        assert losses == pytest.approx(runs[0][0], abs=1e-12)
        for one, other in zip(parameters, runs[0][1], strict=True):
            assert torch.allclose(one, other, atol=1e-12, rtol=0)


def test_a_step_without_tokens_changes_nothing():
    x, y = next(windows(1, 4))
    run = trainer(small_config(), [(x, torch.full_like(y, PADDING)), (x, y)])
    before = [p.detach().clone() for p in run.model.parameters()]
    result = run.step()
    assert result.tokens == 0
    assert math.isnan(result.loss)
    assert result.skipped
    assert all(torch.equal(p, b) for p, b in zip(run.model.parameters(), before, strict=True))
    assert not run.step().skipped


def test_a_gradient_that_is_not_finite_is_left_out():
    """One bad step would poison the optimizer's moments for good; merged parameters could not heal those."""
    x, y = next(windows(1, 4))
    cfg = small_config()
    model = Table(torch.zeros(VOCAB, VOCAB))
    run = trainer(cfg, [(x, y), (x, y)], model)
    with torch.no_grad():
        model.table[x[0, 0], 3] = float("inf")
    assert run.step().skipped
    with torch.no_grad():
        model.table.zero_()
    result = run.step()
    assert not result.skipped
    assert torch.isfinite(model.table).all()


def test_clipping_scales_to_the_norm_and_zero_means_none():
    x, y = next(windows(1, 4))
    shifts = {}
    for clip in (0.0, 1e-3):
        cfg = small_config(clip_norm=clip)
        model = Table(torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
        run = trainer(cfg, [(x, y)], model)
        run.optimizer.optimizers = [torch.optim.SGD(model.parameters(), lr=1.0)]  # the shift is the gradient
        before = model.table.detach().clone()
        norm = run.step().grad_norm
        shifts[clip] = ((model.table.detach() - before).norm().item(), norm)
    assert shifts[0.0][0] == pytest.approx(shifts[0.0][1], rel=1e-9)
    assert shifts[1e-3][0] == pytest.approx(1e-3, rel=1e-3)
    assert shifts[1e-3][1] == pytest.approx(shifts[0.0][1])  # reported before clipping


def test_router_balance_is_part_of_the_gradient_not_of_the_loss():
    batches = list(windows(2, 4))
    results, gates = [], []
    for weight in (0.0, 1.0):
        cfg = small_config()
        cfg.model.num_experts, cfg.model.router_aux_weight = 4, weight
        run = trainer(cfg, batches)
        results.append(run.step())
        gates.append(run.model.model.layers[0].block_sparse_moe.gate.weight.detach().clone())
    assert results[0].loss == results[1].loss
    assert not torch.equal(*gates)


def test_emulated_speed_is_a_ratio_of_the_compute_time():
    class Busy(Table):
        def forward(self, tokens):
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            return super().forward(tokens)

    cfg = small_config()
    cfg.islands.each = IslandConfig(batch=4, speed=0.4)
    run = trainer(cfg, windows(8, 4), Busy(torch.zeros(VOCAB, VOCAB)))
    results = [run.step() for _ in range(8)]
    ratio = sorted((r.step_time_s - r.data_time_s) / r.compute_time_s for r in results)[4]
    assert ratio == pytest.approx(1 / 0.4, rel=0.1)
    for r in results:
        assert r.step_time_s == pytest.approx(r.data_time_s + r.compute_time_s + r.slowed_time_s, abs=1e-3)


def test_schedule_follows_set_step():
    cfg = small_config()
    cfg.inner.schedule, cfg.inner.warmup_steps = Schedule.cosine, 10
    run = trainer(cfg, windows(2, 4))
    run.set_step(60)
    assert run.step().lr == cfg.inner.lr * lr_factor(60, 100, cfg.inner)
    assert run.step_index == 61


def test_bfloat16_is_not_chosen_for_a_cpu():
    cpu = torch.device("cpu")
    assert not wants_bfloat16(Autocast.auto, cpu)
    assert wants_bfloat16(Autocast.bfloat16, cpu)
    assert not wants_bfloat16(Autocast.off, cpu)


def test_autocast_computes_in_bfloat16_and_keeps_float32_parameters():
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, VOCAB)

        def forward(self, tokens):
            out = self.lin(torch.nn.functional.one_hot(tokens % 4, 4).float())
            seen.append(out.dtype)
            return out

    for autocast, dtype in ((Autocast.auto, torch.float32), (Autocast.bfloat16, torch.bfloat16)):
        run = trainer(small_config(autocast=autocast), windows(1, 4), Spy())
        assert math.isfinite(run.step().loss)
        assert seen.pop() is dtype
        assert all(p.dtype is torch.float32 for p in run.model.parameters())


# ---- island of one rank -------------------------------------------------------------------------


def test_batch_must_come_out_even():
    assert micro_batch(IslandConfig(batch=8, nproc_per_node=2, accumulate=2)) == 2
    with pytest.raises(ConfigError) as error:
        micro_batch(IslandConfig(batch=10, nproc_per_node=2, accumulate=2))
    assert "4" in str(error.value)
    assert "batch=8" in error.value.hint
    with pytest.raises(ConfigError):
        micro_batch(IslandConfig(batch=0))


def test_mixing_buffers_rounds_and_thresholds():
    counts = torch.tensor([10, -3])
    _mix(counts, torch.tensor([12.6, -3.4]), 0.5)
    assert counts.tolist() == [11, -3]
    flags = torch.tensor([True, False])
    _mix(flags, torch.tensor([0.2, 0.9]), 0.0)
    assert flags.tolist() == [False, True]
    values = torch.tensor([1.0, 2.0])
    _mix(values, torch.tensor([3.0, -2.0]), 0.75)
    assert values.tolist() == [1.5, 1.0]


def test_one_rank_needs_no_process_group():
    island = Island(IslandConfig(), rank=0, world_size=1)
    assert not torch.distributed.is_initialized()
    assert island.broadcast_plan([3, 1]) == [3, 1]
    assert island.all_reduce_sum(2, 3) == (2, 3)
    assert island.any_rank(True)
    island.close()
