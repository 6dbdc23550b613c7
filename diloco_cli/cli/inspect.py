"""`diloco status`, `diloco watch` and `diloco doctor`: looking at a run from outside, and at a machine before one.

Owns: the facts of `status` (table and JSON document), the loop of `watch`, how findings are printed. What records mean
is observe.view, what is checked is run.doctor; nothing here takes part in a run, or writes into its folder.
Must not import anything heavy at module level: `diloco --help` reads this file.
Called by: cli.app (register), tests.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_cli.errors import EXIT_ENVIRONMENT, EXIT_OK, EXIT_SIGTERM

if TYPE_CHECKING:
    from diloco_cli.config.schema import Config
    from diloco_cli.observe.view import IslandSnapshot, RunSnapshot, RunView
    from diloco_cli.run.rundir import RunDir

SCHEMA_VERSION = 1
POLL_S = 0.1
RECENT_LINES = 8
ENDED = ("finished", "gone", "given up", "left")
"""States of islands that have no process."""
STARTING_S = 5.0
"""`watch` waits for the launcher of a folder this young, which is made before it is locked."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _complete_run(incomplete: str) -> list[str]:
    return sorted(f.parent.name for f in Path("runs").glob("*/config.yaml") if f.parent.name.startswith(incomplete))


def _complete_override(incomplete: str) -> list[str]:
    from diloco_cli.cli.app import _complete_override

    return _complete_override(incomplete)


Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run folder, or its name under ./runs. Without it: the newest there.",
        show_default=False,
        autocompletion=_complete_run,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(status)
    app.command()(watch)
    app.command()(doctor)


# ---- status ---------------------------------------------------------------------------------------


def status(run: Run = None, json_output: Json = False, debug: Debug = False) -> int:
    """Say where a run is: running, ended or dead, and each of its islands."""
    from diloco_cli.cli.commands import find_run

    facts = collect(find_run(run))
    if json_output:
        print(json.dumps(facts, allow_nan=False))
    else:
        print("\n".join(_status_lines(facts)))
    return EXIT_OK


class _Reader:
    """A run folder as it is on disk: its configuration, and its records folded as they come."""

    def __init__(self, folder: Path) -> None:
        from diloco_cli.config.schema import load_config
        from diloco_cli.observe.events import Tail
        from diloco_cli.observe.view import RunView
        from diloco_cli.run.rundir import RunDir

        self.run: RunDir = RunDir(folder.resolve())
        self.cfg: Config = load_config(self.run.config)
        self.view: RunView = RunView.from_config(self.cfg, self.run.path.name)
        self._events, self._metrics = Tail(self.run.events), Tail(self.run.metrics)
        self._event_order, self._metric_order = _Order(), _Order()
        self._started_s: float | None = None
        self.has_events = False

    def poll(self) -> None:
        """Take what has been written since, of both files together in the order of their times."""
        events = self._events.poll()
        self.has_events = self.has_events or bool(events)
        found = [(self._event_order.place(record), record) for record in events]
        found += [(self._metric_order.place(record), record) for record in self._metrics.poll()]
        self.view.apply_all(record for _, record in sorted(found, key=lambda item: item[0]))

    def now_s(self, alive: bool) -> float:
        """Seconds since the run's start, by the clock of this machine; for a run that is over: its last record."""
        latest_s = self.view.latest_s
        if not alive:
            return latest_s
        if self._started_s is None:
            self._started_s = _started_monotonic_s(self.run.path / "syncer.json")
        now_s = latest_s if self._started_s is None else time.monotonic() - self._started_s
        return max(now_s, latest_s)

    def summary(self) -> dict[str, Any] | None:
        """What summary.json holds; None while there is none, and if it is from before a resumption."""
        from diloco_cli.run.rundir import summary_is_current

        return _read_json(self.run.summary) if summary_is_current(self.run) else None


