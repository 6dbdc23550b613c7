"""`diloco simulate` as it is typed: answers, documents, refusals. Mostly in this process, through the same entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.cli.app import _run
from diloco_cli.config.compose import list_recipes
from diloco_cli.sim.results import ALGORITHMS

DILOCO = str(Path(sys.executable).parent / "diloco")
FIGURES = (
    "goodput",
    "uptime",
    "compute_utilization",
    "tokens_per_s",
    "wall_time_s",
    "bytes_per_link",
    "staleness_steps",
    "quorum_filled",
)
SHORT = ("run.steps=60", "--step-time", "1s")


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = _run(["simulate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = typed(capsys, *arguments, "--json")
    assert code == 0, err
    assert err == ""
    found = json.loads(out)
    assert found["schema_version"] == 1
    return dict(found)


# ---- documents --------------------------------------------------------------------------------------


def test_the_document_has_every_algorithm_and_figure(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--islands", "4", "--bandwidth", "3gbps", *SHORT)
    assert list(found["algorithms"]) == list(ALGORITHMS)
    for one in found["algorithms"].values():
        for figure in FIGURES:
            assert set(one[figure]) == {"mean", "low", "high"}, figure
        assert one["cost"] is None


def test_same_seed_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    def once(seed: str, hashes: str) -> bytes:
        arguments = ["--islands", "3", "--mtbi", "2min", "--repair", "10s", "--seed", seed, "--trials", "2", *SHORT]
        return subprocess.run(
            [DILOCO, "simulate", "--json", "network.jitter=5ms", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            timeout=60,
            check=True,
        ).stdout

    first = once("7", "1")
    assert first == once("7", "2")
    assert first != once("8", "1")
    assert list(tmp_path.iterdir()) == []


def test_cost_is_chip_hours_and_gigabytes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--islands", "2", "--chips", "16", "--algorithm", "decoupled", *SHORT)
    found = document(capsys, *options, "--price", "2.5", "--price-egress", "0.1")["algorithms"]["decoupled"]
    sent_gb = sum(b["up"] + b["down"] for b in found["bytes"].values()) / 1e9
    expected = 16 * found["wall_time_s"]["mean"] / 3600 * 2.5 + sent_gb * 0.1
    assert found["cost"]["mean"] == pytest.approx(expected, rel=1e-6)


def test_hours_are_what_is_simulated_and_typed_steps_win(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--hours", "0.1", "--step-time", "1s", "--algorithm", "decoupled")
    one = found["algorithms"]["decoupled"]
    assert one["wall_time_s"]["mean"] == pytest.approx(360)
    assert one["status"] == {"stopped": 1}
    typed_steps = document(capsys, "--hours", "0.1", *SHORT, "--algorithm", "decoupled")
    assert typed_steps["algorithms"]["decoupled"]["status"] == {"completed": 1}


def test_explicit_overrides_win_over_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--islands", "4", "--bandwidth", "3gbps", *SHORT, "--algorithm", "decoupled")
    found = document(capsys, *options, "islands.count=2", "network.up.bandwidth=1gbps")["scenario"]
    assert found["islands"] == 2
    assert found["up_bps"] == [1e9, 1e9]
    assert found["down_bps"] == [3e9, 3e9]


@pytest.mark.parametrize("recipe", [r.name for r in list_recipes() if r.name != "your-own-text"])
def test_every_recipe_can_be_simulated_as_it_stands(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, f"conf={recipe}", *SHORT, "--algorithm", "decoupled,streaming")
    assert list(found["algorithms"]) == ["streaming", "decoupled"]
    for one in found["algorithms"].values():
        assert set(one["status"]) == {"completed"}
        assert 0 < one["goodput"]["mean"] <= 1


def test_ones_own_model_has_the_size_that_it_is_built_with(capsys: pytest.CaptureFixture[str]) -> None:
    from diloco_cli.config.compose import compose
    from diloco_cli.train.model import count_parameters

    found = document(capsys, "conf=bring-your-own-model", *SHORT, "--algorithm", "decoupled")
    cfg = compose([], "bring-your-own-model")
    assert found["scenario"]["parameters"] == count_parameters(cfg.model, 256)


def test_text_in_a_pipe_says_what_was_assumed_and_has_no_escapes(tmp_path: Path) -> None:
    done = subprocess.run(
        [DILOCO, "simulate", "--islands", "2", "run.steps=60"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "\x1b" not in done.stdout
    assert "no --step-time or --chip was given: 50ms a step" in done.stdout
    for label in ("tokens/s", "goodput", "utilization", "bytes per link", "quorum filled"):
        rows = [line for line in done.stdout.splitlines() if line.startswith(label)]
        assert len(rows) == 1, label
    assert "\ncost" not in done.stdout


# ---- failures ---------------------------------------------------------------------------------------


def test_many_chips_lose_what_the_failure_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Links that cost nothing leave the chips' failures alone: the cells of the paper's table, here at 600k chips."""
    options = ("--islands", "8", "--chips", "600k", "--mtbi", "365d", "--hours", "24", "--step-time", "30s")
    links = ("--bandwidth", "unlimited", "--latency", "0s", "run.finish_wait=0s")
    names = "data_parallel,data_parallel_elastic,decoupled"
    found = document(capsys, *options, *links, "--algorithm", names)["algorithms"]
    got = {name: found[name]["goodput"]["mean"] for name in found}
    assert got["data_parallel"] == pytest.approx(0.40, abs=0.02)
    assert got["data_parallel_elastic"] == pytest.approx(0.69, abs=0.03)
    assert got["decoupled"] == pytest.approx(0.94, abs=0.02)
    assert found["decoupled"]["goodput"]["low"] < found["decoupled"]["goodput"]["high"]


