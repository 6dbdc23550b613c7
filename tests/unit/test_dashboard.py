"""The screen: folding records, drawing inside the window, drivers that leave terminal and run alone."""

import io
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from diloco_cli.config.schema import Config
from diloco_cli.observe import dashboard, figures, view
from diloco_cli.observe.chart import chart
from diloco_cli.observe.dashboard import LiveScreen, PlainLines, Quiet, RunView, make_display, render, render_summary

SIZES = [(80, 24), (120, 40), (200, 60), (60, 15), (140, 50), (44, 10), (43, 9), (20, 5), (1, 1), (300, 12), (50, 100)]


def tape(num_islands: int = 4, until_s: float = 40.0) -> list[dict[str, Any]]:
    """A run as it is recorded: start, joins, steps at 10/s (island-1 at 5/s), 2 merges/s, one crash at 20 s."""
    names = [f"island-{i}" for i in range(num_islands)]
    records: list[dict[str, Any]] = [
        {"time": 0.0, "event": "run_started", "islands": names, "target_steps": 1000, "fragments": 4}
    ]
    records += [{"time": 5.0, "event": "join", "learner": name, "step": 0} for name in names]
    for tick in range(1, int((until_s - 5) * 2) + 1):
        now = 5 + tick / 2
        crashed = {name for i, name in enumerate(names) if i % 4 == 2 and now >= 20}
        if now == 20:
            records += [
                {"time": now, "event": "leave", "learner": name, "reason": "exit code 137 (killed)"} for name in crashed
            ]
        for i, name in enumerate(names):
            if name in crashed:
                continue
            speed = 0.5 if i == 1 else 1.0
            records.append(
                {
                    "time": now,
                    "source": name,
                    "step": int(5 * tick * speed),
                    "loss": 2.0 + 3.0 * math.exp(-tick / 10) + 0.1 * i,
                    "tokens_per_s": 10_000 * speed,
                    "step_time_s": 0.1 / speed,
                    "link_up_bps": 1.5e9,
                    "link_down_bps": 2.5e8,
                    "staleness_steps": i,
                    "tokens": int(5_000 * tick * speed),
                    "state": "training",
                }
            )
        records.append(
            {
                "time": now,
                "event": "merge",
                "fragment": tick % 4,
                "version": tick // 4,
                "learners": [name for name in names if name not in crashed],
                "quorum_time_s": 0.03,
                "grace_time_s": 0.1,
                "merge_time_s": 0.002,
                "reason": "all live learners are in",
            }
        )
    return records


def folded(num_islands: int = 4, until_s: float = 40.0) -> RunView:
    names = [f"island-{i}" for i in range(num_islands)]
    made = RunView(name="first-run", algorithm="decoupled", link_bps=dict.fromkeys(names, (3000000000.0, 3000000000.0)))
    made.apply_all(tape(num_islands, until_s))
    assert made.bad_records == 0
    return made


# ---- folding ----


def test_the_end_of_a_run_keeps_its_quorum_and_shows_no_raw_record() -> None:
    made = folded()
    made.apply({"time": 41.0, "event": "finish", "status": "stopped", "reason": "stopped by SIGINT"})
    for i in (0, 1, 3):
        made.apply({"time": 41.5, "event": "leave", "learner": f"island-{i}", "reason": "stopped by SIGINT"})
    made.apply({"time": 42.0, "event": "result", "status": "stopped", "train_loss": 2.5})
    snapshot = made.snapshot(42.0)
    assert snapshot.live == 3
    assert not [line for line in snapshot.log if "train_loss" in line.text]


def test_the_tape_folds_to_what_was_recorded() -> None:
    snapshot = folded().snapshot(41.0)
    assert snapshot.counts() == {"training": 3, "gone": 1}
    assert snapshot.live == 3
    assert (snapshot.step, snapshot.target_steps, snapshot.progress) == (350, 1000, 0.35)
    assert snapshot.tokens_per_s == 25_000
    assert snapshot.tokens == 350_000 + 175_000 + 29 * 5_000 + 350_000
    by_name = {island.name: island for island in snapshot.islands}
    first, slow, gone = by_name["island-0"], by_name["island-1"], by_name["island-2"]
    assert (first.step, first.staleness_steps, first.link_up_bps, first.link_up_max_bps) == (350, 0, 1.5e9, 3e9)
    assert (first.last_merge_age_s, first.last_merge_fragment) == (1.0, 70 % 4)
    assert (slow.step, slow.step_time_s, slow.staleness_steps) == (175, 0.2, 1)
    assert (gone.state, gone.reason, gone.since_s, gone.tokens_per_s) == ("gone", "exit code 137 (killed)", 20.0, None)
    assert gone.last_merge_age_s == 41.0 - 19.5
    assert (snapshot.syncer.merges, snapshot.syncer.versions) == (70, (17, 17, 17, 16))
    assert snapshot.syncer.merges_per_s == pytest.approx(2.0)
    assert snapshot.syncer.last_learners == 3


