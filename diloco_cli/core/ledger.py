"""Where every token went, goodput and uptime: definitions and arithmetic.

Owns: the token account of algorithm.md ("Every token is accounted for"). Called by: core.syncer.

The account is kept per learner and fragment, in whole tokens, because a token is merged fragment by fragment:

    processed = merged + late + refused + lost + pending        for every learner and every fragment

* merged: in a contribution that a merge took.
* late: in a contribution that missed its merge and was dropped, or processed while a sync of the fragment was under
  way, so that the install (alpha = 0) overwrote it. The latter part is the price of tau and is kept apart as overlap.
* refused: in a contribution that was refused (NaN, wrong size, unknown version).
* lost: not yet settled when the learner went away.
* pending: not yet settled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MERGED, LATE, REFUSED, LOST = "merged", "late", "refused", "lost"


@dataclass(slots=True)
class LearnerAccount:
    """One stay of one learner: from its joining to its leaving.

    Attributes:
        processed: tokens since joining.
        settled: per fragment, tokens that have met their fate.
    """

    num_fragments: int
    processed: int = 0
    settled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settled = [0] * self.num_fragments


class Ledger:
    """Token account of a run."""

    def __init__(self, num_fragments: int) -> None:
        self.num_fragments = num_fragments
        self._open: dict[str, LearnerAccount] = {}
        self._processed_before = 0
        self._fates = {fate: [0] * num_fragments for fate in (MERGED, LATE, REFUSED, LOST)}
        self._overlap = [0] * num_fragments

    def join(self, learner: str) -> None:
        """Open an account; an open one of the same name is closed first."""
        self.leave(learner)
        self._open[learner] = LearnerAccount(self.num_fragments)

    def processed(self, learner: str, tokens: int) -> None:
        """Raise a learner's tokens since joining (reports may arrive out of order with contributions)."""
        account = self._open[learner]
        account.processed = max(account.processed, tokens)

    def settle(self, learner: str, fragment: int, fate: str, tokens: int, *, overlap: bool = False) -> None:
        """Give `tokens` of a learner's fragment their fate."""
        assert tokens >= 0, tokens
        account = self._open[learner]
        account.settled[fragment] += tokens
        # A contribution can overtake the report of its own steps, which travels on another connection.
        account.processed = max(account.processed, account.settled[fragment])
        self._fates[fate][fragment] += tokens
        if overlap:
            self._overlap[fragment] += tokens

    def reclaim(self, fragment: int, fate: str, tokens: int, *, overlap: int = 0) -> None:
        """Tokens settled as late or refused, `overlap` of them as overlap, were merged after all.

        A later contribution from the same base contains them, or a late one was kept (`late: next`).
        """
        self._fates[fate][fragment] -= tokens
        self._fates[MERGED][fragment] += tokens
        self._overlap[fragment] -= overlap
        assert self._fates[fate][fragment] >= 0
        assert self._overlap[fragment] >= 0

    def unmerge(
        self, learner: str | None, fragment: int, unsettled: int, *, late: int, refused: int, overlap: int
    ) -> None:
        """A merge did not happen after all: the inverse of settle (MERGED, `unsettled`) and of reclaim.

        learner: None if its account has been closed since; what it had not settled is lost then.
        """
        self._fates[MERGED][fragment] -= unsettled + late + refused
        self._fates[LATE][fragment] += late
        self._fates[REFUSED][fragment] += refused
        self._overlap[fragment] += overlap
        if learner is None:
            self._fates[LOST][fragment] += unsettled
        else:
            self._open[learner].settled[fragment] -= unsettled

    def settled(self, learner: str, fragment: int) -> int:
        """Tokens of a learner's fragment in its present stay that have met their fate."""
        return self._open[learner].settled[fragment]

    def processed_by(self, learner: str) -> int:
        """A learner's tokens in its present stay."""
        return self._open[learner].processed

    def lose(self, tokens: int) -> None:
        """Tokens that were processed outside of any stay: by a learner that was counted as gone, and trained on."""
        self._processed_before += tokens
        for fragment in range(self.num_fragments):
            self._fates[LOST][fragment] += tokens

    def leave(self, learner: str) -> None:
        """Close an account: what is not settled is lost."""
        account = self._open.pop(learner, None)
        if account is None:
            return
        self._processed_before += account.processed
        for fragment, settled in enumerate(account.settled):
            self._fates[LOST][fragment] += account.processed - settled

    @property
    def processed_tokens(self) -> int:
        """Tokens processed by all learners, ever."""
        return self._processed_before + sum(a.processed for a in self._open.values())

    def of_fragment(self, fragment: int) -> dict[str, int]:
        """The exact account of one fragment; processed is the sum of the others."""
        fates = {fate: counts[fragment] for fate, counts in self._fates.items()}
        pending = sum(a.processed - a.settled[fragment] for a in self._open.values())
        return {"processed": self.processed_tokens, **fates, "pending": pending}

    def summary(self) -> dict[str, int]:
        """The account of the run: means over fragments in whole tokens, `merged` taking the rounding."""
        rows = [self.of_fragment(f) for f in range(self.num_fragments)]
        mean = {
            fate: round(sum(r[fate] for r in rows) / self.num_fragments) for fate in (LATE, REFUSED, LOST, "pending")
        }
        processed = self.processed_tokens
        return {"processed": processed, MERGED: processed - sum(mean.values()), **mean}

    @property
    def useful_share(self) -> float | None:
        """Share of processed tokens not wasted: all but lost, refused, and late beyond the planned overlap."""
        processed = self.processed_tokens * self.num_fragments
        if not processed:
            return None
        wasted = sum(sum(self._fates[fate]) for fate in (LOST, REFUSED, LATE)) - sum(self._overlap)
        return 1.0 - wasted / processed


@dataclass(slots=True)
class Uptime:
    """Share of the time in which at least one learner trains (algorithm.md, Goodput and uptime)."""

    started_s: float | None = None
    training_since_s: float | None = None
    training_s: float = 0.0

    def change(self, now_s: float, num_training: int) -> None:
        """Tell how many learners train from now on. The clock starts with the first one."""
        if self.started_s is None and num_training:
            self.started_s = now_s
        if self.training_since_s is None and num_training:
            self.training_since_s = now_s
        elif self.training_since_s is not None and not num_training:
            self.training_s += now_s - self.training_since_s
            self.training_since_s = None

    def share(self, now_s: float) -> float | None:
        """Uptime so far; None before the first learner trained."""
        if self.started_s is None or now_s <= self.started_s:
            return None
        running = now_s - self.training_since_s if self.training_since_s is not None else 0.0
        return (self.training_s + running) / (now_s - self.started_s)