class _Order:
    """Where the records of one file stand beside those of the other. A resumed run's times may start over; records of
    several processes are out of order by less than a second."""

    def __init__(self) -> None:
        self._session = 0
        self._latest_s = 0.0

    def place(self, record: Mapping[str, Any]) -> tuple[int, float]:
        """(how often time has turned back, time)"""
        value = record.get("time")
        time_s = float(value) if isinstance(value, int | float) and math.isfinite(value) else self._latest_s
        if time_s < self._latest_s - 5.0:
            self._session += 1
            self._latest_s = time_s
        self._latest_s = max(self._latest_s, time_s)
        return self._session, time_s


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _started_monotonic_s(path: Path) -> float | None:
    value = (_read_json(path) or {}).get("started_monotonic_s")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def collect(folder: Path) -> dict[str, Any]:
    """The document of `diloco status --json`. Times in seconds on the run's clock; null: not known.

    Raises:
        ConfigError: the folder holds no readable config.yaml.
    """
    from diloco_cli.run.rundir import is_alive

    reader = _Reader(folder)
    # Asked before the files are read: what a launcher wrote before it let go is then seen.
    alive = is_alive(reader.run)
    reader.poll()
    snapshot = reader.view.snapshot(reader.now_s(alive))
    summary = None if alive else reader.summary()
    state, reason = _state(snapshot, summary, alive, reader.has_events)
    ended = summary or {}
    tokens = ended.get("tokens") or dict(snapshot.syncer.tokens) or None
    losses = ended.get("loss") or {}
    validation = snapshot.validation[-1][1] if snapshot.validation else None
    newest = snapshot.snapshot
    return {
        "schema_version": SCHEMA_VERSION,
        "run_dir": str(reader.run.path),
        "name": reader.run.path.name,
        "state": state,
        "reason": reason or None,
        "alive": alive,
        "error": ended.get("error"),
        "algorithm": reader.cfg.sync.algorithm.value,
        "time_s": round(snapshot.now_s, 3),
        "step": snapshot.step,
        "target_steps": snapshot.target_steps,
        "progress": snapshot.progress,
        "eta_s": snapshot.eta_s if alive else None,
        "merges": _first(ended.get("merges"), snapshot.syncer.merges),
        "tokens": tokens,
        "tokens_per_s": snapshot.tokens_per_s if alive else ended.get("tokens_per_s"),
        "loss": {
            "train": _first(losses.get("train"), snapshot.loss),
            "validation": _first(losses.get("validation"), validation),
            "bigram": _first(losses.get("bigram"), snapshot.bigram),
        },
        "goodput": _first(ended.get("goodput"), snapshot.goodput),
        "uptime": _first(ended.get("uptime"), snapshot.uptime),
        "quorum": snapshot.quorum,
        "available": snapshot.live,
        "syncer": snapshot.syncer_down or None,
        "islands": _islands(snapshot, alive, over=not alive and state != "not started"),
        "faults": dict(snapshot.faults),
        "restarts": snapshot.restarts,
        "recent": [
            {"time": line.time, "event": line.event, "text": line.text, "level": line.level, "count": line.count}
            for line in snapshot.trouble[-RECENT_LINES:]
        ],
        "snapshot": None
        if newest is None
        else {
            "step": newest.step,
            "path": newest.path or None,
            "bytes": newest.num_bytes,
            "age_s": round(max(0.0, snapshot.now_s - newest.time_s), 3),
        },
        "next": _next(reader.run.path, state, reader.cfg.model.entry_point),
    }


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _state(snapshot: RunSnapshot, summary: Mapping[str, Any] | None, alive: bool, has_events: bool) -> tuple[str, str]:
    """One word (or few) for the run, and why."""
    if alive:
        if snapshot.quorum_lost:
            return f"waiting for quorum {snapshot.live}/{snapshot.quorum}", snapshot.syncer_down
        if snapshot.status is not None:
            return "ending", f"{snapshot.status}: {snapshot.status_reason}".rstrip(": ")
        return ("running" if snapshot.started else "starting"), snapshot.syncer_down
    if summary is not None:
        error = summary.get("error")
        what = str(error.get("what") or "") if isinstance(error, Mapping) else snapshot.status_reason
        return str(summary.get("status") or "unknown"), what
    if not has_events:
        return "not started", "no launcher is at work on it, and it has no records"
    return "died", "its launcher is gone without a summary"


