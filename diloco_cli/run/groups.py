"""One process group of a run as the launcher sees it: an island's ranks, or the syncer, through all its starts.

Owns: the files that a group leaves for the launcher (alive/PROCESS, logs/PROCESS.error.json), what an end means in
words, and the signals to a group. Decides nothing: run.supervisor has the policy, run.launcher acts on it.
Called by: run.launcher, run.injector, run.members.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from diloco_cli.errors import DilocoError
from diloco_cli.run import process
from diloco_cli.run.children import Child
from diloco_cli.run.rundir import RunDir
from diloco_cli.run.supervisor import End, Pulse, Supervised


class Group:
    """One island or the syncer.

    Attributes:
        processes: names of its processes, as in alive/ and logs/.
        policy: when it is started again.
        started_s: time.monotonic() of its newest start.
        joined: it has taken part since then.
        asked: it was told to end, so that its end is no error.
        dying: its end is under way; it is no target for anything any more.
        removed_for: why it is to leave for good; empty if it is not.
        removed: it has left for good.
        last_error: of its latest end.
    """

    def __init__(
        self,
        name: str,
        run: RunDir,
        start: Callable[[], Child],
        processes: Sequence[str],
        policy: Supervised,
        pulse: Pulse,
    ) -> None:
        self.name = name
        self.processes = list(processes)
        self.policy = policy
        self.started_s = 0.0
        self.joined = False
        self.asked = False
        self.dying = False
        self.removed_for = ""
        self.removed = False
        self.last_error: DilocoError | None = None
        self._run = run
        self._start = start
        self._pulse = pulse
        self._child: Child | None = None
        self._past: list[Child] = []
        self._killed_for = ""
        self._kill_at_s = float("inf")

    # ---- its life ----------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        """Whether it has processes."""
        return self._child is not None

    @property
    def returns(self) -> bool:
        """Whether it runs, or will again."""
        return self.runs or self.policy.due_s is not None

    def start(self) -> None:
        """Start it, after what its last start left behind is removed."""
        for name in self.processes:
            with suppress(FileNotFoundError):
                self._run.error(name).unlink()
            with suppress(FileNotFoundError):
                self._run.alive(name).unlink()
        self.started_s = time.monotonic()
        self.joined = self.asked = self.dying = False
        self._killed_for = ""
        self._kill_at_s = float("inf")
        self._pulse.started(self.started_s)
        self.policy.started()
        self._child = self._start()

    def poll(self, now_s: float) -> End | None:
        """How it ended, once for each start. Kills it when it hangs, and when it was asked to end and has not."""
        if self._child is None:
            return None
        code = self._child.poll()
        if code is None:
            if hung := self._pulse.look(now_s, {p: self._mark(p) for p in self.processes}):
                self.kill(hung)
            elif now_s > self._kill_at_s:
                self.kill("it did not end in time")
            return None
        self._child.kill()  # members that its own end has not ended
        self._past.append(self._child)
        self._child = None
        end = self._end_of(code)
        self.last_error = end.error
        return end

    def kill(self, reason: str) -> None:
        """End it now; poll() tells when that is done."""
        if self._child is not None and not self._killed_for:
            self._killed_for = reason
            self.dying = True
            self._child.kill()

    def ask_to_end(self, timeout_s: float) -> None:
        """SIGTERM to its ranks; it is killed if it has not ended by then."""
        if self._child is None:
            return
        self.asked = self.dying = True
        self._kill_at_s = time.monotonic() + timeout_s
        for pid in self.pids() or self._child.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def terminate(self) -> None:
        """SIGTERM to what was started directly."""
        if self._child is not None:
            self._child.terminate()

    def end_now(self) -> None:
        """Nothing of it is left when this returns."""
        for child in [*self._past, *([self._child] if self._child is not None else [])]:
            child.kill()
            child.reap()

    # ---- its processes -----------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether all its processes have given a sign of life since its start."""
        return self.runs and not self.dying and all(self._mark(p) is not None for p in self.processes)

    def pids(self, rank: int | None = None) -> list[int]:
        """Its processes, or the one of a rank; those that have not come up yet are missing."""
        if self._child is None:
            return []
        names = self.processes if rank is None else self.processes[rank : rank + 1]
        return [pid for name in names if (pid := self._pid(name)) is not None]

    def _pid(self, name: str) -> int | None:
        try:
            return int(self._run.alive(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _mark(self, name: str) -> int | None:
        try:
            return self._run.alive(name).stat().st_mtime_ns
        except OSError:
            return None

    # ---- how it ended ------------------------------------------------------------------------------

    def _end_of(self, code: int) -> End:
        if self._killed_for:
            return End(code=code, error=DilocoError(self._killed_for, where=self.name, hint=self._log_hint))
        if code == 0:
            return End(code=0)
        # Which of several ranks fell first, and which only noticed, is told by the signal.
        if code > 0 and (said := self._own_error()) is not None:
            report, error = said
            return End(code=int(report.get("exit_code") or code), error=error, own=True, again=bool(report["again"]))
        return End(code=code, error=self._unexplained(code))

    def _own_error(self) -> tuple[dict[str, str], DilocoError] | None:
        """What the first of its processes that failed said itself."""
        said = [p for p in self.processes if self._run.error(p).exists()]
        said.sort(key=lambda p: self._run.error(p).stat().st_mtime_ns)
        for candidate in said:
            if report := process.read_error(self._run, candidate):
                where = f"{self.name}: {report['where']}" if report.get("where") else self.name
                error = DilocoError(
                    report.get("what", ""),
                    where=where,
                    why=report.get("why", ""),
                    hint=report.get("hint") or self._log_hint,
                )
                return {"again": "", **report}, error
        return None

    def _unexplained(self, code: int) -> DilocoError:
        """What can be told from its end alone."""
        how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            # What is so killed says nothing any more; what the log ends with has nothing to do with it.
            why = "" if self.dying else "perhaps it ran out of memory"
        else:
            why = last_line(self._run.log(self.name))
        return DilocoError(f"{self.name} {how}", where=self.name, why=why, hint=self._log_hint)

    @property
    def _log_hint(self) -> str:
        return f"its log: {self._run.log(self.name)}"


def last_line(path: Path, limit_bytes: int = 4096) -> str:
    """The last line of a log that says something (progress is not that); empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - limit_bytes))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip() and " INFO " not in line), "")
