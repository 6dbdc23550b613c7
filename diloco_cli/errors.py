"""Exceptions that a user can cause, and the exit code of each.

    DilocoError            1  the run failed
    +-- ConfigError        2  wrong usage or configuration; nothing was started
    +-- EnvironmentNotReady  3  a port, disk, host or package is not ready
    |   +-- LostConnection   3  the other side of a link is not there; the supervisor tries again
    +-- QuorumLost         4  fewer learners than the quorum are left
    +-- Interrupted        130 / 143  stopped by a signal, in order

Bugs of ours are assertions, never one of these.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_QUORUM_LOST = 4
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class DilocoError(Exception):
    """What went wrong, where, why, and what to do about it: one message, no traceback.

    Args:
        what: one sentence.
        where: the file, key, host or process.
        why: the cause, if it is not plain from `what`.
        hint: the nearest right value, or the command to run.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.hint = hint

    def as_dict(self) -> dict[str, str | int | None]:
        """The error as summary.json and `--json` give it; parts that say nothing are null."""
        parts = {name: getattr(self, name) or None for name in ("what", "where", "why", "hint")}
        return {**parts, "exit_code": self.exit_code}

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {k}: {v}" for k, v in (("where", self.where), ("why", self.why), ("hint", self.hint)) if v]
        return "\n".join(lines)


class ConfigError(DilocoError):
    """A wrong option, key or value."""

    exit_code = EXIT_CONFIG


class EnvironmentNotReady(DilocoError):
    """This machine (or a host, port, package) is not ready."""

    exit_code = EXIT_ENVIRONMENT


class LostConnection(EnvironmentNotReady):
    """The other side of a link could not be reached, or went away: trying again may help."""


class QuorumLost(DilocoError):
    """Fewer learners than the quorum are left."""

    exit_code = EXIT_QUORUM_LOST


class Interrupted(DilocoError):
    """SIGINT or SIGTERM, after an orderly end."""

    def __init__(self, signal_number: int, what: str, *, hint: str = "") -> None:
        super().__init__(what, hint=hint)
        self.exit_code = 128 + signal_number