def _islands(snapshot: RunSnapshot, alive: bool, over: bool) -> list[dict[str, Any]]:
    """`over`: no process is left, whatever the last records say."""

    def now(island: IslandSnapshot) -> tuple[str, str | None]:
        if over and island.state not in ENDED:
            return "gone", f"was {island.state}" + (f": {island.reason}" if island.reason else "")
        return ("silent" if alive and island.silent_s is not None else island.state), island.reason or None

    states = {island.name: now(island) for island in snapshot.islands}
    return [
        {
            "name": island.name,
            "state": states[island.name][0],
            "reason": states[island.name][1],
            "step": island.step,
            "lag_steps": snapshot.step - island.step,
            "staleness_steps": island.staleness_steps,
            "tokens": island.tokens,
            "tokens_per_s": island.tokens_per_s if alive else None,
            "loss": island.loss,
            "late": island.late,
            "refused": island.refused,
            "restarts": island.restarts,
            "last_reason": island.last_reason or None,
            "silent_s": island.silent_s if alive else None,
        }
        for island in snapshot.islands
    ]


def _next(path: Path, state: str, entry_point: str | None) -> list[str]:
    """Commands that one would type now."""
    from diloco_cli.observe.summary import next_commands

    run = shlex.quote(str(path))
    if state == "completed":
        return next_commands({"status": state, "run_dir": str(path)}, entry_point)
    if state == "not started":
        return ["diloco train"]
    if state in ("died", "failed", "stopped", "waiting", "unknown"):
        return [f"diloco resume {run}", f"ls {run}/logs   # each process's own output"]
    return [f"diloco watch {run}"]


def _status_lines(facts: Mapping[str, Any]) -> list[str]:
    """The same facts for people."""
    from diloco_cli.cli.app import printable
    from diloco_cli.observe import figures, summary

    target = f" of {facts['target_steps']}" if facts["target_steps"] else ""
    percent = f" ({100 * facts['progress']:.0f}%)" if facts["progress"] is not None else ""
    eta = f", ETA {figures.clock(facts['eta_s'])}" if facts["eta_s"] is not None else ""
    loss = facts["loss"]
    rows: list[tuple[str, str]] = [
        ("state", facts["state"] + (f": {facts['reason']}" if facts["reason"] else "")),
        ("step", f"{facts['step']}{target}{percent}, {figures.clock(facts['time_s'])} since its start{eta}"),
        ("merges", f"{facts['merges']}, quorum {facts['quorum']} of {facts['available']}"),
        ("train loss", f"{figures.loss(loss['train'])}, validation {figures.loss(loss['validation'])}"),
        ("tokens", summary.fates_in_words(facts["tokens"])),
        ("goodput", f"{figures.percent(facts['goodput'])}, uptime {figures.percent(facts['uptime'])}"),
    ]
    newest = facts["snapshot"]
    if newest is not None:
        size = f", {figures.count(newest['bytes'])}B" if newest["bytes"] is not None else ""
        step = f"step {newest['step']}" if newest["step"] is not None else "taken"
        rows.append(("snapshot", f"{step}, {figures.ago(newest['age_s'])} ago{size}: {newest['path'] or '-'}"))
    if facts["faults"] or facts["restarts"]:
        faults = ", ".join(f"{count} {kind}" for kind, count in facts["faults"].items()) or "none"
        rows.append(("failures", f"{faults} injected, {facts['restarts']} restarts"))
    width = max(len(label) for label, _ in rows)
    lines = [facts["name"], "", *(f"{label:<{width}}  {value}" for label, value in rows)]
    if facts["islands"]:
        table = [["island", "state", "step", "lag", "tok/s", "loss", "restarts", "why"]]
        for island in facts["islands"]:
            then = island["last_reason"]
            why = island["reason"] or (f"last: {then}" if then else "")
            table.append(
                [
                    island["name"],
                    island["state"],
                    str(island["step"]),
                    str(island["lag_steps"]),
                    figures.count(island["tokens_per_s"]),
                    figures.loss(island["loss"]),
                    str(island["restarts"]),
                    why,
                ]
            )
        lines += ["", *_table(table, right={2, 3, 4, 5, 6})]
    if facts["recent"]:
        lines += ["", "trouble so far (the newest last)"]
        for line in facts["recent"]:
            times = f" (x{line['count']})" if line["count"] > 1 else ""
            lines.append(f"  {figures.clock(line['time']):>7}  {line['event']}: {line['text']}{times}")
    lines.append("")
    lines += [f"{'next' if index == 0 else '':<{width}}  {command}" for index, command in enumerate(facts["next"])]
    return [printable(line) for line in lines]


