"""core.merge against closed forms, a float64 reference written from algorithm.md, and properties."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco_cli.core import merge as merge_module
from diloco_cli.core.merge import AVERAGE, BUFFER, RDA, MergeInput, Segment, merge

RULES = (AVERAGE, RDA)


def member(values: Any, *, name: str = "a", tokens: int = 10, steps: int = 1, **more: Any) -> MergeInput:
    return MergeInput(
        learner=name, values=torch.as_tensor(values, dtype=torch.float32), tokens=tokens, steps=steps, **more
    )


def one(theta: float, *values: tuple[float, int, int], state: float = 0.0, **how: Any) -> tuple[float, float]:
    """Merge scalars (value, tokens, steps); return theta and state."""
    inputs = [member([v], name=f"m{i}", tokens=t, steps=n) for i, (v, t, n) in enumerate(values)]
    new, new_state = merge(torch.tensor([theta]), torch.tensor([state]), inputs, **how)
    return new.item(), new_state.item()


# ---- a slow reference in float64, straight from algorithm.md, Syncer 3 and 4 ----------------------


def reference(
    theta: Tensor,
    state: Tensor,
    inputs: Sequence[MergeInput],
    *,
    lr: float,
    momentum: float,
    segments: Sequence[Segment],
    nesterov: bool = True,
) -> tuple[Tensor, Tensor]:
    theta, state = theta.double().clone(), state.double().clone()
    present = [m for m in inputs if m.steps > 0 and m.tokens > 0]
    if not present:
        return theta, state
    w = [m.tokens * (m.tokens / m.steps) for m in present]
    for s in segments:
        part = slice(s.offset, s.offset + s.numel)
        drifts = []
        for m in present:
            values = m.values.double()[part]
            base = theta[part] if m.base is None else m.base.double()[part]
            drifts.append(-values if m.is_drift else base - values)
        average = sum(a * d for a, d in zip(w, drifts, strict=True)) / sum(w)
        if s.rule == BUFFER:
            theta[part] -= average
            continue
        gradient = average
        if s.rule == RDA:
            units = [d / d.norm() if d.norm() > 0 else d for d in drifts]
            direction = sum(a * u for a, u in zip(w, units, strict=True)) / sum(w)
            radius = sum(a * d.norm() for a, d in zip(w, drifts, strict=True)) / sum(w)
            if direction.norm() > merge_module.CANCELLED:
                gradient = radius * direction / direction.norm()
        state[part] = momentum * state[part] + gradient
        theta[part] -= lr * (gradient + momentum * state[part]) if nesterov else lr * state[part]
    return theta, state


# ---- closed forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_sign_and_nesterov_form(rule: str) -> None:
    theta, state = one(1.0, (0.9, 10, 1), (0.9, 10, 1), lr=0.7, momentum=0.9, rule=rule)
    assert theta == pytest.approx(0.867, abs=1e-6)
    theta, state = one(theta, (theta - 0.1, 10, 1), (theta - 0.1, 10, 1), state=state, lr=0.7, momentum=0.9, rule=rule)
    assert theta == pytest.approx(0.6773, abs=1e-6)
    assert state == pytest.approx(0.19, abs=1e-6)


def test_same_as_torch_sgd() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(50))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    theta, state = parameter.detach().clone(), torch.zeros(50)
    for _ in range(6):
        values = theta + 0.1 * torch.randn(50)
        parameter.grad = parameter.detach() - values
        optimizer.step()
        theta, state = merge(theta, state, [member(values)], lr=0.7, momentum=0.9, rule=AVERAGE)
        torch.testing.assert_close(theta, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_weighted_by_tokens() -> None:
    assert one(0.0, (1.0, 100, 1), (-1.0, 300, 3), lr=1.0, momentum=0.0, rule=AVERAGE)[0] == pytest.approx(-0.5)


def test_weight_is_quantity_times_tokens_per_step() -> None:
    # Equal tokens; the second took them in half the steps, so it weighs twice as much.
    assert one(0.0, (3.0, 100, 10), (0.0, 100, 5), lr=1.0, momentum=0.0, rule=AVERAGE)[0] == pytest.approx(1.0)
    assert member([0.0], tokens=100, steps=5).weight == 2000.0


def test_only_those_present_count() -> None:
    # Four learners, two present with 10 and 30 tokens in one and three steps: weights 100 and 300.
    assert one(0.0, (1.0, 10, 1), (2.0, 30, 3), lr=1.0, momentum=0.0, rule=AVERAGE)[0] == pytest.approx(1.75)


def test_huge_and_tiny_token_counts() -> None:
    theta, _ = one(0.0, (1.0, 1, 1), (2.0, 10**12, 1), lr=1.0, momentum=0.0, rule=AVERAGE)
    assert theta == pytest.approx(2.0)
    theta, _ = one(0.0, (1.0, 10**12, 10**6), (2.0, 10**12, 10**6), lr=1.0, momentum=0.0, rule=AVERAGE)
    assert theta == pytest.approx(1.5)


@pytest.mark.parametrize("rule", RULES)
def test_one_learner_at_rate_one_is_exactly_its_weights(rule: str) -> None:
    torch.manual_seed(1)
    theta, values = torch.randn(4096) * 0.02, torch.randn(4096)
    new, _ = merge(theta, torch.zeros(4096), [member(values)], lr=1.0, momentum=0.0, rule=rule)
    assert torch.equal(new, values)


def test_buffers_are_averaged_not_stepped() -> None:
    segments = [Segment(0, 1, BUFFER), Segment(1, 1, AVERAGE)]
    state = torch.tensor([5.0, 0.0])
    inputs = [member([4.0, 4.0], name="a"), member([8.0, 8.0], name="b")]
    theta, new_state = merge(torch.tensor([2.0, 2.0]), state, inputs, lr=0.7, momentum=0.9, segments=segments)
    assert theta[0].item() == 6.0
    assert new_state[0].item() == 5.0
    assert theta[1].item() == pytest.approx(2.0 + 0.7 * 1.9 * 4.0)


def test_buffers_keep_counts_exactly() -> None:
    # A step counter far below the old value: the average must not go through a difference of large numbers.
    theta, _ = merge(torch.tensor([1e8]), torch.zeros(1), [member([3.0])], segments=[Segment(0, 1, BUFFER)])
    assert theta.item() == 3.0


@pytest.mark.parametrize("rule", [*RULES, BUFFER])
@pytest.mark.parametrize("inputs", [[], [member([float("nan")], steps=0)], [member([1.0], tokens=0)]])
def test_without_weight_nothing_changes(rule: str, inputs: list[MergeInput]) -> None:
    theta, state = merge(torch.tensor([2.0]), torch.tensor([3.0]), inputs, rule=rule)
    assert (theta.item(), state.item()) == (2.0, 3.0)


def test_zero_steps_weigh_zero_beside_others() -> None:
    theta, _ = one(0.0, (1.0, 10, 1), (100.0, 10, 0), lr=1.0, momentum=0.0)
    assert theta == pytest.approx(1.0)


# ---- RDA ---------------------------------------------------------------------------------------------


def gradient_of(theta: Tensor, inputs: Sequence[MergeInput], **how: Any) -> Tensor:
    """The combined outer gradient D, read off the momentum buffer."""
    return merge(theta, torch.zeros_like(theta), inputs, lr=0.0, momentum=0.0, **how)[1]


@settings(max_examples=examples(60))
@given(st.integers(1, 16), st.integers(0, 10**6), st.floats(-4, 4))
def test_rda_keeps_the_weighted_mean_norm(count: int, seed: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta = torch.zeros(1000)
    drifts = [torch.randn(1000, generator=generator) * 10**exponent * (i + 1) for i in range(count)]
    inputs = [member(-d, name=f"m{i}", tokens=10 + i, steps=1 + i % 3) for i, d in enumerate(drifts)]
    total = sum(m.weight for m in inputs)
    mean_norm = sum(m.weight * d.double().norm().item() for m, d in zip(inputs, drifts, strict=True)) / total
    assert gradient_of(theta, inputs, rule=RDA).double().norm().item() == pytest.approx(mean_norm, rel=1e-4)
    if count > 4:
        # The average shrinks where directions differ: that is what RDA is for.
        assert gradient_of(theta, inputs, rule=AVERAGE).double().norm().item() < 0.9 * mean_norm


def test_rda_is_the_average_for_one_learner_and_for_parallel_drifts() -> None:
    torch.manual_seed(2)
    drift = torch.randn(300)
    for factors in ([1.0], [1.0, 1.0, 1.0], [1.0, 3.0]):
        inputs = [member(-f * drift, name=f"m{i}", tokens=10 * (i + 1)) for i, f in enumerate(factors)]
        rda, average = (gradient_of(torch.zeros(300), inputs, rule=rule) for rule in (RDA, AVERAGE))
        torch.testing.assert_close(rda, average, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-18, 1e-12, 1e-6, 1e6, 1e15, 1e18])
def test_rda_is_scale_equivariant(scale: float) -> None:
    torch.manual_seed(3)
    drifts = [torch.randn(2000) for _ in range(3)]
    plain = gradient_of(torch.zeros(2000), [member(-d, name=f"m{i}") for i, d in enumerate(drifts)])
    scaled = gradient_of(torch.zeros(2000), [member(-d * scale, name=f"m{i}") for i, d in enumerate(drifts)])
    torch.testing.assert_close(scaled.double() / scale, plain.double(), rtol=1e-3, atol=1e-4)


def test_rda_is_per_tensor() -> None:
    torch.manual_seed(4)
    a, b = torch.randn(400), torch.randn(400)
    # In the first tensor the learners agree, in the second they are at right angles.
    first, second = torch.cat([a, torch.zeros(400)]), torch.cat([a, b])
    first[400:800] = torch.roll(b, 1) - b * (torch.dot(torch.roll(b, 1), b) / b.dot(b))
    inputs = [member(-first, name="x"), member(-second, name="y")]
    segments = [Segment(0, 400, RDA), Segment(400, 400, RDA)]
    per_tensor = gradient_of(torch.zeros(800), inputs, segments=segments)
    torch.testing.assert_close(per_tensor[:400], a, rtol=1e-4, atol=1e-5)
    want = (first[400:].norm() + second[400:].norm()) / 2
    assert per_tensor[400:].norm().item() == pytest.approx(want.item(), rel=1e-4)
    whole = gradient_of(torch.zeros(800), inputs, rule=RDA)
    assert not torch.allclose(whole, per_tensor, rtol=1e-2)


@pytest.mark.parametrize("residue", [0.0, 1e-9, 1e-4])
def test_rda_of_cancelling_directions_is_the_average(residue: float) -> None:
    torch.manual_seed(5)
    drift, other = torch.randn(1000), torch.randn(1000)
    inputs = [member(-drift, name="a"), member(drift - residue * other, name="b")]
    rda, average = (gradient_of(torch.zeros(1000), inputs, rule=rule) for rule in (RDA, AVERAGE))
    assert torch.equal(rda, average)
    # Unequal lengths in opposite directions: what is left of the longer one, not zero.
    inputs = [member(-3 * drift, name="a"), member(drift, name="b")]
    torch.testing.assert_close(gradient_of(torch.zeros(1000), inputs), drift, rtol=1e-4, atol=1e-5)


def test_rda_with_a_learner_that_did_not_move() -> None:
    drift = torch.randn(100)
    got = gradient_of(torch.zeros(100), [member(-drift, name="a"), member(torch.zeros(100), name="b")])
    # unit(0) = 0: the direction is the mover's, the radius is the mean of |D| and 0.
    torch.testing.assert_close(got, drift / 2, rtol=1e-5, atol=1e-6)


def test_finite_but_huge_drifts_do_not_poison_theta() -> None:
    # Squares overflow float32; a finite contribution must leave a finite Theta.
    values = torch.full((64,), 1e25)
    theta, state = merge(torch.zeros(64), torch.zeros(64), [member(values, name="a"), member(-values / 2, name="b")])
    assert torch.isfinite(theta).all()
    assert torch.isfinite(state).all()


# ---- against the reference -----------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "members": draw(st.integers(1, 5)),
        "sizes": draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)),
        "rules": [draw(st.sampled_from([AVERAGE, RDA, BUFFER])) for _ in range(5)],
        "seed": draw(st.integers(0, 2**20)),
        "lr": draw(st.sampled_from([0.1, 0.7, 1.0])),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
        "nesterov": draw(st.booleans()),
        "form": draw(st.sampled_from(["theta", "base", "drift", "bfloat16", "mixed"])),
        "block": draw(st.sampled_from([3, 16, 1 << 18])),
        "in_place": draw(st.booleans()),
    }


def make_inputs(problem: dict[str, Any], theta: Tensor, older: Tensor, generator: torch.Generator) -> list[MergeInput]:
    inputs = []
    for i in range(problem["members"]):
        form = problem["form"]
        if form == "mixed":
            form = ("theta", "base", "drift", "bfloat16")[i % 4]
        drift = 0.1 * torch.randn(theta.numel(), generator=generator)
        base = older if form in ("base", "drift") else theta
        values = drift if form == "drift" else base + drift
        inputs.append(
            MergeInput(
                learner=f"m{(i * 7) % 5}",
                values=values.bfloat16() if form == "bfloat16" else values,
                tokens=int(torch.randint(0, 100, (), generator=generator)),
                steps=int(torch.randint(0, 5, (), generator=generator)),
                base=older if form in ("base", "drift") else None,
                is_drift=form == "drift",
            )
        )
    return inputs


@settings(max_examples=examples(150))
@given(problem=problems())
def test_many_steps_against_the_reference(problem: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(problem["seed"])
    offsets = list(itertools.accumulate(problem["sizes"], initial=0))
    segments = [
        Segment(offset, size, rule)
        for offset, size, rule in zip(offsets, problem["sizes"], problem["rules"], strict=False)
    ]
    theta = torch.randn(offsets[-1], generator=generator)
    state, older = torch.zeros_like(theta), theta + 0.1
    how = {"lr": problem["lr"], "momentum": problem["momentum"], "nesterov": problem["nesterov"], "segments": segments}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "BLOCK_NUMEL", problem["block"])
        for _ in range(5):
            inputs = make_inputs(problem, theta, older, generator)
            want_theta, want_state = reference(theta, state, inputs, **how)
            before = theta.clone(), state.clone()
            kept = theta.clone()
            new_theta, new_state = merge(theta, state, inputs, in_place=problem["in_place"], **how)
            torch.testing.assert_close(new_theta.double(), want_theta, rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(new_state.double(), want_state, rtol=2e-4, atol=2e-5)
            if problem["in_place"]:
                assert new_theta is theta
                assert new_state is state
            else:
                assert torch.equal(theta, before[0])
                assert torch.equal(state, before[1])
            older, theta, state = kept, new_theta, new_state


def test_rest_outside_the_segments_is_kept() -> None:
    theta, _ = merge(torch.zeros(3), torch.zeros(3), [member([1.0, 1.0, 1.0])], segments=[Segment(1, 1, AVERAGE)])
    assert theta[0] == theta[2] == 0.0
    assert theta[1] != 0.0


def test_in_place_and_copy_agree_to_the_bit_over_blocks() -> None:
    torch.manual_seed(6)
    size = 2 * merge_module.BLOCK_NUMEL + 12345
    cut = merge_module.BLOCK_NUMEL + 7
    segments = [Segment(0, cut, RDA), Segment(cut, size - cut, AVERAGE)]
    theta, state = torch.randn(size), torch.randn(size)
    inputs = [member(theta + 0.1 * torch.randn(size), name=f"m{i}", tokens=5 + i) for i in range(3)]
    want_theta, want_state = reference(theta, state, inputs, lr=0.7, momentum=0.9, segments=segments)
    copied = merge(theta, state, inputs, segments=segments)
    torch.testing.assert_close(copied[0].double(), want_theta, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(copied[1].double(), want_state, rtol=1e-3, atol=1e-5)
    in_place = merge(theta, state, inputs, segments=segments, in_place=True)
    assert torch.equal(copied[0], in_place[0])
    assert torch.equal(copied[1], in_place[1])


@pytest.mark.parametrize("rule", RULES)
def test_all_24_orders_give_the_same_bits(rule: str) -> None:
    torch.manual_seed(7)
    theta, state = torch.randn(5000), torch.randn(5000)
    values = [theta + torch.randn(5000) / (i + 1) for i in range(4)]
    inputs = [member(v, name=f"m{i}", tokens=7 * i + 1, steps=1 + i) for i, v in enumerate(values)]
    digests = set()
    for order in itertools.permutations(inputs):
        new = merge(theta, state, list(order), rule=rule)
        digests.add(hashlib.sha256(b"".join(t.numpy().tobytes() for t in new)).hexdigest())
    assert len(digests) == 1


def test_two_contributions_of_one_learner_in_any_order() -> None:
    """`late: next` brings a late and a new contribution of the same learner into one merge."""
    torch.manual_seed(8)
    theta = torch.randn(3000)
    inputs = [
        member(torch.randn(3000), name="a", tokens=30, steps=3),
        member(torch.randn(3000), name="a", tokens=20, steps=2),
        member(torch.randn(3000), name="b", tokens=10, steps=1),
    ]
    results = [merge(theta, torch.zeros(3000), list(order))[0] for order in itertools.permutations(inputs)]
    assert all(torch.equal(results[0], r) for r in results)


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(1, 10**6), st.integers(1, 50)), min_size=1))
def test_average_lies_between_the_learners(values: list[tuple[float, int, int]]) -> None:
    theta, _ = one(0.0, *values, lr=1.0, momentum=0.0, rule=AVERAGE)
    numbers = [v for v, _, _ in values]
    slack = 1e-4 * max(1.0, *(abs(v) for v in numbers))
    assert min(numbers) - slack <= theta <= max(numbers) + slack
    assert math.isfinite(theta)


def test_arguments_are_never_read_after_in_place() -> None:
    """The base may be Theta itself: block by block nothing is read after it was written."""
    theta = torch.randn(1000)
    inputs = [MergeInput(learner="a", values=torch.randn(1000), tokens=1, steps=1, base=theta)]
    want = merge(theta.clone(), torch.zeros(1000), [member(inputs[0].values)])[0]
    got = merge(theta, torch.zeros(1000), inputs, in_place=True)[0]
    torch.testing.assert_close(got, want)