def test_eta_is_the_time_that_is_left_at_the_speed_after_the_warm_up() -> None:
    made = RunView(target_steps=1000)
    # 100 s of warm-up for the first step would make a naive estimate absurd.
    made.apply({"time": 100.0, "source": "island-0", "step": 1})
    assert made.snapshot(100.0).eta_s is None
    for tick in range(1, 101):
        made.apply({"time": 100.0 + tick / 2, "source": "island-0", "step": 1 + 5 * tick})
    eta = made.snapshot(150.0).eta_s
    assert eta == pytest.approx((1000 - 501) / 10, rel=0.01)
    assert made.snapshot(151.0).eta_s == pytest.approx(eta - 1.0)
    stalled = [made.snapshot(150.0 + wait).eta_s or 0.0 for wait in (10, 30, 60)]
    assert stalled == sorted(stalled)  # a stall never brings the end nearer
    assert stalled[0] > eta - 2.01
    made.apply({"time": 160.0, "event": "finish", "status": "completed", "reason": "target reached"})
    done = made.snapshot(160.0)
    assert (done.eta_s, done.progress, done.status) == (None, 1.0, "completed")


def test_eta_follows_a_resumed_run_and_a_change_of_speed() -> None:
    made = RunView(target_steps=2000)
    for tick in range(600):
        made.apply(
            {"time": float(tick), "source": "a", "step": 1000 + (tick if tick < 300 else 300 + 2 * (tick - 300))}
        )
    assert made.snapshot(599.0).eta_s == pytest.approx((2000 - 1898) / 2, rel=0.05)


def test_quorum_words_when_too_few_are_left() -> None:
    made = RunView(islands=["a", "b", "c"], quorum=2)
    for name in "abc":
        made.apply({"time": 1.0, "event": "join", "learner": name})
    assert not made.snapshot(1.0).quorum_lost  # nobody is gone
    made.apply({"time": 2.0, "event": "leave", "learner": "a", "reason": "x"})
    assert not made.snapshot(2.0).quorum_lost
    made.apply({"time": 3.0, "event": "leave", "learner": "b", "reason": "x"})
    snapshot = made.snapshot(3.0)
    assert snapshot.quorum_lost
    assert "waiting for quorum 1/2" in render(snapshot, 80, 24).plain
    assert "waiting_for_quorum=1/2" in dashboard_plain(made, 4.0)
    made.apply({"time": 5.0, "event": "join", "learner": "a"})
    assert not made.snapshot(5.0).quorum_lost
    assert made.snapshot(5.0).log[-1].text == "quorum is back: 2/2"


def dashboard_plain(made: RunView, now_s: float) -> str:
    out = io.StringIO()
    display = PlainLines(out, interval_s=0.0)
    display.start(made)
    display.update(made, now_s)
    return out.getvalue()


def test_a_report_under_way_does_not_bring_back_a_gone_island_but_a_join_does() -> None:
    made = RunView()
    made.apply({"time": 1.0, "event": "join", "learner": "a"})
    made.apply({"time": 2.0, "event": "leave", "learner": "a", "reason": "cut link"})
    made.apply({"time": 2.1, "source": "a", "step": 5, "state": "training"})
    assert made.snapshot(3.0).islands[0].state == "gone"
    made.apply({"time": 3.0, "event": "join", "learner": "a", "step": 5})
    assert made.snapshot(3.0).islands[0].state == "training"
    assert "a is back at step 5" in [line.text for line in made.snapshot(3.0).log]
    made.apply({"time": 4.0, "event": "leave", "learner": "a", "reason": "the run has reached its target"})
    assert made.snapshot(4.0).islands[0].state == "finished"
    made.apply({"time": 5.0, "event": "join", "learner": "a"})
    made.apply({"time": 6.0, "event": "leave", "learner": "a", "reason": "incomplete frame, undone"})
    assert made.snapshot(6.0).islands[0].state == "gone"


def test_an_island_that_says_nothing_is_shown_as_silent() -> None:
    made = RunView()
    made.apply({"time": 1.0, "event": "join", "learner": "a"})
    assert made.snapshot(2.0).islands[0].silent_s is None
    assert made.snapshot(13.0).islands[0].silent_s == 12.0
    assert "no report for 12s" in render(made.snapshot(13.0), 80, 24).plain


def test_merges_are_one_line_that_counts_and_late_ones_too() -> None:
    made = RunView()
    for index in range(50):
        made.apply({"time": float(index), "event": "merge", "fragment": index % 3, "version": index, "learners": ["a"]})
        made.apply({"time": float(index), "event": "late", "learner": "b", "fragment": 1})
    log = made.snapshot(50.0).log
    assert [(line.event, line.count) for line in log] == [("merge", 50), ("late", 50)]
    assert made.snapshot(50.0).syncer.late == 50
    made.apply({"time": 51.0, "event": "late", "learner": "b", "fragment": 1, "kept": True})
    assert made.snapshot(51.0).log[-1].text == "b, fragment 1: its merge was already done, kept for the next round"


def test_a_long_run_keeps_its_curve_in_bounded_memory_and_in_shape() -> None:
    made = RunView()
    for step in range(1, 20_001):
        made.apply({"time": step / 10, "source": "a", "step": step, "loss": 10.0 - step / 4000})
        made.apply({"time": step / 10, "event": "warning", "message": f"w{step}"})
    snapshot = made.snapshot(2000.0)
    history = snapshot.islands[0].history
    assert view.HISTORY_POINTS_MAX / 2 <= len(history) <= view.HISTORY_POINTS_MAX + 1
    assert all(y == pytest.approx(10.0 - x / 4000) for x, y in history)
    assert history[-1][0] > 19_900
    assert len(snapshot.log) == view.LOG_LINES_MAX