def _table(rows: list[list[str]], right: set[int]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# ---- watch ----------------------------------------------------------------------------------------


def watch(run: Run = None, debug: Debug = False) -> int:
    """Show a run live, from another terminal.

    Ends when the run ends, or with Ctrl-C; the run itself is not touched.
    """
    # Ctrl-C is the way to leave, and nothing has failed then: 0.
    from diloco_cli.cli.commands import find_run

    reader = _Reader(find_run(run))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_SIGTERM))  # so that the terminal is given back
    try:
        _follow(reader)
    except KeyboardInterrupt:
        return EXIT_OK
    finally:
        signal.signal(signal.SIGTERM, before)
    _print_end(reader)
    return EXIT_OK


def _follow(reader: _Reader) -> None:
    """Draw until no launcher is at work on the run. Ctrl-C comes through."""
    from diloco_cli.observe.dashboard import PlainLines, make_display
    from diloco_cli.run.rundir import is_alive

    display = make_display()
    until_s = time.monotonic() + STARTING_S if _is_young(reader) else 0.0
    alive = is_alive(reader.run)
    reader.poll()
    now_s = reader.now_s(alive)
    try:
        display.start(reader.view)
        if isinstance(display, PlainLines):
            display.skip_to(reader.view.snapshot(now_s))
        display.update(reader.view, now_s)
        while alive or (time.monotonic() < until_s and not reader.run.lock.exists()):
            time.sleep(POLL_S)
            alive = is_alive(reader.run)
            reader.poll()
            display.update(reader.view, reader.now_s(alive))
    finally:
        display.stop()


def _is_young(reader: _Reader) -> bool:
    try:
        return abs(time.time() - reader.run.config.stat().st_mtime) < STARTING_S
    except OSError:
        return False


def _print_end(reader: _Reader) -> None:
    """The summary as `diloco train` prints it; for a run that died: what is known."""
    from diloco_cli.cli.commands import print_summary

    if summary := reader.summary():
        print_summary(summary, reader.cfg.model.entry_point)
        return
    print("\n".join(_status_lines(collect(reader.run.path))))


# ---- doctor ---------------------------------------------------------------------------------------


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[conf=RECIPE] [OVERRIDE]...",
            help="The run that is to be started, as `diloco train` takes it.",
            autocompletion=_complete_override,
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
    debug: Debug = False,
) -> int:
    """Check what a run needs from this machine, before it starts.

    Every line says pass, warn or fail, with a fix. Exit code 3 if one fails.
    """
    from diloco_cli.cli.app import printable
    from diloco_cli.cli.commands import split_conf
    from diloco_cli.config.compose import compose

    conf, words = split_conf(overrides or [])
    cfg = compose(words, conf)
    from diloco_cli.run.doctor import check

    findings = check(cfg)
    counts = Counter(finding.status for finding in findings)
    ready = not counts["fail"]
    if json_output:
        document = {
            "schema_version": SCHEMA_VERSION,
            "ready": ready,
            "counts": {name: counts[name] for name in ("pass", "warn", "fail")},
            "findings": [{"name": f.name, "status": f.status, "says": f.says, "fix": f.fix or None} for f in findings],
        }
        print(json.dumps(document, allow_nan=False))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(printable(f"{finding.status:<4}  {finding.name:<{width}}  {finding.says}"))
            if finding.fix:
                print(printable(f"{'':<4}  {'':<{width}}  fix: {finding.fix}"))
        warned = f", {counts['warn']} to look at" if counts["warn"] else ""
        print(f"\n{'ready' if ready else 'not ready'}: {counts['pass']} pass, {counts['fail']} fail{warned}")
    return EXIT_OK if ready else EXIT_ENVIRONMENT
