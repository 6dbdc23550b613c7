"""Events, effects and values of the protocol core.

Owns: the vocabulary that the two state machines (core.syncer, core.learner) speak with whoever drives
them: sockets and a monotonic clock in `run`, a virtual clock in `sim`. No tensor is ever in here:
payloads are integer handles that the driver understands.

Learners are named by strings (the island's name), fragments by integers 0..P-1, versions count from 0
(the initial parameters) and grow by one per merge. Times are seconds of a monotonic clock, given by the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LearnerId = str
FragmentId = int
Handle = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One learner's parameters for one fragment, as metadata plus a payload handle.

    Attributes:
        base_version: version of the fragment that the learner's counters started from.
        tokens: tokens since that install, at the moment of the copy.
        steps: inner steps since that install, at the moment of the copy.
        sent_at_step: the learner's own step count t_m at the moment of the copy.
        handle: names the payload for the driver.
    """

    learner: LearnerId
    fragment: FragmentId
    base_version: int
    tokens: int
    steps: int
    sent_at_step: int
    handle: Handle

    @property
    def weight(self) -> float:
        """Merge weight w = tokens * (tokens / steps); zero without steps (algorithm.md, Syncer 3)."""
        return self.tokens * (self.tokens / self.steps) if self.steps > 0 else 0.0