def test_from_config_knows_islands_links_and_target() -> None:
    cfg = Config()
    cfg.islands.count = 12
    cfg.network.up.bandwidth = "1gbps"
    snapshot = RunView.from_config(cfg, "x").snapshot(0.0)
    assert [island.name for island in snapshot.islands][:3] == ["island-0", "island-1", "island-2"]
    assert (snapshot.islands[0].link_up_max_bps, snapshot.islands[0].link_down_max_bps) == (1e9, 3e9)
    assert snapshot.target_steps == cfg.target_steps()
    assert snapshot.counts() == {"starting": 12}


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
EVENTS = ["run_started", "join", "leave", "merge", "install", "late", "refused", "evaluation", "warning", "error",
          "finish", "quorum", "odd", "__init__"]  # fmt: skip
KEYS = ["time", "learner", "learners", "islands", "reason", "step", "loss", "fragment", "version", "tokens", "message",
        "status", "target_steps", "fragments", "state", "link_up_bps", "staleness_steps", "phase_x_s",
        "tokens_per_s", "merges", "merges_per_s", "goodput", "bigram", "quorum_time_s"]  # fmt: skip
junk_record = st.builds(
    lambda head, body: {**body, **head},
    st.sampled_from(EVENTS).map(lambda e: {"event": e})
    | st.sampled_from(["syncer", "a", "b"]).map(lambda s: {"source": s}),
    st.dictionaries(st.sampled_from(KEYS), junk, max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(records=st.lists(junk_record, max_size=25), width=st.integers(1, 210), height=st.integers(1, 70))
def test_no_record_whatever_it_holds_breaks_fold_or_frame(
    records: list[dict[str, Any]], width: int, height: int
) -> None:
    made = RunView(target_steps=100)
    made.apply_all(records)
    assert_fits(made, width, height, 50.0)
    assert "\x1b" not in dashboard_plain(made, 60.0)


# ---- drawing ----


def assert_fits(made: RunView, width: int, height: int, now_s: float) -> str:
    """The frame as a console writes it: exactly height lines of exactly width cells, no stray control codes."""
    frame = render(made.snapshot(now_s), width, height)
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=height, force_terminal=False, color_system=None, legacy_windows=False
    )
    console.print(frame, end="")
    lines = out.getvalue().split("\n")
    assert len(lines) == height
    assert [cell_len(line) for line in lines] == [width] * height
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())
    return out.getvalue()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("num_islands", [0, 1, 4, 8, 40])
def test_every_size_is_filled_exactly(width: int, height: int, num_islands: int) -> None:
    assert_fits(folded(num_islands), width, height, 41.0)


names = st.text(min_size=1, max_size=30) | st.sampled_from(
    ["[red]x[/]", "[/]", "日本語の島", "é́́́", "👩‍👩‍👧‍👦 island", "\x1b[2J\x1b]0;own\x07", "a\nb\r\tc", "‮evil", "x" * 500]
)


@settings(max_examples=120, deadline=None)
@given(
    width=st.integers(1, 220),
    height=st.integers(1, 80),
    islands=st.lists(names, max_size=45),
    reason=names,
    title=names,
)
def test_strange_text_never_leaves_the_window(
    width: int, height: int, islands: list[str], reason: str, title: str
) -> None:
    made = RunView(name=title, algorithm=title, target_steps=10)
    for index, island in enumerate(islands):
        made.apply({"time": 1.0, "event": "join", "learner": island})
        made.apply(
            {"time": 2.0, "source": island, "step": index, "loss": float(index), "state": "waiting", "reason": reason}
        )
        if index % 3 == 0:
            made.apply({"time": 3.0, "event": "leave", "learner": island, "reason": reason})
    made.apply({"time": 3.0, "event": "warning", "message": reason})
    made.apply({"time": 3.0, "event": reason, "key": title})
    assert_fits(made, width, height, 4.0)


def test_markup_in_names_and_reasons_is_shown_as_text() -> None:
    made = RunView(name="[bold]run[/]")
    made.apply({"time": 1.0, "event": "join", "learner": "[red]x[/]"})
    made.apply({"time": 2.0, "event": "leave", "learner": "[red]x[/]", "reason": "[blink]no[/blink] \x1b[31mred"})
    text = assert_fits(made, 100, 24, 3.0)
    assert "[red]x[/]" in text
    assert "[blink]no[/blink] [31mred" in text
    assert "[bold]run[/]" in text


