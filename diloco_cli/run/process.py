"""What every process of a run does first and last: die with its parent, log to its own file, say why it died.

Owns: the parent watch, the error file RUN/logs/PROCESS.error.json, thread counts. Called by: run.syncer_main,
run.learner_main, run.launcher.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco_cli.errors import DilocoError, LostConnection
from diloco_cli.run.rundir import RunDir, write_json, write_text

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
PARENT = "DILOCO_PARENT"
"""Environment variable: the pid of whoever started this process."""


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, however it dies.

    A launcher or torchrun agent that is killed with SIGKILL cannot clean up, and torchrun's workers live on
    (spec/environment.md 4). Where there is no such call (not Linux), a thread watches for being re-parented.

    Args:
        parent: whose death it is; None: $DILOCO_PARENT, since the parent may have died before this is called.
    """
    if parent is None:
        parent = int(os.environ.get(PARENT) or os.getppid())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def redirect_output(log: Path) -> None:
    """Send this process's stdout and stderr, C libraries included, to its log file."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def ignore_terminal_signals() -> None:
    """Ctrl-C reaches the launcher alone, which ends everybody in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def beat(run: RunDir, process: str, interval_s: float) -> None:
    """Have a thread touch RUN/alive/PROCESS every `interval_s`, for the launcher to see. The file holds the pid.

    A stopped process beats no more; one that waits for its syncer does. A full disk does not stop the beats.
    """
    file = run.alive(process)

    def touch() -> None:
        while True:
            with suppress(OSError):
                if file.exists():
                    os.utime(file)
                else:
                    write_text(file, f"{os.getpid()}\n")
            time.sleep(interval_s)

    threading.Thread(target=touch, name="beat", daemon=True).start()


def run_guarded(run: RunDir, process: str, body: Any) -> int:
    """Run body(); on an error leave it in the log and in the error file. Returns the process's exit code."""
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    log.info("%s: pid %d, parent %d", process, os.getpid(), os.getppid())
    try:
        body()
    except DilocoError as error:
        report = {"what": error.what, "where": error.where, "why": error.why, "hint": error.hint}
        report |= {"exit_code": str(error.exit_code), "again": "yes" if isinstance(error, LostConnection) else ""}
        _leave_error(run, process, report, error)
        return error.exit_code
    except BaseException as error:
        report = {"what": f"{process} failed: {type(error).__name__}: {error}", "where": "", "why": "", "hint": ""}
        report |= {"exit_code": "1", "again": ""}
        _leave_error(run, process, report, error)
        return 1
    log.info("%s: ended in order", process)
    return 0


def _leave_error(run: RunDir, process: str, report: dict[str, str], error: BaseException) -> None:
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    try:
        write_json(run.error(process), report)
    except OSError as failed:
        print(f"{process}: the error file could not be written: {failed}", file=sys.stderr)


def read_error(run: RunDir, process: str) -> dict[str, str] | None:
    """What a process said of its own death; None if it could not."""
    try:
        report = json.loads(run.error(process).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {str(k): str(v) for k, v in report.items()} if isinstance(report, dict) else None
