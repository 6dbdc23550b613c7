"""Messages: what learners and the syncer say to each other, and the strict way in and out of frame headers.

Two connections per learner. On *control* go small messages; on *bulk* go ContributionMsg and MergedMsg, each with a
payload of wire.codecs. Whoever connects says Hello first, on both.
Owns: the message types, their numbers and fields. Must not: do I/O, or build anything from a header but these
classes out of JSON values: an unknown type, an unknown, missing or mistyped field is a ProtocolError.
Called by: run.channel and run.listener (coding), run.syncer_main and run.learner_main (meaning).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_type_hints

from diloco_cli.wire.frames import PROTOCOL_VERSION, ProtocolError, encode_frame

MAX_INT = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of every connection, learner to syncer.

    Attributes:
        island: the learner's name; must be the name in its certificate.
        kind: "control" or "bulk".
        layout_hash: core.fragments.Layout.hash of the learner's model.
        layout: what the syncer needs to name the first difference when the hashes differ.
        version: version of the diloco package.
        session: made new by each learner process, so that its two connections are told from those of a predecessor.
            A learner that goes on from a snapshot has the one that is in there.
        attempt: counts the connections of a session, from 0.
        returns: it has trained before in this session; Returning follows.
        batch_tokens: tokens of one inner step.
    """

    TYPE: ClassVar[int] = 1
    protocol: int = PROTOCOL_VERSION
    island: str
    kind: str
    layout_hash: str
    layout: dict[str, Any] = field(default_factory=dict)
    version: str
    session: str
    attempt: int = 0
    returns: bool = False
    batch_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The syncer takes the learner in, with the settings that it adopts (algorithm.md, Learner).

    Attributes:
        returned: the learner goes on with its own counters; otherwise all fragments follow, and it begins with them.
        taken_steps: steps that its island has taken so far: where it is in its data.
    """

    TYPE: ClassVar[int] = 2
    settings: dict[str, Any]
    global_step: int
    versions: list[int]
    returned: bool = False
    taken_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The syncer does not take the learner in; the connection closes after this."""

    TYPE: ClassVar[int] = 3
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Heartbeat with progress, learner to syncer.

    Attributes:
        step: the learner's own step count.
        tokens: cumulative since joining.
        step_time_s: mean seconds per step since the last report; None without a step.
        metrics: loss, learning rate and so on, by name; may be non-finite.
        phases: seconds spent since the last report, by phase.
    """

    TYPE: ClassVar[int] = 4
    step: int
    tokens: int
    step_time_s: float | None
    metrics: dict[str, float]
    phases: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The learner installed `version`; tokens and steps are its counters just before the reset.

    waited_s: how long the fragment lay at the learner until its next step boundary.
    """

    TYPE: ClassVar[int] = 5
    fragment: int
    version: int
    tokens: int
    steps: int
    step: int
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A validation loss in nats per token, with the bigram model's on the same text where known."""

    TYPE: ClassVar[int] = 6
    step: int
    loss: float
    bigram: float | None
    tokens: int
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The learner leaves in order."""

    TYPE: ClassVar[int] = 7
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullMsg:
    """The syncer asks for a fragment."""

    TYPE: ClassVar[int] = 8
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishMsg:
    """The run is over for this learner: finish up."""

    TYPE: ClassVar[int] = 9
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateMsg:
    """The syncer asks for a final validation of the parameters installed last."""

    TYPE: ClassVar[int] = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life of the syncer."""

    TYPE: ClassVar[int] = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMsg:
    """Stop at once, in order."""

    TYPE: ClassVar[int] = 12
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionMsg:
    """One learner's values of one fragment (or one part of it); the payload holds `numel` elements of `wire`."""

    TYPE: ClassVar[int] = 13
    fragment: int
    base_version: int
    tokens: int
    steps: int
    sent_at_step: int
    wire: str
    numel: int
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedMsg:
    """A merged fragment (or one part of it).

    Attributes:
        taken: the receiver's own contribution is inside.
        cut: step of the last snapshot that was cut before this was published, plus 1 (0: none): the receiver saves its
            state for that one before it installs this.
    """

    TYPE: ClassVar[int] = 14
    fragment: int
    version: int
    wire: str
    numel: int
    taken: bool
    global_step: int
    cut: int = 0
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """First message of a learner that returns: where it stands (core.types.LearnerReturned).

    sent_at: 0 for nothing, else the step of the sending plus 1.
    """

    TYPE: ClassVar[int] = 15
    step: int
    tokens: int
    joined_at_step: int
    versions: list[int]
    fragment_tokens: list[int]
    sent_at: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMsg:
    """A snapshot was cut at the global step `step`: save your state at the next step boundary, for that one."""

    TYPE: ClassVar[int] = 16
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMsg:
    """A failure on purpose that the learner's side of the link performs (core.faults: partition, degrade, corrupt)."""

    TYPE: ClassVar[int] = 17
    kind: str
    duration_s: float
    rate_bps: float | None
    latency_s: float | None
    loss: float
    payload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUp:
    """The syncer to a learner: a shard that was away has you connected again; say where you stand (Reached)."""

    TYPE: ClassVar[int] = 20
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A learner's answer to ShardUp (core.types.FragmentsReached).

    sent_at: per fragment of that shard, in order: 0 for nothing, else the step of the sending plus 1.
    """

    TYPE: ClassVar[int] = 21
    shard: int
    step: int
    sent_at: list[int]


# ---- between the syncer and its shards (run.shards, run.shard_main) ----------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAttach:
    """Syncer to shard: what holds. The shard loads its fragments and says ShardReady.

    Attributes:
        versions: the newest of each fragment of the run.
        slots: fragment -> version -> slot (run.durable), of the versions that are kept.
    """

    TYPE: ClassVar[int] = 30
    versions: list[int]
    slots: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReady:
    """Shard to syncer: its fragments are loaded."""

    TYPE: ClassVar[int] = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMerge:
    """Syncer to shard: core.types.StartMerge, a list per field of its members; slots: fragment -> where to write it."""

    TYPE: ClassVar[int] = 32
    fragment: int
    version: int
    learners: list[str]
    base_versions: list[int]
    tokens: list[int]
    steps: list[int]
    sent_at_steps: list[int]
    handles: list[int]
    slots: dict[str, Any]
    delta_wire: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMerged:
    """Shard to syncer: the merge is done, and written (fragment -> version), or why not."""

    TYPE: ClassVar[int] = 33
    fragment: int
    version: int
    written: dict[str, Any]
    failed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDigest:
    """Shard to syncer: the digest of a merged fragment."""

    TYPE: ClassVar[int] = 34
    fragment: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPublish:
    """Syncer to shard: send the newest version of a fragment to these learners, in some of which it has a part."""

    TYPE: ClassVar[int] = 35
    fragment: int
    version: int
    to: list[str]
    taken: list[str]
    global_step: int
    cut: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKeep:
    """Syncer to shard: which older versions of a fragment are still needed."""

    TYPE: ClassVar[int] = 36
    fragment: int
    keep: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFree:
    """Syncer to shard: a contribution is over."""

    TYPE: ClassVar[int] = 42
    handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLearner:
    """Shard to syncer: a learner's bulk connection is here, or gone."""

    TYPE: ClassVar[int] = 37
    learner: str
    session: str
    attempt: int
    here: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContribution:
    """Shard to syncer: a contribution is in its store under `handle`; problem, known: as run.syncer_main judges it."""

    TYPE: ClassVar[int] = 38
    learner: str
    session: str
    fragment: int
    base_version: int
    tokens: int
    steps: int
    sent_at_step: int
    handle: int
    problem: str
    known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAlive:
    """Shard to syncer: bytes of a learner are arriving; and encrypted bytes by island so far."""

    TYPE: ClassVar[int] = 39
    learner: str
    up: dict[str, float]
    down: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDrop:
    """Syncer to shard: close a learner's connection."""

    TYPE: ClassVar[int] = 40
    learner: str
    session: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFault:
    """Syncer to shard: a failure on purpose of an island's link."""

    TYPE: ClassVar[int] = 41
    island: str
    cut: bool
    duration_s: float
    rate_bps: float | None
    latency_s: float | None
    loss: float


