"""`diloco train` from configuration to summary: starts all processes, shows the run, ends it in order.

Owns: the life of a run on the launcher's side, signals, which error is the first cause, summary.json.
Must not take part in the protocol: it only tells the syncer which islands' processes have ended, and to stop.
Called by: cli.commands; tests.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from diloco_cli.config.presets import preset_warnings
from diloco_cli.config.schema import Config
from diloco_cli.errors import DilocoError, EnvironmentNotReady, Interrupted, QuorumLost
from diloco_cli.observe.dashboard import RunView, make_display
from diloco_cli.observe.events import JsonlWriter, Tail
from diloco_cli.observe.sinks import make_sinks
from diloco_cli.run import process
from diloco_cli.run.children import Child, Children
from diloco_cli.run.credentials import SYNCER, issue, make_authority
from diloco_cli.run.rundir import RunDir, create, write_json

SCHEMA_VERSION = 1
POLL_S = 0.1
# After the syncer's end its learners have been told; what has not ended by then is killed.
LEARNERS_END_S = 5.0


class RunFailed(DilocoError):
    """The run ended without reaching its target; `summary` is what summary.json holds."""

    def __init__(self, cause: DilocoError, summary: dict[str, Any]) -> None:
        super().__init__(cause.what, where=cause.where, why=cause.why, hint=cause.hint)
        self.exit_code = cause.exit_code
        self.summary = summary


def run_training(
    cfg: Config,
    overrides: list[str],
    *,
    run_dir: Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run to the end and return the summary (interface.md, summary.json).

    Raises:
        EnvironmentNotReady: nothing was started.
        RunFailed: the run failed, lost its quorum, or was stopped; its exit code says which.
    """
    with listening_socket(cfg) as listening:
        run = create(cfg, overrides, run_dir)
        return Launcher(cfg, run, listening, quiet=quiet).run_to_end()


@contextmanager
def listening_socket(cfg: Config) -> Iterator[socket.socket]:
    """The syncer's door, made before anything else, so that a taken port is found out at once."""
    host, port = cfg.network.bind, cfg.network.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host.strip("[]"), port))
            sock.listen(128)
        except OSError as error:
            raise EnvironmentNotReady(
                f"cannot listen on {host} port {port}",
                where="network.bind, network.port",
                why=error.strerror or str(error),
                hint="network.port=0 takes any free port",
            ) from error
        yield sock
    finally:
        sock.close()


