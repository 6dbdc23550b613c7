"""What the syncer remembers: settings, learners, contributions in hand, rounds. Plain data for core.syncer.

Owns: the token booking of one learner's contributions (LearnerState.take_in_hand), since it is arithmetic on this data.
The rules are in core.syncer, the account of the whole run in core.ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_cli.core.quorum import Average
from diloco_cli.core.types import Contribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerSettings:
    """What the syncer decides by. Steps are inner steps, times seconds; see config.schema for the meaning."""

    num_fragments: int
    chips: Mapping[str, int]
    """Expected learners and the ranks of each."""
    inner_steps: int = 24
    overlap_steps: int = 2
    quorum: int = 1
    grace_safety: float = 0.9
    keep_late: bool = False
    lockstep: bool = False
    target_steps: int = 1000
    finish_tolerance: float = 0.1
    finish_wait_s: float = 10.0
    heartbeat_timeout_s: float = 10.0
    start_timeout_s: float = 120.0
    quorum_timeout_s: float = 0.0
    """With fewer learners than the quorum, how long those that may come back are waited for."""
    snapshot_every_s: float | None = None
    snapshot_every_steps: int | None = None
    """Steps of the clock between two snapshots."""
    max_bad_in_a_row: int = 3
    """So many bad contributions in a row take a learner out, until its process is another one."""
    anchor_history: int = 4
    """Versions a contribution's base may be behind; older ones are unknown (nobody keeps their parameters)."""


@dataclass(slots=True)
class Counted:
    """One learner's token counter for one fragment, from one install to the next.

    Attributes:
        tokens: the highest count seen, in a contribution or at the install that ended it. All of these are settled,
            but for what is in a round.
        refused: of these, settled as refused.
        overlap: of these, the last ones, settled by the install that overwrote them.
    """

    tokens: int = 0
    refused: int = 0
    overlap: int = 0


@dataclass(slots=True)
class LearnerState:
    """What the syncer knows of a live learner."""

    last_seen_s: float
    versions: list[int]
    """Per fragment: the version it last installed."""
    merged_base: list[int]
    """Per fragment: base version of its last contribution that a merge took; -1 if none."""
    counted: list[dict[int, Counted]]
    """Per fragment and base version: its counter since that install, as far as it is known here."""
    progress_at_s: float
    """When it last reported a new step."""
    last_cuts: list[int]
    """Lock-step, per fragment: it sends nothing for cuts up to this step (it joined then, or has sent it before)."""
    session: str = ""
    joined_at_step: int = 0
    step: int = 0
    step_time: Average = field(default_factory=Average)
    busy_s: float = 0.0
    bad_in_a_row: int = 0
    """Contributions, whatever their fragment."""
    bad_of_fragment: dict[int, int] = field(default_factory=dict)
    """In a row, of one fragment: a single tensor that is NaN is hidden by good contributions of others."""

    def count_bad(self, fragment: int) -> int:
        """One more bad contribution; the longest row of them now."""
        self.bad_in_a_row += 1
        self.bad_of_fragment[fragment] = self.bad_of_fragment.get(fragment, 0) + 1
        return self.longest_bad_row

    @property
    def longest_bad_row(self) -> int:
        """Bad contributions in a row, of all fragments or of one."""
        return max(self.bad_in_a_row, *self.bad_of_fragment.values(), 0)

    def count_good(self, fragment: int) -> None:
        """A good one ends the rows that it belongs to."""
        self.bad_in_a_row = 0
        self.bad_of_fragment.pop(fragment, None)

    def take_in_hand(self, c: Contribution, newest: int) -> Entry:
        """Book a contribution's tokens as being in hand; `newest` is its fragment's newest version."""
        of_fragment = self.counted[c.fragment]
        if c.base_version not in of_fragment:
            if not self.versions[c.fragment] <= c.base_version <= newest:
                return Entry(c)
            # The report of an install can be overtaken by what was sent after it.
            of_fragment[c.base_version] = Counted()
        counted = of_fragment[c.base_version]
        tokens = max(0, c.tokens)
        unsettled = max(0, tokens - counted.tokens)
        refused = min(counted.refused, tokens - unsettled)
        late = tokens - unsettled - refused
        overlap = min(late, max(0, tokens - (counted.tokens - counted.overlap))) if counted.overlap else 0
        counted.tokens = max(tokens, counted.tokens)
        return Entry(c, unsettled, late, refused, overlap)


@dataclass(frozen=True, slots=True)
class Closed:
    """A stay that is over, as far as its learner may come back to it: tokens and steps that the account knows of."""

    tokens: int
    step: int
    step_time_s: float | None
    expelled: bool


@dataclass(slots=True)
class Entry:
    """A contribution in hand, with the fates that its tokens have met before.

    A learner's contributions from one base contain each other, so an earlier one may have been late or refused; an
    install that overtook the contribution has settled its tokens as late, too. If it is merged, they were not.
    """

    contribution: Contribution
    unsettled: int = 0
    late: int = 0
    refused: int = 0
    overlap: int = 0
    """Of the late ones."""


@dataclass(slots=True)
class Booked:
    """What was booked for a contribution when its merge started, so that a snapshot can leave the merge out."""

    entry: Entry
    state: LearnerState
    merged_base_before: int


@dataclass(slots=True)
class Round:
    """One collection of one fragment."""

    opened_at_s: float
    asked: set[str]
    awaited: set[str]
    """Asked when the round opened: these are waited for, within the grace window."""
    wait_for_all: bool
    pulled: bool
    """Learners are asked, rather than sending by their own schedule."""
    refused: set[str] = field(default_factory=set)
    """Answered, but with something that may not be merged: nobody waits for them in this round."""
    entries: dict[str, Entry] = field(default_factory=dict)
    kept: list[Entry] = field(default_factory=list)
    quorum_at_s: float | None = None
    grace_until_s: float | None = None
    merge_started_s: float | None = None
    merge_reason: str = ""
    members: tuple[Contribution, ...] = ()
    booked: list[Booked] = field(default_factory=list)