def test_what_the_screen_must_show_is_there_at_80x24() -> None:
    made = folded()
    made.apply({"time": 40.0, "source": "syncer", "step": 350, "goodput": 0.961, "uptime": 1.0, "merges_per_s": 2.0})
    made.apply({"time": 40.0, "event": "evaluation", "learner": "island-0", "step": 350, "loss": 2.25, "bigram": 2.48})
    text = assert_fits(made, 80, 24, 41.0)
    for expected in (
        "35%", "step 350/1000", "25.0k tok/s", "ETA 1:0", "goodput 96.1%", "uptime 100.0%", "0:41 elapsed",
        "validation 2.250 (bigram 2.480)", "● training", "✗ gone", "exit code 137 (killed), 21s ago", "1.50G/3G",
        "250M/3G", "70 (2/s)", "30 ms", "100 ms, merge 2 ms",
        "island-2 is gone: exit code 137", "◆ validation",
    ):  # fmt: skip
        assert expected in text, expected


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (120, 24), (40, 8)])
def test_forty_islands_in_a_low_window_show_those_in_trouble_first(width: int, height: int) -> None:
    made = folded(40)
    made.apply({"time": 40.0, "source": "island-39", "step": 1, "state": "waiting", "reason": "max drift"})
    text = assert_fits(made, width, height, 41.0)
    rows = [line for line in text.split("\n") if re.search(r"island-\d+ +[●◐○✗✓]", line)]
    shown = [re.search(r"[●◐○✗✓] (\w+)", row)[1] for row in rows]  # type: ignore[index]
    order = ["gone"] * 10 + ["waiting"] + ["training"] * 29
    assert shown == order[: len(shown)]
    hidden = re.search(r"… and (\d+) more", text)
    assert hidden is not None
    assert int(hidden[1]) + len(shown) == 40
    if (width, height) == (80, 24):
        assert len(shown) == 11
        assert "… and 29 more training" in text


def test_without_colour_states_are_words() -> None:
    text = assert_fits(folded(), 80, 24, 41.0)
    assert "training" in text
    assert "gone" in text


def test_a_terminal_without_utf8_gets_ascii_of_the_same_size() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    made = folded()
    made.apply({"time": 40.0, "event": "join", "learner": "日本語"})
    Console(file=stream, width=80, height=24).print(render(made.snapshot(41.0), 80, 24), end="")
    stream.flush()
    lines = raw.getvalue().decode("ascii").split("\n")
    assert [len(line) for line in lines] == [80] * 24


def test_the_curve_falls_from_top_left_to_bottom_right() -> None:
    curve = [(float(x), 4.0 - x / 50) for x in range(101)]
    lines = ["".join(text for text, _ in line) for line in chart([curve], [], 60, 14)]
    assert len(lines) == 14
    assert lines[0].startswith("  3.9") or lines[0].startswith("   3.9")
    assert lines[11].strip().startswith("2.0")
    filled = [[i for i, c in enumerate(line) if 0x2800 < ord(c) < 0x2900] for line in lines[:12]]
    centres = [sum(columns) / len(columns) for columns in filled]
    assert centres == sorted(centres)
    assert centres[0] < 14
    assert centres[-1] > 50


def test_the_mean_of_two_curves_lies_between_them_and_marks_are_on_top() -> None:
    flat = [[(float(x), y) for x in range(101)] for y in (1.0, 3.0)]
    lines = chart(flat, [(50.0, 2.0)], 60, 14)
    mean_rows = {row for row, line in enumerate(lines) for _, style in line if style == "bold cyan"}
    assert len(mean_rows) == 1
    assert mean_rows.pop() in (5, 6)
    mark_rows = [row for row, line in enumerate(lines) for text, _ in line if text == "◆"]
    assert mark_rows in ([5], [6])


@settings(max_examples=80, deadline=None)
@given(
    curves=st.lists(
        st.lists(st.tuples(st.integers(0, 10**9).map(float), st.floats(-1e12, 1e12)), max_size=30), max_size=4
    ),
    width=st.integers(0, 90),
    height=st.integers(0, 40),
)
def test_any_curve_can_be_drawn(curves: list[list[tuple[float, float]]], width: int, height: int) -> None:
    lines = chart([sorted(curve) for curve in curves], curves[0] if curves else [], width, height)
    assert len(lines) <= max(height, 1)
    if height >= 4 and width >= 16 and any(curves):
        assert {sum(cell_len(text) for text, _ in line) for line in lines} <= {width}


def test_figures() -> None:
    assert [figures.count(v) for v in (None, 0, 7, 999, 1234, 12_345, 999_600, 1.5e9)] == [
        "–", "0", "7", "999", "1.23k", "12.3k", "1.00M", "1.50G",
    ]  # fmt: skip
    assert [figures.clock(v) for v in (None, 0, 75, 3675, 200_000, math.inf)] == [
        "–",
        "0:00",
        "1:15",
        "1:01:15",
        "2d 7h",
        "–",
    ]
    assert [figures.span(v) for v in (0, 0.00034, 0.012, 1.234, 200)] == ["0 ms", "340 us", "12 ms", "1.23 s", "3:20"]
    assert figures.rate(1.23e9, 3e9) == "1.23G/3G"
    assert figures.rate(5e6, math.inf) == "5.00M/∞"
    assert figures.rate(5e6, 2.5e8) == "5.00M/250M"


@given(st.floats(0, 1e17))
def test_counts_stay_short(value: float) -> None:
    assert len(figures.count(value)) <= 6


# ---- summary ----