def test_failures_of_the_configuration_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    events = "failures.events=[{at: 20s, kind: crash, island: island-1}]"
    never = events.replace("island: island-1", "island: island-1, duration: 10h")
    calm = document(capsys, "--islands", "2", *SHORT, "--algorithm", "decoupled")["algorithms"]["decoupled"]
    gone = document(capsys, "--islands", "2", *SHORT, "--algorithm", "decoupled", never)["algorithms"]["decoupled"]
    back = document(capsys, "--islands", "2", *SHORT, "--algorithm", "decoupled", events, "--repair", "10s")
    back = back["algorithms"]["decoupled"]
    assert gone["tokens"]["processed"] < back["tokens"]["processed"] < calm["tokens"]["processed"]
    # One of two islands is away from second 20 of 60: a third of the work.
    assert gone["tokens"]["processed"] / calm["tokens"]["processed"] == pytest.approx(2 / 3, abs=0.02)


# ---- what is needed, and the papers -----------------------------------------------------------------


def test_solve_finds_a_bandwidth_that_is_enough_and_half_of_it_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--islands", "2", "--model", "100m", "--latency", "0s", "--algorithm", "data_parallel", *SHORT)
    found = document(capsys, *base, "--solve", "bandwidth", "--utilization", "80%")
    # Two islands send the gradients once (two rounds of a half): 16 bits x 1e8 over b in a quarter of a second.
    assert found["answer"] == pytest.approx(1.6e9 / 0.25, rel=0.01)
    code, out, _ = typed(capsys, *base, "--solve", "bandwidth", "--utilization", "80%")
    assert code == 0
    assert out.startswith(found["answer_text"])
    assert out.count("<- answer") == 1