# ---- events into SyncerCore ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerJoined:
    """A learner passed the layout check on all its connections; counters start at zero.

    session: names the learner's process, so that it is known again after a crash of the syncer.
    """

    learner: LearnerId
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReturned:
    """A learner that has joined before is connected again, and has gone on training meanwhile.

    Attributes:
        step: its own step count; tokens: since its joining.
        joined_at_step: the step it began with when it joined.
        versions: per fragment: what it has installed last.
        fragment_tokens: per fragment: tokens since that install.
        sent_at: lock-step, per fragment: the step at which it sent what it sends once more now; -1: nothing.
    """

    learner: LearnerId
    session: str
    step: int
    tokens: int
    joined_at_step: int
    versions: tuple[int, ...]
    fragment_tokens: tuple[int, ...]
    sent_at: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLeft:
    """A learner's connection closed, or the driver knows that its process ended.

    returns: it may come back (its process is restarted, its link may heal); False: it is gone for good.
    """

    learner: LearnerId
    reason: str
    returns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandAdded:
    """An island that the run did not begin with: its learner may join from now on."""

    learner: LearnerId
    chips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandRemoved:
    """An island was taken out of the run: nobody expects anything of it any more."""

    learner: LearnerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReport:
    """Heartbeat with progress: own step count, cumulative tokens since joining, mean seconds per step
    (None when no step was finished since the last report)."""

    learner: LearnerId
    step: int
    tokens: int
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerAlive:
    """Any sign of life that carries no progress (bulk bytes arriving count)."""

    learner: LearnerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionReceived:
    """A whole contribution is in memory and its bytes are sound (size, finite values)."""

    contribution: Contribution


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionRefused:
    """The driver refused a payload before it could count.

    bad: the learner itself is to blame (NaN, infinity), not its base's age.
    """

    contribution: Contribution
    reason: str
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentInstalled:
    """A learner installed `version`; `tokens` and `steps` are its counters just before the reset.

    `waited_s` is how long the fragment lay at the learner until its next step boundary.
    """

    learner: LearnerId
    fragment: FragmentId
    version: int
    tokens: int
    steps: int
    step: int
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFinished:
    """The driver has computed the merge that StartMerge asked for."""

    fragment: FragmentId
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """A timer set by SetTimer is due."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """End as soon as possible, in order (Ctrl-C)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentsLost:
    """The process that holds these fragments (a shard of the syncer) is gone, with what it had in hand of them."""

    fragments: tuple[FragmentId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentsBack:
    """A shard is back, and holds its fragments' newest versions."""

    fragments: tuple[FragmentId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentsReached:
    """A learner is connected with a shard again; what was on its way between them is lost.

    Attributes:
        step: its own step count; None while it is still joining.
        sent_at: lock-step, per fragment of `fragments`: the step at which it sent what it sends once more now; -1:
            nothing.
    """

    learner: LearnerId
    fragments: tuple[FragmentId, ...]
    step: int | None
    sent_at: tuple[int, ...]


SyncerEvent = (
    LearnerJoined
    | LearnerReturned
    | LearnerLeft
    | IslandAdded
    | IslandRemoved
    | LearnerReport
    | LearnerAlive
    | ContributionReceived
    | ContributionRefused
    | FragmentInstalled
    | MergeFinished
    | FragmentsLost
    | FragmentsBack
    | FragmentsReached
    | TimerFired
    | StopRequested
)

# ---- effects out of SyncerCore ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Ask these learners for their fragment."""

    fragment: FragmentId
    to: tuple[LearnerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMerge:
    """Merge these contributions (sorted by learner) into the fragment; the result is `version`.

    The driver owes a MergeFinished. It may free the handles of `members` afterwards.
    """

    fragment: FragmentId
    version: int
    members: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make core.recovery's dump as of now outlast this process, with the parameters of all its versions.

    Comes before what it is about is told to any learner: none ever holds what a restarted syncer does not know.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Cut here, between two merges: all versions and the core's snapshot as of now, and every learner's own state
    before it installs anything that is published after this."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Send the fragment at `version` to these learners. `taken`: whose contribution is inside."""

    fragment: FragmentId
    version: int
    to: tuple[LearnerId, ...]
    taken: tuple[LearnerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendState:
    """Send a (re)joining learner all fragments with their versions, and the global step.

    taken_steps: steps that its island has taken in all its stays before: where it is in its data.
    """

    learner: LearnerId
    global_step: int
    versions: tuple[int, ...]
    taken_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptReturn:
    """Tell a returned learner that it goes on with its counters; what it lacks is published to it after this."""

    learner: LearnerId
    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPayload:
    """Free a contribution's payload; it will not be merged."""

    handle: Handle
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """One timer per key; setting it again moves it."""

    key: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer:
    """Forget a timer, if it is set."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopLearners:
    """Ask these learners to take no further step, and to answer pulls all the same (the final cut)."""

    to: tuple[LearnerId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Close a learner's connections: it is counted as gone, or may not take part."""

    learner: LearnerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the event tape. The driver adds the time (and digests where it has them)."""

    event: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run's protocol part is over. status: completed | stopped | quorum_lost."""

    status: str
    reason: str


SyncerEffect = (
    Pull
    | StartMerge
    | Persist
    | TakeSnapshot
    | Publish
    | SendState
    | AcceptReturn
    | DropPayload
    | SetTimer
    | CancelTimer
    | StopLearners
    | Disconnect
    | Record
    | Finish
)

# ---- events into LearnerCore --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """One inner step is done; we are at a step boundary."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReceived:
    """The syncer asked for a fragment."""

    fragment: FragmentId


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedReceived:
    """A merged fragment is in memory, to be installed at the next step boundary."""

    fragment: FragmentId
    version: int
    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReceived:
    """The syncer asked to take no further step (StopLearners); pulls and installs go on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnected:
    """There is a new connection to the syncer, which knows nothing of what it had asked for on the old one."""


LearnerEvent = StepFinished | PullReceived | MergedReceived | StopReceived | Reconnected

# ---- effects out of LearnerCore -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFragment:
    """Copy the fragment off the device now and send it in the background."""

    fragment: FragmentId
    base_version: int
    tokens: int
    steps: int
    sent_at_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallFragment:
    """Install the payload now: theta <- alpha theta + (1 - alpha) Theta. Counters are those before the reset."""

    fragment: FragmentId
    version: int
    handle: Handle
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardPayload:
    """A merged fragment that a newer one replaced before it could be installed."""

    handle: Handle


LearnerEffect = SendFragment | InstallFragment | DiscardPayload