SUMMARY: dict[str, Any] = {
    "schema_version": 1,
    "status": "completed",
    "error": None,
    "algorithm": "decoupled",
    "learners": 2,
    "steps": {"island-0": 1000, "island-1": 900},
    "merges": 321,
    "tokens": {"processed": 1000, "merged": 900, "late": 50, "refused": 0, "lost": 0, "pending": 50},
    "loss": {"train": 2.0, "validation": 2.1, "bigram": 2.5},
    "goodput": 0.95,
    "uptime": 1.0,
    "compute_utilization": None,
    "wall_time_s": 125.0,
    "tokens_per_s": 12_345.0,
    "bytes": {"island-0": {"up": 1_500_000, "down": 2_000_000}, "island-1": {"up": 1, "down": None}},
    "faults": {"crash": 1},
    "restarts": 0,
    "run_dir": "runs/my run-1",
}


def test_summary_says_everything_in_words() -> None:
    text = render_summary(SUMMARY).plain
    for expected in (
        "decoupled, 2 learners, 900 to 1000 steps, 321 merges",
        "2.100 nats/token: 0.400 (16%) better than a bigram model on the same text (2.500)",
        "1.00k processed: 900 merged (90.0%), 50 late (5.0%), 50 pending (5.0%)",
        "95.0%, uptime 100.0%, compute utilization not measured",
        "2:05, 12.3k tokens/s",
        "island-0: 1.50MB up, 2.00MB down",
        "1 crash",
        "diloco generate 'runs/my run-1' --prompt",
        "diloco evaluate 'runs/my run-1'",
    ):
        assert expected in text, expected
    assert "unaccounted" not in text
    worse = render_summary({**SUMMARY, "loss": {"validation": 3.0, "bigram": 2.5}}).plain
    assert "0.500 (20%) worse than a bigram model" in worse
    torn = render_summary({**SUMMARY, "tokens": {**SUMMARY["tokens"], "late": 40}}).plain
    assert "+10 unaccounted for" in torn


def test_summary_of_a_failed_run_and_of_junk() -> None:
    text = render_summary({"status": "failed", "error": "island-0: out of memory [red]", "run_dir": "runs/x"}).plain
    assert "island-0: out of memory [red]" in text
    assert "not measured" in text
    assert "generate" not in text
    assert "logs" in text
    assert render_summary({"status": "stopped", "run_dir": "r"}, ["diloco resume r"]).plain.endswith("diloco resume r")
    render_summary(dict.fromkeys(SUMMARY, "junk"))
    render_summary({key: {"up": 1, "x": "y"} for key in SUMMARY})
    render_summary({})


# ---- drivers ----


def test_plain_lines_hold_no_codes_and_one_line_per_event() -> None:
    out = io.StringIO()
    display = make_display(stream=out)
    assert isinstance(display, PlainLines)
    made = RunView(target_steps=1000)
    display.start(made)
    records = tape()
    now = 0.0
    for record in records:
        made.apply(record)
        if record["time"] >= now + 0.25:
            now = record["time"]
            display.update(made, now)
    display.message("two\nlines \x1b[31m")
    display.stop()
    display.stop()
    text = out.getvalue()
    assert re.fullmatch(r"( *\d+\.\ds  [^\x00-\x1f\x7f]*\n)+", text)
    assert text.count("join: ") == 4
    assert text.count("leave: island-2 is gone: exit code 137 (killed)") == 1
    assert "merge:" not in text  # seventy of them: the progress lines count them
    progress = [line for line in text.splitlines() if "progress " in line]
    assert 7 <= len(progress) <= 10
    assert "step=350/1000 percent=35 training=3 gone=1 loss=" in progress[-1]
    assert "merges=70" in progress[-1]
    assert "eta=" in progress[-1]


def test_repeated_warnings_come_once_per_interval_with_their_count() -> None:
    out = io.StringIO()
    made = RunView()
    display = PlainLines(out, interval_s=100.0)
    display.start(made)
    for index in range(30):
        made.apply({"time": float(index), "event": "warning", "message": "disk is full"})
        display.update(made, float(index))
    display.stop()
    lines = [line for line in out.getvalue().splitlines() if "disk is full" in line]
    assert len(lines) == 3  # the first; what had come by the first progress line; the rest at the end
    assert lines[-1].endswith("(x30)")


def test_plain_lines_survive_a_closed_pipe_and_a_narrow_encoding() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1)
    display = make_display(stream=stream)
    display.start(folded())
    display.update(folded(), 41.0)
    display.stop()
    with pytest.raises(BrokenPipeError):
        stream.close()
    raw = io.BytesIO()
    ascii_stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainLines(ascii_stream).message("日本 ok")
    assert raw.getvalue().endswith(b"?? ok\n")


def test_quiet_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    display = make_display(quiet=True)
    assert isinstance(display, Quiet)
    display.start(folded())
    display.update(folded(), 41.0)
    display.message("x")
    display.stop()
    assert capfd.readouterr() == ("", "")


# ---- failures, restarts, snapshots, resumption ----


def troubled(*events: dict[str, Any], at: float = 40.0) -> RunView:
    """The tape, and then `events` one second apart."""
    made = RunView(quorum=2)
    made.apply_all([*tape(), *({"time": at + i, **event} for i, event in enumerate(events))])
    return made