class Launcher:
    """One run."""

    def __init__(self, cfg: Config, run: RunDir, listening: socket.socket, *, quiet: bool) -> None:
        self.cfg = cfg
        self.run = run
        self.started_s = time.monotonic()
        self._listening = listening
        self._children = Children(run, cfg, listening)
        self._islands: dict[str, Child] = {}
        self._syncer: Child | None = None
        self._view = RunView.from_config(cfg, run.path.name)
        self._display = make_display(quiet=quiet)
        self._events = Tail(run.events)
        self._metrics = Tail(run.metrics)
        self._own_events = JsonlWriter(run.events)
        self._sinks, self._sink_warnings = make_sinks(cfg.logging, run.path, started_at=time.time())
        self._signal: int | None = None
        self._stop_deadline_s = float("inf")
        self._result: dict[str, Any] = {}
        self._island_errors: dict[str, DilocoError] = {}
        self._shown_quorum_loss = False

    def run_to_end(self) -> dict[str, Any]:
        """Everything."""
        error: DilocoError | None = None
        with self._signals():
            try:
                self._display.start(self._view)
                for warning in [*preset_warnings(self.cfg), *self._sink_warnings]:
                    self._display.message(f"warning: {warning}")
                self._start()
                self._watch()
                error = self._verdict()
            except DilocoError as failed:
                error = failed
            finally:
                self._end_all()
                self._poll_files()
                self._display.stop()
                for sink in self._sinks:
                    sink.close()
                self._own_events.close()
        summary = self._summary(error)
        write_json(self.run.summary, summary)
        if error is not None:
            raise RunFailed(error, summary)
        return summary

    # ---- start -----------------------------------------------------------------------------------

    def _start(self) -> None:
        make_authority(self.run.keys)
        issue(self.run.keys, SYNCER)
        host, port = self._listening.getsockname()[:2]
        write_json(
            self.run.path / "syncer.json",
            {"host": _dialable(host), "port": port, "started_monotonic_s": self.started_s},
        )
        for name in self.cfg.island_names():
            issue(self.run.keys, name)
        self._syncer = self._children.start_syncer()
        for name in self.cfg.island_names():
            self._islands[name] = self._children.start_island(name)

    # ---- while it runs ---------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the syncer has ended."""
        assert self._syncer is not None
        while self._syncer.poll() is None:
            self._poll_islands()
            self._poll_files()
            self._display.update(self._view, self._now_s())
            if time.monotonic() > self._stop_deadline_s:
                return
            time.sleep(POLL_S)
        self._poll_files()

    def _now_s(self) -> float:
        return time.monotonic() - self.started_s

    def _poll_islands(self) -> None:
        for name, child in list(self._islands.items()):
            code = child.poll()
            if code is None:
                continue
            del self._islands[name]
            reason = "its process ended"
            if code != 0 and not self._ending:
                error = self._process_error(name, code)
                self._island_errors[name] = error
                reason = error.what
                self._note_error(name, error)
            self._tell({"event": "exited", "island": name, "reason": reason})

    @property
    def _ending(self) -> bool:
        """Whether processes end because they were told to."""
        return self._signal is not None or "status" in self._result

    def _process_error(self, name: str, code: int) -> DilocoError:
        """What the first rank that failed said itself, or what can be told from its end."""
        ranks = self.cfg.island(name).nproc_per_node if name != SYNCER else 0
        processes = [f"{name}.{r}" for r in range(ranks)] or [name]
        said = [p for p in processes if self.run.error(p).exists()]
        said.sort(key=lambda p: self.run.error(p).stat().st_mtime_ns)
        for candidate in said:
            if report := process.read_error(self.run, candidate):
                where = f"{name}: {report['where']}" if report.get("where") else name
                return DilocoError(
                    report.get("what", ""),
                    where=where,
                    why=report.get("why", ""),
                    hint=report.get("hint") or f"its log: {self.run.log(name)}",
                )
        how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = last_line(self.run.log(name))
        why = last or ("perhaps it ran out of memory" if code == -signal.SIGKILL else "")
        return DilocoError(f"{name} {how}", where=name, why=why, hint=f"its log: {self.run.log(name)}")

    def _note_error(self, name: str, error: DilocoError) -> None:
        line = f"{error.what} ({error.why})" if error.why else error.what
        self._own_events.write(
            {
                "time": round(self._now_s(), 4),
                "event": "error",
                "process": name,
                "message": line,
                "log": f"logs/{name}.log",
            }
        )

    def _poll_files(self) -> None:
        for record in self._events.poll():
            self._view.apply(record)
            if record.get("event") == "result":
                self._result = record
        for record in self._metrics.poll():
            self._view.apply(record)
            for sink in self._sinks:
                sink.write(record)

    def _tell(self, said: dict[str, Any]) -> None:
        self._children.tell_syncer(json.dumps(said).encode() + b"\n")

    # ---- signals ---------------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM stops in order, the second at once. Only the main thread may set handlers."""
        import threading

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None:
            self._stop_deadline_s = 0.0
            return
        self._signal = number
        self._stop_deadline_s = time.monotonic() + self.cfg.launcher.stop_timeout_s
        self._tell({"event": "stop", "reason": f"stopped by {signal.Signals(number).name}"})

    # ---- end -------------------------------------------------------------------------------------

    def _verdict(self) -> DilocoError | None:
        """Why the run is not a success; None if it is one."""
        assert self._syncer is not None
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            kept = f"the parameters so far: {self.run.final}" if self.run.final.exists() else ""
            return Interrupted(self._signal, f"stopped by {name}", hint=kept)
        code = self._syncer.poll()
        if not self._result:
            return self._process_error(SYNCER, code if code is not None else 1)
        status = self._result["status"]
        if status == "completed" and code == 0:
            return None
        if status == "quorum_lost":
            return self._quorum_lost()
        if code:
            return self._process_error(SYNCER, code)
        return DilocoError("the run ended early", where=SYNCER, why=str(self._result.get("reason", "")))

    def _quorum_lost(self) -> DilocoError:
        """The first island's own error, if the run never got going; else what is left of the quorum."""
        self._poll_islands_for_errors()
        reason = str(self._result.get("reason", ""))
        first = next(iter(self._island_errors.values()), None)
        if self._result.get("merges") == 0 and first is not None:
            return DilocoError(first.what, where=first.where, why=first.why, hint=first.hint)
        hint = f"the parameters so far: {self.run.final}" if self.run.final.exists() else f"see {self.run.path}/logs"
        return QuorumLost("fewer learners than the quorum are left", where="sync.quorum", why=reason, hint=hint)

    def _poll_islands_for_errors(self) -> None:
        """A learner's death reaches the syncer before its exit code reaches us: wait a moment for the latter."""
        deadline_s = time.monotonic() + LEARNERS_END_S
        while not self._island_errors and self._islands and time.monotonic() < deadline_s:
            for name, child in list(self._islands.items()):
                code = child.poll()
                if code is not None:
                    del self._islands[name]
                    if code != 0:
                        self._island_errors[name] = self._process_error(name, code)
            time.sleep(POLL_S / 2)

    def _end_all(self) -> None:
        """No process of the run is left when this returns."""
        deadline_s = time.monotonic() + (LEARNERS_END_S if self._stop_deadline_s else 0.0)
        deadline_s = min(deadline_s, max(self._stop_deadline_s, time.monotonic()))
        waiting = list(self._islands.values())
        while waiting and time.monotonic() < deadline_s:
            waiting = [c for c in waiting if c.poll() is None]
            time.sleep(POLL_S / 4)
        for child in waiting:
            child.terminate()
        deadline_s = time.monotonic() + 1.0
        while waiting and time.monotonic() < deadline_s:
            waiting = [c for c in waiting if c.poll() is None]
            time.sleep(POLL_S / 4)
        for child in [*self._islands.values(), *([self._syncer] if self._syncer is not None else [])]:
            child.kill()
        self._children.close()

    def _summary(self, error: DilocoError | None) -> dict[str, Any]:
        result = self._result
        status = result.get("status", "failed")
        if error is not None and status == "completed":
            status = "failed"
        if isinstance(error, Interrupted):
            status = "stopped"
        elif status == "quorum_lost":
            status = "failed"
        return {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "error": error.as_dict() if error is not None and not isinstance(error, Interrupted) else None,
            "algorithm": self.cfg.sync.algorithm.value,
            "learners": self.cfg.islands.count,
            "steps": result.get("steps"),
            "merges": result.get("merges"),
            "tokens": result.get("tokens"),
            "loss": {
                "train": result.get("train_loss"),
                "validation": result.get("validation"),
                "bigram": result.get("bigram"),
            },
            "goodput": result.get("goodput"),
            "uptime": result.get("uptime"),
            "compute_utilization": result.get("compute_utilization"),
            "wall_time_s": round(self._now_s(), 3),
            "training_time_s": result.get("training_time_s"),
            "tokens_per_s": result.get("tokens_per_s"),
            "bytes": result.get("bytes"),
            "faults": {},
            "restarts": 0,
            "run_dir": str(self.run.path),
        }


def last_line(path: Path, limit_bytes: int = 4096) -> str:
    """The last line of a log that says something; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - limit_bytes))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _dialable(host: str) -> str:
    """What learners on this machine dial: a wildcard address is no destination."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
