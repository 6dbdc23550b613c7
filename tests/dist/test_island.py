"""Two real ranks: an island computes what one process would, and fragments go out and in on all ranks alike."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import rank_bodies as bodies


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("accumulate", "experts"), [(1, 0), (2, 0), (1, 3)])
def test_a_step_of_two_ranks_equals_one_process(run_ranks, parallel, accumulate, experts):
    reports = run_ranks(bodies.compare_with_reference, 2, parallel, accumulate, experts)
    for report in reports:
        assert report["moved"] > 1e-3  # the comparison is about something
        assert report["clipped"]
        assert report["error"] < 1e-9
        assert report["loss_error"] < 1e-9
        assert report["norm_error"] < 1e-9
        assert report["tokens"] == [2 + 5 + 8 + 11] * bodies.STEPS  # padding left out, every rank counted once


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_muon_with_experts_on_two_ranks(run_ranks, parallel):
    first, second = run_ranks(bodies.muon_and_experts, 2, parallel)
    assert first["losses"] == second["losses"]
    assert first["sums"] == second["sums"]
    assert first["losses"][0] != first["losses"][1]
    # Muon iterates in bfloat16, which other shapes of the same sum round differently: same update, not the same bits.
    assert first["direction"] > 0.9
    assert first["size"] == pytest.approx(1.0, abs=0.1)


def test_torchrun_starts_an_island():
    """The environment that torchrun sets is all that an island needs."""
    body = Path(__file__).with_name("torchrun_body.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0/2:[7,11]:1", "1/2:[7,11]:1"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_fragments_go_out_and_in(run_ranks, parallel):
    reports = run_ranks(bodies.fragment_round_trip, 2, parallel)
    main, other = reports
    assert main["row_cuts"] > 0
    assert main["exact"]
    assert other["others_none"]
    assert main["trained"]
    assert len(main["alpha_errors"]) == 3
    assert max(main["alpha_errors"]) < 1e-6
    assert main["alpha_errors"][0] == 0.0
    assert main["sums"] == other["sums"]
    assert main["buffers"] == other["buffers"]
    assert main["restored"]
    assert other["restored"]
    assert main["dtypes"] == {"running": "torch.float32", "seen": "torch.int64", "flags": "torch.bool"}
    assert main["loss_after"] == other["loss_after"]
    _, history = bodies.reference(bodies.config())
    assert main["loss_after"] == pytest.approx(history[0][0], abs=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_validation_is_shared_out_and_an_install_after_it_counts(run_ranks, parallel):
    for report in run_ranks(bodies.evaluate_then_install, 2, parallel):
        assert report["first"].loss == pytest.approx(report["wanted"], abs=1e-5)
        assert report["first"].tokens == 99
        assert report["second"].loss == pytest.approx(math.log(bodies.VOCAB), abs=1e-6)  # all weights zero
        assert report["training"]


def test_plans_flags_and_counts(run_ranks):
    for equal, flags, sums in run_ranks(bodies.plans, 2):
        assert equal
        assert flags == [False, True]
        assert sums == (2 * 10**12 + 1, 1.0)


def test_a_rank_that_ends_is_noticed_at_once(run_ranks):
    assert run_ranks(bodies.one_rank_dies, 2)[0] < 10


def test_a_rank_that_hangs_is_noticed_after_the_timeout(run_ranks):
    assert 0.5 < run_ranks(bodies.one_rank_hangs, 2, 1.0)[0] < 15