def state_of(made: RunView, name: str) -> str:
    return next(island.state for island in made.snapshot(60.0).islands if island.name == name)


def report(name: str, step: int = 400) -> dict[str, Any]:
    return {"source": name, "step": step, "loss": 2.0, "state": "training", "tokens_per_s": 1.0}


RESTART = {"event": "restart", "process": "island-1", "attempt": 2, "reason": "killed by SIGKILL", "delay_s": 4.0}
GONE = {"event": "leave", "learner": "island-1", "reason": "connection lost", "returns": True}


@pytest.mark.parametrize("events", [(RESTART, GONE), (GONE, RESTART), (RESTART, GONE, report("island-1"))])
def test_an_island_restarts_whoever_notices_first_and_is_back_with_its_join(events: Any) -> None:
    made = troubled(*events)
    assert state_of(made, "island-1") == "restarting"
    shown = render(made.snapshot(45.0), 80, 24).plain
    assert "restarting" in shown
    assert "attempt 2 in 4 s: killed by SIGKILL" in shown
    made.apply({"time": 50.0, "event": "join", "learner": "island-1", "step": 300})
    island = next(i for i in made.snapshot(51.0).islands if i.name == "island-1")
    assert (island.state, island.restarts, island.last_reason) == ("training", 1, "killed by SIGKILL")
    assert made.snapshot(51.0).log[-1].text == "island-1 is back at step 300"
    assert made.snapshot(51.0).restarts == 1


def test_a_rank_that_restarts_is_its_islands_and_the_syncer_is_its_own() -> None:
    made = troubled({**RESTART, "process": "island-1.0"}, {**RESTART, "process": "syncer", "delay_s": 0})
    assert state_of(made, "island-1") == "restarting"
    assert [island.name for island in made.snapshot(45.0).islands] == [f"island-{i}" for i in range(4)]
    snapshot = made.snapshot(45.0)
    assert snapshot.restarts == 2
    assert "syncer restarting" in render(snapshot, 80, 24).plain.splitlines()[0]
    # Reports come through the syncer, so that nobody is called silent meanwhile, and all have their time afterwards.
    assert {island.silent_s for island in made.snapshot(500.0).islands} == {None}
    made.apply({"time": 500.0, "event": "syncer_restarted"})
    assert {island.silent_s for island in made.snapshot(502.0).islands} == {None}
    assert "syncer restarting" not in render(made.snapshot(502.0), 80, 24).plain
    made.apply({"time": 502.0, **RESTART, "process": "syncer"})
    made.apply({"time": 501.9, "source": "syncer", "step": 350})  # written before it died, read after
    assert made.snapshot(502.0).syncer_down
    made.apply({"time": 502.5, "source": "syncer", "step": 350})
    assert not made.snapshot(502.5).syncer_down
    made.apply({"time": 503.0, "event": "given_up", "process": "syncer", "reason": "10 starts came to nothing"})
    assert "syncer given up" in render(made.snapshot(504.0), 80, 24).plain


def test_given_up_and_left_stay_what_they_are() -> None:
    gives_up = {"event": "given_up", "process": "island-1", "reason": "10 starts came to nothing"}
    left = {"event": "leave", "learner": "island-3", "reason": "taken out by diloco leave", "returns": False}
    made = troubled(RESTART, gives_up, GONE, left, report("island-1"), report("island-3"))
    assert state_of(made, "island-1") == "given up"
    assert state_of(made, "island-3") == "left"
    shown = render(made.snapshot(50.0), 80, 24).plain
    assert "given up" in shown
    assert "10 starts came to nothing" in shown
    assert "left" in shown
    assert made.snapshot(50.0).live == 1
    plain = io.StringIO()
    lines = PlainLines(plain)
    lines.start(made)
    lines.update(made, 50.0)
    lines.stop()
    assert "given_up=1" in plain.getvalue()
    assert "left=1" in plain.getvalue()
    assert "given up: island-1: 10 starts came to nothing" in plain.getvalue()


def test_unhealthy_until_something_of_it_is_merged_and_out_at_the_third() -> None:
    bad = {"event": "unhealthy", "learner": "island-1", "reason": "NaN in fragment 2", "in_a_row": 2}
    made = troubled(bad, report("island-1"))
    assert state_of(made, "island-1") == "unhealthy"
    assert made.snapshot(42.0).live == 3  # it still trains
    assert "NaN in fragment 2 (2 in a row)" in render(made.snapshot(42.0), 80, 24).plain
    made.apply({"time": 43.0, "event": "merge", "fragment": 0, "version": 30, "learners": ["island-1"]})
    assert state_of(made, "island-1") == "training"
    made.apply({"time": 44.0, "event": "expelled", "learner": "island-1", "reason": "3 bad contributions in a row"})
    assert state_of(made, "island-1") == "gone"
    assert "taken out until it restarts" in made.snapshot(45.0).trouble[-1].text