def test_decoupled_learners_need_links_that_fill_quorums(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--islands", "2", "--model", "1b", "--latency", "0s", "--step-time", "1s", "run.steps=200")
    found = document(capsys, *base, "--solve", "bandwidth", "--utilization", "0.95")
    # A fragment of a quarter of 16e9 bits goes up and down within tau = 8 steps of a second, more or less.
    assert found["answer"] == pytest.approx(2 * 4e9 / 8, rel=0.75)
    assert found["algorithm"] == "decoupled"


def test_inner_steps_have_a_target_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--islands", "2", "--solve", "inner-steps", "--bandwidth", "1gbps", *SHORT)
    assert found["target"] == 0.95
    assert "no target was given" in found["scenario"]["assumptions"][0]


def test_reproduce_prints_paper_ours_and_difference(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--reproduce", "scavenging")
    known = [abs(c["ours"] - c["paper"]) for c in found["cells"] if c["paper"] is not None]
    assert found["max_difference"] == pytest.approx(max(known), abs=1e-5)
    assert found["mean_difference"] == pytest.approx(sum(known) / len(known), abs=1e-5)
    code, out, _ = typed(capsys, "--reproduce", "scavenging")
    assert code == 0
    assert out.splitlines()[0].split() == ["scavenging", "paper", "ours", "difference"]
    assert len(out.splitlines()) == 1 + len(found["cells"]) + 2
    assert "largest" in out.splitlines()[-1]


# ---- nonsense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--islands 2 sync.quorum=4", "sync.quorum"),
        ("--islands 0", "1 to 1024"),
        ("--islands two", "not a whole number"),
        ("--bandwidth 0bps --algorithm data_parallel", "above zero"),
        ("--bandwidth 3gbs", "3gbps"),
        ("--latency 40", "40ms"),
        ("--step-time 0s", "above zero"),
        ("--step-time 5", "5ms"),
        ("--chip h1000", "h100"),
        ("--chip h100 --mfu 2", "--mfu"),
        ("--chip h100 --mfu 40", "40%"),
        ("--mfu 0.4", "--chip"),
        ("--chip h100 --step-time 1s", "exclude each other"),
        ("--model huge", "neither a preset"),
        ("--model 12q", "--model"),
        ("--hours -1", "above 0"),
        ("--hours 0", "above 0"),
        ("--hours nan", "above 0"),
        ("--hours 1000 --step-time 1us", "--hours"),
        ("--hours 1 --tokens 1m", "exclude each other"),
        ("--tokens lots", "--tokens"),
        ("--islands 4 --chips 3", "3 for 4 islands"),
        ("--chips 1t", "--chips"),
        ("--mtbi 0s", "above zero"),
        ("--repair 10s", "--mtbi"),
        ("--price -1", "--price"),
        ("--price-egress much", "not a number"),
        ("--seed -1", "--seed"),
        ("--trials 0", "--trials"),
        ("--trials 1.5", "--trials"),
        ("--algorithm fedavg", "decoupled"),
        ("--algorithm decoupled,", "--algorithm"),
        ("algorithm=data_parallel", "--algorithm data_parallel"),
        ("--solve bandwidth", "--utilization"),
        ("--solve speed --goodput 0.9", "learners"),
        ("--solve bandwidth --goodput 1.5", "--goodput"),
        ("--solve bandwidth --goodput 0.9 --uptime 0.9", "one at a time"),
        ("--goodput 0.9", "--solve"),
        ("--solve bandwidth --utilization 0.9 --algorithm diloco,decoupled", "one algorithm"),
        ("--solve bandwidth --tokens-per-s 1t --step-time 1s run.steps=50", "the best is"),
        ("--solve bandwidth --utilization 0.9 --learn", "exclude each other"),
        ("--reproduce everything", "goodput"),
        ("--reproduce goodput --islands 4", "--islands"),
        ("--plot timeline.pdf", ".png"),
        ("--plot nowhere/timeline.png", "cannot be written"),
        ("no-such-run", "no-such-run"),
        ("run-a run-b", "one run at a time"),
        ("some-run --islands 4", "--islands"),
        ("conf=first-rn", "first-run"),
        ("model=custom model.entry_point=no_such_module:build", "--model COUNT"),
        ("failures.events=[{at:5s,kind:meteor,island:island-0}]", "meteor"),
        ("failures.events=[{at:5s,kind:crash,island:island-9}]", "island-9"),
        ("failures.random.weather=bad", "weather"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_nonsense_gets_one_sentence_and_exit_code_2(
    arguments: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = typed(capsys, *arguments.split(" "))
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert says in err
    assert "Traceback" not in err
    assert "internal error" not in err
    assert len(err.splitlines()) <= 4
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_in_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = typed(capsys, "--trials", "0", "--json")
    assert code == 2
    assert json.loads(out)["error"]["exit_code"] == 2


# ---- help -------------------------------------------------------------------------------------------


def test_help_has_groups_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = typed(capsys, "--help")
    assert code == 0
    headings = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "What runs:",
        "Chips and step time:",
        "Failures:",
        "How long, and chance:",
        "What is answered:",
        "Output:",
    ]
    assert "diloco simulate --islands 4 --bandwidth 3gbps" in out