Message = (
    Hello
    | Welcome
    | Reject
    | Report
    | Installed
    | Validation
    | Goodbye
    | PullMsg
    | FinishMsg
    | EvaluateMsg
    | Heartbeat
    | StopMsg
    | ContributionMsg
    | MergedMsg
    | Returning
    | SnapshotMsg
    | FaultMsg
    | ShardUp
    | Reached
    | ShardAttach
    | ShardReady
    | ShardMerge
    | ShardMerged
    | ShardDigest
    | ShardPublish
    | ShardKeep
    | ShardFree
    | ShardLearner
    | ShardContribution
    | ShardAlive
    | ShardDrop
    | ShardFault
)

MESSAGE_TYPES: dict[int, type[Message]] = {cls.TYPE: cls for cls in Message.__args__}
WITH_PAYLOAD = (ContributionMsg, MergedMsg)
KINDS = ("control", "bulk")
_FIELD_TYPES: dict[int, dict[str, Any]] = {
    number: {f.name: get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
    for number, cls in MESSAGE_TYPES.items()
}
# Fields that measure something which may have gone wrong; all other floats must be finite.
_MAY_BE_NON_FINITE = {"loss", "metrics"}


def encode_message(message: Message, payload_len: int = 0) -> bytes:
    """Prefix and header of the message's frame; `payload_len` bytes of payload are to follow."""
    header = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    return encode_frame(message.TYPE, header, payload_len)


def decode_message(message_type: int, header: dict[str, Any], payload_len: int = 0) -> Message:
    """The message that a frame's type and header stand for.

    Raises:
        ProtocolError: unknown type; unknown, missing or mistyped field; value out of its range; a payload where
            none belongs, or none where one does.
    """
    cls = MESSAGE_TYPES.get(message_type)
    if cls is None:
        raise ProtocolError(f"unknown message type {message_type}")
    if (payload_len > 0) != (cls in WITH_PAYLOAD):
        raise ProtocolError(f"{cls.__name__} with a payload of {payload_len} bytes")
    hints = _FIELD_TYPES[message_type]
    if header.keys() != hints.keys():
        odd = sorted(header.keys() ^ hints.keys())
        raise ProtocolError(f"{cls.__name__}: unknown or missing field {odd[0][:40]!r}")
    values = {name: _checked(cls.__name__, name, hints[name], header[name]) for name in hints}
    message = cls(**values)
    _check_ranges(message)
    return message


def _checked(where: str, name: str, kind: Any, value: Any) -> Any:
    """`value` if it is of the declared kind. Integers are 0 .. 2**63-1; whole numbers are good floats."""
    finite = name not in _MAY_BE_NON_FINITE
    good: Any
    if kind is int:
        good = _is_int(value)
    elif kind is float:
        good = _is_float(value, finite)
    elif kind == float | None:
        good = value is None or _is_float(value, finite)
    elif kind is bool or kind is str:
        good = type(value) is kind
    elif kind == list[int]:
        good = isinstance(value, list) and all(map(_is_int, value))
    elif kind == list[str]:
        good = isinstance(value, list) and all(type(v) is str for v in value)
    elif kind == dict[str, float]:
        good = isinstance(value, dict) and all(_is_float(v, finite) for v in value.values())
    else:
        assert kind == dict[str, Any], kind
        good = isinstance(value, dict)
    if not good:
        raise ProtocolError(f"{where}.{name}: {str(value)[:40]!r} is not of type {getattr(kind, '__name__', kind)}")
    return value


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _is_float(value: Any, finite: bool) -> bool:
    if type(value) is int:
        return -MAX_INT <= value <= MAX_INT
    return type(value) is float and (math.isfinite(value) or not finite)


def _check_ranges(message: Message) -> None:
    """What types alone do not say."""
    if isinstance(message, Hello) and message.kind not in KINDS:
        raise ProtocolError(f"Hello.kind: {message.kind[:40]!r} is neither control nor bulk")
    if isinstance(message, WITH_PAYLOAD):
        if message.numel < 1:
            raise ProtocolError(f"{type(message).__name__}.numel: must be at least 1")
        if message.part >= message.num_parts:
            raise ProtocolError(f"{type(message).__name__}.part: {message.part} of {message.num_parts}")