def test_waiting_for_a_quorum_is_on_the_screen_at_once() -> None:
    """The syncer's word counts, also where the islands' states do not show it (one hangs)."""
    waits = {"event": "waiting_for_quorum", "available": 1, "quorum": 2, "timeout_s": 120.0}
    made = troubled(waits)
    for width, height in ((80, 24), (200, 60)):
        assert "waiting for quorum 1/2" in render(made.snapshot(40.0), width, height).plain.splitlines()[0]
    plain = io.StringIO()
    lines = PlainLines(plain)
    lines.start(made)
    lines.update(made, 40.0)
    assert "quorum: waiting for quorum 1/2, for at most 2:00" in plain.getvalue()
    made.apply({"time": 41.0, "event": "join", "learner": "island-2", "step": 1})  # not yet enough for the syncer
    assert made.snapshot(41.0).quorum_lost
    made.apply({"time": 42.0, "event": "quorum_back"})
    assert not made.snapshot(42.0).quorum_lost
    assert made.snapshot(42.0).log[-1].text.startswith("quorum is back")
    again = troubled(waits, {"event": "merge", "fragment": 0, "version": 31, "learners": ["island-0", "island-1"]})
    assert not again.snapshot(45.0).quorum_lost


def test_a_quorum_lost_by_leaving_is_told_once_with_its_limit() -> None:
    made = troubled(
        GONE,
        {**GONE, "learner": "island-3"},
        {"event": "waiting_for_quorum", "available": 1, "quorum": 2, "timeout_s": 30.0},
        {**RESTART, "process": "island-3"},
    )
    told = [line.text for line in made.snapshot(45.0).log if line.event == "quorum"]
    assert told == ["waiting for quorum 1/2, for at most 30 s"]


def test_faults_repairs_and_snapshots_are_counted_and_told() -> None:
    made = troubled(
        {"event": "fault", "target": "island-1", "kind": "slow", "text": "island-1 at half speed for 5s"},
        {"event": "fault", "target": "island-0", "kind": "crash", "text": "crash"},
        {"event": "fault", "target": "syncer", "kind": "crash"},
        {"event": "repaired", "target": "island-1", "kind": "slow"},
        {"event": "snapshot", "step": 300, "path": "checkpoints/step-300", "bytes": 12_300_000, "seconds": 0.25},
        {"event": "snapshot_failed", "reason": "no space left on device"},
        {"event": "snapshot_failed", "reason": "no space left on device"},
    )
    snapshot = made.snapshot(50.0)
    assert snapshot.faults == {"slow": 1, "crash": 2}
    assert snapshot.snapshot is not None
    assert (snapshot.snapshot.step, snapshot.snapshot.path) == (300, "checkpoints/step-300")
    texts = [line.text for line in snapshot.log]
    for text in (
        "island-1 at half speed for 5s",
        "island-0: crash",
        "island-1: slow is over",
        "step 300, 12.3MB in 250 ms",
        "failed, training goes on: no space left on device",
    ):
        assert text in texts, text
    assert snapshot.trouble[-1].count == 2
    assert [line.event for line in snapshot.trouble if line.time >= 40] == ["fault", "fault", "fault", "snapshot"]
    wide = render(snapshot, 120, 50).plain
    assert "step 300, 6.0s ago" in wide
    assert "3 faults, 0 restarts" in wide


def test_a_fault_is_remembered_over_thousands_of_merges() -> None:
    made = troubled({"event": "fault", "target": "island-0", "kind": "crash", "text": "x"})
    for i in range(3000):
        made.apply({"time": 50.0 + i, "event": "merge", "fragment": 0, "version": i, "learners": ["island-0"]})
        made.apply({"time": 50.0 + i, "event": "evaluation", "learner": "island-0", "step": i, "loss": 2.0})
    assert made.snapshot(4000.0).trouble[-1].text == "island-0: x"


def test_a_resumed_run_goes_on_from_its_snapshot() -> None:
    made = troubled({"event": "finish", "status": "failed", "reason": "the syncer died"})
    assert made.snapshot(41.0).status == "failed"
    made.apply({"time": 2.0, "event": "resumed", "step": 300, "snapshot": "checkpoints/step-300"})
    snapshot = made.snapshot(3.0)
    assert snapshot.status is None
    assert snapshot.step == 300  # the fastest was at 350; what came after the snapshot is done again
    assert made.latest_s == 2.0
    assert {island.state for island in snapshot.islands} == {"starting"}
    assert snapshot.log[-1].text == "at step 300 from checkpoints/step-300"
    made.apply({"time": 4.0, "event": "join", "learner": "island-0", "step": 300})
    made.apply({"time": 5.0, **report("island-0", 310)})
    assert made.snapshot(5.0).step == 310
    assert state_of(made, "island-0") == "training"


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_all_new_states_fit_every_window(width: int, height: int) -> None:
    made = troubled(
        {**RESTART, "reason": "日本 " * 80},
        {"event": "unhealthy", "learner": "island-0", "reason": "x" * 500, "in_a_row": 2},
        {"event": "given_up", "process": "island-3", "reason": "x" * 500},
        {**RESTART, "process": "syncer", "reason": "y" * 500},
        {"event": "waiting_for_quorum", "available": 0, "quorum": 2, "timeout_s": 1e9},
        {"event": "snapshot", "step": 10**12, "path": "p" * 5000, "bytes": 10**15, "seconds": 1.0},
        {"event": "fault", "target": "z" * 300, "kind": "k" * 300, "text": "t" * 3000},
    )
    lines = render(made.snapshot(60.0), width, height).plain.splitlines()
    assert [cell_len(line) for line in lines] == [width] * height


