"""`diloco train` from configuration to summary: starts all processes, shows the run, ends it in order.

Owns: the life of a run on the launcher's side, signals, which error is the first cause, summary.json.
Must not take part in the protocol: it only tells the syncer which islands' processes have ended, and to stop. When a
process is started again is decided in run.supervisor.
Called by: cli.commands; tests.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
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
from diloco_cli.run import batches, measure
from diloco_cli.run.batches import Measuring
from diloco_cli.run.children import Children
from diloco_cli.run.credentials import SYNCER, issue, make_authority
from diloco_cli.run.groups import Group
from diloco_cli.run.injector import Injector
from diloco_cli.run.members import Members, store_config
from diloco_cli.run.resume import Start, prepare
from diloco_cli.run.rundir import RunDir, create, hold_lock, write_json
from diloco_cli.run.settings import fault_plan
from diloco_cli.run.supervisor import End, Pulse, Supervised

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


def resume_training(
    cfg: Config, run: RunDir, start: Start, overrides: list[str], *, changed: bool, quiet: bool = False
) -> dict[str, Any]:
    """Go on with a run to its end, as run_training."""
    with listening_socket(cfg) as listening:
        return Launcher(cfg, run, listening, quiet=quiet, start=start).run_to_end(
            lambda: prepare(run, cfg, start, overrides, changed)
        )


@contextmanager
def listening_socket(cfg: Config) -> Iterator[socket.socket]:
    """The syncer's door, made before anything else, so that a taken port is found out at once."""
    host, port = cfg.bind_address(), cfg.network.port
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
    """One run; `start`: where one that is resumed goes on from."""

    def __init__(
        self, cfg: Config, run: RunDir, listening: socket.socket, *, quiet: bool, start: Start | None = None
    ) -> None:
        self.cfg = cfg
        self.run = run
        self._resumed = start
        # The run's clock goes on.
        self.started_s = time.monotonic() - (start.time_s if start is not None else 0.0)
        self._listening = listening
        self._children = Children(run, cfg, listening)
        self._groups: dict[str, Group] = {}
        self._view = RunView.from_config(cfg, run.path.name)
        self._display = make_display(quiet=quiet)
        self._events = Tail(run.events)
        self._metrics = Tail(run.metrics)
        self._own_events = JsonlWriter(run.events)
        self._sinks, self._sink_warnings = make_sinks(cfg.logging, run.path, started_at=time.time())
        self._injector: Injector | None = None
        self._members: Members | None = None
        self._signal: int | None = None
        self._stop_deadline_s = float("inf")
        self._step = 0
        self._finished = False
        self._result: dict[str, Any] = {}
        if start is not None:
            # What is on the tape so far is of the run's past: for the screen, not for us.
            for record in [*self._events.poll(), *self._metrics.poll()]:
                self._view.apply(record)
        self._syncer_end: End | None = None
        self._island_errors: dict[str, DilocoError] = {}

    def run_to_end(self, prepare: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Everything, with the run folder locked meanwhile (rundir.is_alive)."""
        with hold_lock(self.run):
            prepare()
            return self._run_to_end()

    def _run_to_end(self) -> dict[str, Any]:
        error: DilocoError | None = None
        with self._signals():
            try:
                self._display.start(self._view)
                for warning in [*preset_warnings(self.cfg), *self._sink_warnings]:
                    self._display.message(f"warning: {warning}")
                self._settle_batches()
                if self._signal is None:
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

    @property
    def _islands(self) -> list[Group]:
        return [group for name, group in self._groups.items() if name != SYNCER]

    @property
    def _syncer(self) -> Group:
        return self._groups[SYNCER]

    def _now_s(self) -> float:
        return time.monotonic() - self.started_s

    # ---- start -----------------------------------------------------------------------------------

    def _settle_batches(self) -> None:
        """`batch: auto` becomes numbers: from here on config.yaml has them, and everybody goes by that."""
        if not self.cfg.open_batches():
            return
        (self.run.path / "alive").mkdir(exist_ok=True)
        began_s = time.monotonic()
        self._display.message("batch: auto: the islands are measured first")
        measuring = Measuring(self.run, self.cfg, lambda name: self._make_group(name, {measure.VARIABLE: "1"}))
        # Where whatever ends the launcher ends them too.
        self._groups = measuring.groups
        measuring.start()
        choices = None
        while choices is None and self._signal is None:
            choices = measuring.poll()
            self._display.update(self._view, self._now_s())
            time.sleep(POLL_S / 2)
        for group in measuring.groups.values():
            group.end_now()
        self._groups = {}
        if choices is None:
            return
        assert measuring.wanted_s is not None
        # The run's clock begins now: failures on purpose are meant by it.
        seconds = time.monotonic() - began_s
        self.started_s += seconds
        self.cfg = self._children.cfg = batches.settled(self.cfg, choices)
        store_config(self.run, self.cfg)
        for said in batches.records(choices, measuring.wanted_s):
            self._record("batch", {**said, "seconds": round(seconds, 3)})
        found = ", ".join(f"{n} {c.batch} ({c.step_time_s * 1000:.3g} ms)" for n, c in choices.items())
        self._display.message(f"batch: auto: sequences per step: {found}")

    def _start(self) -> None:
        make_authority(self.run.keys)
        issue(self.run.keys, SYNCER)
        host, port = self._listening.getsockname()[:2]
        write_json(
            self.run.path / "syncer.json",
            {"host": _dialable(host), "port": port, "started_monotonic_s": self.started_s},
        )
        (self.run.path / "alive").mkdir(exist_ok=True)
        plan = fault_plan(self.cfg)
        if (start := self._resumed) is not None:
            # What has happened does not happen again.
            plan = tuple(f for f in plan if (f.at_s or 0.0) >= start.time_s and (f.at_step or start.step) >= start.step)
            self._children.return_to = start.return_to
        write_json(self.run.failures, {"faults": [dataclasses.asdict(fault) for fault in plan]})
        self._members = Members(self.run, self)
        self._injector = Injector(
            plan, self._groups, self._tell, self._record, stop_timeout_s=self.cfg.launcher.stop_timeout_s
        )
        self._groups[SYNCER] = self._make_group(SYNCER)
        self._syncer.start()
        for name in self.cfg.island_names():
            issue(self.run.keys, name)
            self._groups[name] = self._make_group(name)
        for group in self._islands:
            group.start()

    def _make_group(self, name: str, more: Mapping[str, str] | None = None) -> Group:
        cfg = self.cfg
        policy = Supervised(cfg.launcher.max_restarts, cfg.launcher.restart_backoff_s)
        pulse = Pulse(cfg.sync.heartbeat_timeout_s, cfg.launcher.start_timeout_s)
        if name == SYNCER:
            return Group(name, self.run, self._children.start_syncer, [SYNCER], policy, pulse)
        ranks = [f"{name}.{rank}" for rank in range(cfg.num_ranks(name))]
        return Group(name, self.run, lambda: self._children.start_island(name, more), ranks, policy, pulse)

    # ---- while it runs ---------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the syncer has ended for good."""
        assert self._injector is not None
        assert self._members is not None
        while True:
            self._poll_files()
            if self._syncer_is_over():
                break
            self._poll_islands()
            self._start_due()
            if self._ending:
                # What is stopped on purpose could not end in order.
                self._injector.close()
            else:
                self._members.poll()
                self._injector.poll(self._now_s(), self._step)
            self._display.update(self._view, self._now_s())
            if time.monotonic() > self._stop_deadline_s:
                break
            time.sleep(POLL_S)
        self._poll_files()

    @property
    def _ending(self) -> bool:
        """Whether processes end because they were told to."""
        return self._signal is not None or self._finished

    def _syncer_is_over(self) -> bool:
        """Whether the syncer has ended and will not be started again."""
        now_s = time.monotonic()
        end = self._syncer.poll(now_s)
        if end is None:
            return self._signal is not None and not self._syncer.runs
        self._syncer_end = end
        # What it wrote last may have come after our look.
        self._poll_files()
        if "status" in self._result or self._signal is not None:
            return True
        return not self._goes_on(self._syncer, end, now_s)

    def _poll_islands(self) -> None:
        for group in self._islands:
            now_s = time.monotonic()
            if (end := group.poll(now_s)) is not None:
                self._poll_files()
                self._island_ended(group, end, now_s)

    def _island_ended(self, group: Group, end: End, now_s: float) -> None:
        """Start it again or not, and tell the syncer."""
        if group.removed_for:
            group.removed = True
            self._tell({"event": "removed", "island": group.name, "reason": group.removed_for})
            return
        returns = False
        if self._ending:
            group.policy.retire()
        else:
            if end.error is not None and not group.asked:
                self._island_errors[group.name] = end.error
            returns = self._goes_on(group, end, now_s)
        self._tell({"event": "exited", "island": group.name, "reason": end.reason, "returns": returns})

    def _goes_on(self, group: Group, end: End, now_s: float) -> bool:
        """Whether the group is started again, which the tape then says."""
        if end.error is not None and not group.asked:
            self._note_error(group.name, end.error)
        policy = group.policy
        returns = policy.ended(now_s, end, asked=group.asked)
        if returns:
            assert policy.due_s is not None
            attempt, delay_s = max(1, policy.in_a_row), round(policy.due_s - now_s, 3)
            said = {"process": group.name, "attempt": attempt, "reason": end.reason, "delay_s": delay_s}
            self._record("restart", said)
        else:
            self._record("given_up", {"process": group.name, "reason": end.reason})
        return returns

    def _start_due(self) -> None:
        """Start what is to be started again by now."""
        if self._signal is not None:
            return
        if self._is_due(self._syncer):
            self._syncer.start()
            self._tell_new_syncer()
        for group in self._islands:
            if self._is_due(group) and not self._finished:
                group.start()

    @staticmethod
    def _is_due(group: Group) -> bool:
        due_s = group.policy.due_s
        return not group.runs and due_s is not None and time.monotonic() >= due_s

    def _tell_new_syncer(self) -> None:
        """What a syncer that was started again has missed."""
        assert self._injector is not None
        for group in self._islands:
            if group.removed:
                self._tell({"event": "removed", "island": group.name, "reason": group.removed_for})
            elif not group.runs:
                reason = group.last_error.what if group.last_error is not None else "its process ended"
                said = {"event": "exited", "island": group.name, "reason": reason, "returns": group.returns}
                self._tell(said)
        self._injector.syncer_restarted(self._now_s())

    def _tell(self, said: dict[str, Any]) -> None:
        self._children.tell_syncer(json.dumps(said).encode() + b"\n")

    # ---- islands that come and go (run.members) ----------------------------------------------------

    def add_island(self, cfg: Config, name: str) -> Group:
        """Take on the configuration with the new island, which is on the disk, and start it."""
        self.cfg = self._children.cfg = cfg
        issue(self.run.keys, name)
        group = self._groups[name] = self._make_group(name)
        self._tell({"event": "added", "island": name})
        group.start()
        return group

    def remove_island(self, name: str, reason: str) -> Group:
        """Have an island leave for good; `removed` is set when it has."""
        group = self._groups[name]
        group.removed_for = reason
        group.policy.retire()
        if group.runs:
            group.ask_to_end(self.cfg.launcher.stop_timeout_s)
        else:
            group.removed = True
            self._tell({"event": "removed", "island": name, "reason": reason})
        return group

    def islands_left(self) -> list[str]:
        """Islands that run or will run again, without those that are leaving."""
        return [group.name for group in self._islands if group.returns and not group.removed_for]

    # ---- the tape ----------------------------------------------------------------------------------

    def _poll_files(self) -> None:
        for record in self._events.poll():
            self._view.apply(record)
            self._on_event(record)
        for record in self._metrics.poll():
            self._view.apply(record)
            if isinstance(step := record.get("step"), int) and record.get("source") != SYNCER:
                self._step = max(self._step, step)
            for sink in self._sinks:
                sink.write(record)

    def _on_event(self, record: dict[str, Any]) -> None:
        """What the syncer says of others, and of itself."""
        match record.get("event"):
            case "join" | "return":
                for group in self._of_this_start([record.get("learner")], record):
                    group.joined = True
                    group.policy.proved()
            case "merge":
                for group in self._of_this_start([SYNCER, *record.get("learners", ())], record):
                    if group.joined or group is self._syncer:
                        group.policy.good()
            case "expelled":
                for group in self._of_this_start([record.get("learner")], record):
                    group.kill(f"thrown out: {record.get('reason')}")
            case "finish":
                self._finished = True
            case "result":
                self._finished = True
                self._result = record

    def _of_this_start(self, names: list[Any], record: dict[str, Any]) -> list[Group]:
        """The groups of these names that were started before the record was written."""
        time_s = self.started_s + float(record.get("time") or 0.0)
        groups = [self._groups[name] for name in names if name in self._groups]
        return [group for group in groups if group.runs and time_s >= group.started_s]

    def _record(self, event: str, data: dict[str, Any]) -> None:
        self._own_events.write({"time": round(self._now_s(), 4), "event": event, **data})

    def _note_error(self, name: str, error: DilocoError) -> None:
        line = f"{error.what} ({error.why})" if error.why else error.what
        self._record("error", {"process": name, "message": line, "log": f"logs/{name}.log"})

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
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            kept = f"go on with it: diloco resume {self.run.path}" if any(self.run.checkpoints.glob("step-*")) else ""
            return Interrupted(self._signal, f"stopped by {name}", hint=kept)
        assert self._syncer_end is not None
        code, error = self._syncer_end.code, self._syncer_end.error
        if not self._result:
            error = error or DilocoError("the syncer ended before its run", where=SYNCER)
            if self._syncer.policy.proven:
                error.hint = f"diloco resume {self.run.path}; {error.hint}"
            return error
        status = self._result["status"]
        # The result is written when everything is saved: a syncer killed while it says goodbye has done its work.
        if status == "completed" and code <= 0:
            return None
        if status == "quorum_lost":
            return self._quorum_lost()
        return error or DilocoError("the run ended early", where=SYNCER, why=str(self._result.get("reason", "")))

    def _quorum_lost(self) -> DilocoError:
        """The first island's own error, if the run never got going; else what is left of the quorum."""
        self._poll_islands_for_errors()
        reason = str(self._result.get("reason", ""))
        first = next(iter(self._island_errors.values()), None)
        if self._result.get("merges") == 0 and first is not None:
            return DilocoError(first.what, where=first.where, why=first.why, hint=first.hint)
        hint = f"diloco resume {self.run.path}"
        return QuorumLost("fewer learners than the quorum are left", where="sync.quorum", why=reason, hint=hint)

    def _poll_islands_for_errors(self) -> None:
        """A learner's death reaches the syncer before its exit code reaches us: wait a moment for the latter."""
        deadline_s = time.monotonic() + LEARNERS_END_S
        while not self._island_errors and time.monotonic() < deadline_s:
            running = [group for group in self._islands if group.runs]
            if not running:
                return
            for group in running:
                end = group.poll(time.monotonic())
                if end is not None and end.error is not None:
                    self._island_errors[group.name] = end.error
            time.sleep(POLL_S / 2)

    def _end_all(self) -> None:
        """No process of the run is left when this returns, and nothing that is asked stays unanswered."""
        if self._injector is not None:
            self._injector.close()
        # What has not joined yet has nothing to end in order.
        waiting = [group for group in self._islands if group.runs and group.joined]
        deadline_s = time.monotonic() + (LEARNERS_END_S if self._stop_deadline_s else 0.0)
        waiting = self._still_there(waiting, min(deadline_s, max(self._stop_deadline_s, time.monotonic())))
        for group in waiting:
            group.terminate()
        self._still_there(waiting, time.monotonic() + 1.0)
        for group in self._groups.values():
            group.end_now()
        self._children.close()
        if self._members is not None:
            self._members.close("the run has ended")

    @staticmethod
    def _still_there(groups: list[Group], deadline_s: float) -> list[Group]:
        """Those that have not ended by then."""
        while groups and time.monotonic() < deadline_s:
            groups = [group for group in groups if group.poll(time.monotonic()) is None and group.runs]
            time.sleep(POLL_S / 4)
        return groups

    @staticmethod
    def _status(error: DilocoError | None, result: dict[str, Any]) -> str:
        """As interface.md names them."""
        if isinstance(error, Interrupted):
            return "stopped"
        if isinstance(error, QuorumLost):
            return "waiting"
        return "failed" if error is not None else str(result.get("status", "failed"))

    def _summary(self, error: DilocoError | None) -> dict[str, Any]:
        result = self._result
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self._status(error, result),
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
            "faults": dict(sorted(self._injector.counts.items())) if self._injector is not None else {},
            "restarts": sum(group.policy.restarts for group in self._groups.values()),
            "run_dir": str(self.run.path),
        }


def _dialable(host: str) -> str:
    """What learners on this machine dial: a wildcard address is no destination."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