class Terminal:
    """A pseudo terminal with a size; `stream` is the program's end."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.master, slave = pty.openpty()
        self.resize(width, height)
        self.stream = os.fdopen(slave, "w", encoding="utf-8")

    def resize(self, width: int, height: int) -> None:
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read(self) -> str:
        """All that was written so far."""
        out = b""
        while select.select([self.master], [], [], 0.05)[0]:
            out += os.read(self.master, 65536)
        return out.decode("utf-8", "replace")

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "33")  # an exported, stale size must not win over the window's own
    monkeypatch.setenv("LINES", "7")
    made = Terminal()
    yield made
    made.close()


SHOW, HIDE, ENTER, LEAVE = "\x1b[?25h", "\x1b[?25l", "\x1b[?1049h", "\x1b[?1049l"


def test_live_screen_follows_a_resize_and_gives_the_terminal_back(terminal: Terminal) -> None:
    display = make_display(stream=terminal.stream)
    assert isinstance(display, LiveScreen)
    attributes = termios.tcgetattr(terminal.master)
    made = folded()
    display.start(made)
    display.update(made, 41.0)
    first = terminal.read()
    assert ENTER in first
    assert HIDE in first
    assert frame_size(first) == (80, 24)
    display.update(made, 41.05)
    assert terminal.read() == ""  # too soon
    terminal.resize(100, 30)
    display.update(made, 41.06)
    assert frame_size(terminal.read()) == (100, 30)  # a new size is followed at once
    display.message("note [red] from the launcher")
    display.update(made, 42.0)
    assert "note [red] from the launcher" in terminal.read()
    display.stop()
    last = terminal.read()
    assert SHOW in last
    after = last[last.rindex(LEAVE) :]
    assert "island-2" in after
    assert "35%" in after
    assert "note [red] from the launcher" in after
    display.stop()
    assert terminal.read() == ""
    assert termios.tcgetattr(terminal.master) == attributes


def frame_size(written: str) -> tuple[int, int]:
    """Width and height of the last frame that was written."""
    body = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.rpartition("\x1b[H")[2])
    lines = body.replace("\r", "").split("\n")
    return max(cell_len(line) for line in lines), len(lines)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_dumb_terminal_gets_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    assert isinstance(make_display(stream=terminal.stream), PlainLines)


def test_force_color_does_not_make_a_pipe_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    display = make_display(stream=out)
    display.start(folded())
    display.update(folded(), 41.0)
    display.stop()
    assert "\x1b" not in out.getvalue()


def test_an_error_while_drawing_ends_the_screen_is_told_once_and_plain_lines_go_on(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = make_display(stream=terminal.stream)
    made = folded()
    display.start(made)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("in [red] the chart")

    monkeypatch.setattr(dashboard, "render", broken)
    display.update(made, 42.0)
    display.update(made, 43.0)
    display.message("still here")
    display.update(made, 60.0)
    display.stop()
    text = terminal.read()
    assert text.count("the live display failed (ZeroDivisionError: in [red] the chart)") == 1
    after = text[text.rindex(LEAVE) :]
    assert SHOW in text
    assert "\x1b" not in after[len(LEAVE) :]
    assert "progress step=350/1000" in after
    assert "still here" in after


def test_a_broken_view_never_raises_from_any_display(terminal: Terminal) -> None:
    class Broken(RunView):
        def snapshot(self, now_s: float) -> Any:
            raise RuntimeError("bug")

    for display in (make_display(stream=terminal.stream), PlainLines(io.StringIO()), Quiet()):
        made = Broken()
        display.start(made)
        display.update(made, 1.0)
        display.message("x")
        display.stop()
    assert LEAVE in terminal.read()


SCRIPT = """
import os, signal, sys, time
from diloco_cli.observe.dashboard import RunView, make_display
how = sys.argv[1]
if how == "sigterm":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is born ignoring it
display = make_display()
view = RunView(islands=["island-0"])
display.start(view)
try:
    if how == "raise":
        raise RuntimeError("a bug elsewhere")
    if how == "exit":
        sys.exit(3)  # without stop(): atexit gives the terminal back
    while True:
        display.update(view, time.monotonic())
        time.sleep(0.02)
finally:
    if how != "exit":
        display.stop()
"""


@pytest.mark.parametrize("how", ["sigint", "sigterm", "raise", "exit"])
def test_cursor_and_screen_come_back_on_every_way_out(terminal: Terminal, how: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdin=terminal.stream,
        stderr=terminal.stream,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    try:
        text = ""
        deadline = time.monotonic() + 60
        while "starting" not in text and child.poll() is None and time.monotonic() < deadline:
            text += terminal.read()
        if how in ("sigint", "sigterm"):
            child.send_signal(signal.SIGINT if how == "sigint" else signal.SIGTERM)
        child.wait(60)
        text += terminal.read()
    finally:
        child.kill()
        child.wait()
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert text.rindex(LEAVE) > text.rindex(ENTER)
    assert termios.tcgetattr(terminal.master)[3] & termios.ECHO
