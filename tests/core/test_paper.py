"""One test for each claim of algorithm.md that can be checked on the cores, with the sentence it comes from."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from world import Fault, Rules, World

from diloco_cli.core.learner import LearnerCore, LearnerSettings
from diloco_cli.core.state import SyncerSettings
from diloco_cli.core.syncer import SyncerCore
from diloco_cli.core.types import (
    Contribution,
    ContributionReceived,
    ContributionRefused,
    Disconnect,
    DropPayload,
    Finish,
    FragmentInstalled,
    InstallFragment,
    LearnerAlive,
    LearnerJoined,
    LearnerLeft,
    LearnerReport,
    MergedReceived,
    MergeFinished,
    Publish,
    Pull,
    PullReceived,
    SendFragment,
    SendState,
    SetTimer,
    StartMerge,
    StepFinished,
    StopReceived,
    StopRequested,
    TimerFired,
)


def even(count: int, step_s: float = 0.1, **rules: Any) -> Rules:
    return Rules(step_s={f"i{k}": step_s for k in range(count)}, **rules)


def of(kind: type, effects: tuple[Any, ...]) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


class Syncer:
    """A SyncerCore with short calls."""

    def __init__(self, names: str = "ab", **settings: Any) -> None:
        base: dict[str, Any] = {"num_fragments": 1, "inner_steps": 4, "target_steps": 1000, **settings}
        self.core = SyncerCore(SyncerSettings(chips=dict.fromkeys(names, 1), **base))
        self.core.start(0.0)
        self.now_s = 0.0
        self.handle = 0
        for name in names:
            self.tell(LearnerJoined(learner=name))

    def tell(self, event: Any, after_s: float = 0.0) -> tuple[Any, ...]:
        self.now_s += after_s
        return self.core.handle(event, self.now_s)

    def report(self, learner: str, step: int, step_time_s: float = 1.0, after_s: float = 0.0) -> tuple[Any, ...]:
        return self.tell(LearnerReport(learner=learner, step=step, tokens=0, step_time_s=step_time_s), after_s)

    def contribution(
        self, learner: str, base: int = 0, tokens: int = 40, steps: int = 4, fragment: int = 0
    ) -> Contribution:
        self.handle += 1
        return Contribution(
            learner=learner,
            fragment=fragment,
            base_version=base,
            tokens=tokens,
            steps=steps,
            sent_at_step=0,
            handle=self.handle,
        )

    def send(self, learner: str, after_s: float = 0.0, **what: Any) -> tuple[Any, ...]:
        return self.tell(ContributionReceived(contribution=self.contribution(learner, **what)), after_s)

    def merged(self, version: int, fragment: int = 0, after_s: float = 0.0) -> tuple[Any, ...]:
        return self.tell(MergeFinished(fragment=fragment, version=version), after_s)

    def installed(
        self, learner: str, version: int, tokens: int = 40, steps: int = 4, fragment: int = 0
    ) -> tuple[Any, ...]:
        return self.tell(
            FragmentInstalled(
                learner=learner, fragment=fragment, version=version, tokens=tokens, steps=steps, step=0, waited_s=0.0
            )
        )


# ---- Learner -----------------------------------------------------------------------------------------


def learner(**settings: Any) -> LearnerCore:
    base: dict[str, Any] = {"num_fragments": 2, "inner_steps": 4, "overlap_steps": 1, "target_steps": 100, **settings}
    return LearnerCore(LearnerSettings(**base), step=0, versions=[0, 0])


def test_learner_1_counters_of_every_fragment_grow_with_each_step() -> None:
    """ "t_m += 1; for every fragment steps[p] += 1, tokens[p] += tokens in the batch" """
    core = learner()
    core.handle(StepFinished(tokens=7))
    core.handle(StepFinished(tokens=5))
    assert (core.step, core.steps, core.tokens) == (2, [2, 2], [12, 12])


def test_learner_3_sends_with_its_counters_and_base() -> None:
    """ "copy it off the device and send it in the background, with its counters and the version it started from" """
    core = learner()
    core.handle(StepFinished(tokens=7))
    (sent,) = core.handle(PullReceived(fragment=1))
    assert sent == SendFragment(fragment=1, base_version=0, tokens=7, steps=1, sent_at_step=1)
    assert not core.waits_for  # "training goes on meanwhile"


def test_learner_3_answers_once_it_has_taken_a_step() -> None:
    """ "... have taken at least one step since they last installed p" """
    core = learner()
    assert core.handle(PullReceived(fragment=0)) == ()
    (sent,) = core.handle(StepFinished(tokens=3))
    assert (sent.fragment, sent.steps) == (0, 1)


def test_learner_4_install_resets_that_fragment_only() -> None:
    """ "install it at this step boundary ...; reset steps[p], tokens[p]; note its version" """
    core = learner()
    core.handle(StepFinished(tokens=7))
    (install,) = core.handle(MergedReceived(fragment=1, version=3, handle=9))
    assert install == InstallFragment(fragment=1, version=3, handle=9, tokens=7, steps=1)
    assert (core.versions, core.steps, core.tokens) == ([0, 3], [1, 0], [7, 0])


def test_learner_never_installs_an_older_version() -> None:
    core = learner()
    core.handle(MergedReceived(fragment=0, version=3, handle=1))
    (effect,) = core.handle(MergedReceived(fragment=0, version=2, handle=2))
    assert type(effect).__name__ == "DiscardPayload"
    assert core.versions[0] == 3


def test_learner_drift_is_unbounded_by_default_and_bounded_if_wanted() -> None:
    """ "While the syncer is away, learners keep training (max_drift_steps, unlimited by default, bounds it)" """
    core = learner()
    for _ in range(90):
        core.handle(StepFinished(tokens=1))
    assert not core.waits_for
    core = learner(max_drift_steps=5)
    for _ in range(5):
        assert not core.waits_for
        core.handle(StepFinished(tokens=1))
    assert "max_drift_steps" in core.waits_for
    core.handle(MergedReceived(fragment=0, version=1, handle=1))
    assert not core.waits_for


def test_learner_stopped_takes_no_step_but_answers() -> None:
    core = learner()
    core.handle(StepFinished(tokens=1))
    core.handle(StopReceived(reason="the end"))
    assert core.waits_for == "the end"
    assert len(core.handle(PullReceived(fragment=0))) == 1
    core.handle(MergedReceived(fragment=0, version=1, handle=1))
    (zero,) = core.handle(PullReceived(fragment=0))
    assert zero.steps == 0


def test_learner_drift_bound_in_a_whole_run() -> None:
    world = World(even(2, max_drift_steps=8, latency_s=(0.3, 0.3), target_steps=40)).run()
    assert world.finished is not None
    assert world.finished.status == "completed"
    for stay in world.stays:
        since = 0
        for entry in stay.history:
            since = since + 1 if entry[0] == "step" else 0 if entry[0] == "install" else since
            assert since <= 8


# ---- Syncer: schedule ----------------------------------------------------------------------------------


def test_syncer_fragments_are_due_every_h_steps_evenly() -> None:
    """ "Fragment p is due every H global steps, offset p * H / P, so that traffic is even." """
    world = World(even(2, num_fragments=3, inner_steps=6, target_steps=60, latency_s=(0.001, 0.002))).run()
    for fragment in range(3):
        pulls = [r["global_step"] for r in world.of("pull") if r["fragment"] == fragment]
        offset = 2 * fragment or 6
        assert [p for p in pulls if p < 60][:8] == [offset + 6 * i for i in range(8)]


def test_syncer_1_a_fast_link_does_not_shrink_h() -> None:
    """ "... so a fast link does not shrink H" """
    for latency in ((0.0, 0.0), (0.3, 0.3)):
        world = World(even(3, inner_steps=6, target_steps=60, latency_s=latency, merge_s=(0.0, 0.0))).run()
        check_openings_at_least_h_apart(world, 6)


def test_syncer_a_fast_learner_does_not_shrink_h_for_the_others() -> None:
    rules = Rules(step_s={"i0": 0.05, "i1": 0.1}, inner_steps=6, target_steps=60)
    check_openings_at_least_h_apart(World(rules).run(), 6)


def check_openings_at_least_h_apart(world: World, inner_steps: int) -> None:
    """Merges follow their openings by what a quorum takes; on the whole there is one every H steps."""
    for fragment in range(world.rules.num_fragments):
        rounds: dict[int, int] = {}
        version = 0
        for _, event, data in world.records:
            if data.get("fragment") != fragment:
                continue
            version += event == "merge"
            # From the target on, steps are counted by those who still have to get there.
            if event == "pull" and data["global_step"] < world.rules.target_steps:
                rounds.setdefault(version, data["global_step"])
        openings = list(rounds.values())
        assert len(openings) >= 5
        assert all(b - a >= inner_steps for a, b in itertools.pairwise(openings))


def test_syncer_up_to_tau_fragments_are_under_way() -> None:
    """ "Up to tau fragments are under way at once." """
    for tau in (1, 3):
        syncer = Syncer("a", num_fragments=6, inner_steps=6, overlap_steps=tau)
        effects = syncer.report("a", 6)
        assert [e.fragment for e in of(Pull, effects)] == [1, 2, 3][:tau]  # the longest due first
    syncer.send("a", fragment=2)
    effects = syncer.merged(1, fragment=2)
    assert [e.fragment for e in of(Pull, effects)] == [4]


# ---- Syncer: quorum and grace --------------------------------------------------------------------------


def test_syncer_1_waits_for_k_learners_with_a_step() -> None:
    """ "Wait until K connected learners have taken at least one step since they last installed p" """
    syncer = Syncer("abc", quorum=2)
    syncer.report("a", 4)
    assert not of(StartMerge, syncer.send("a"))
    assert not of(StartMerge, syncer.send("b", tokens=0, steps=0))
    (start,) = of(StartMerge, syncer.send("c"))
    assert [c.learner for c in start.members] == ["a", "c"]  # "zero steps weigh zero"


def test_syncer_2_no_window_without_measurements() -> None:
    """ "with no measurement yet, none" """
    syncer = Syncer("abc", quorum=1)
    syncer.report("a", 4)
    (start,) = of(StartMerge, syncer.send("a", after_s=0.1))
    assert [c.learner for c in start.members] == ["a"]


def measured(**settings: Any) -> Syncer:
    """After one merge by all of three learners: quorum 0.1 s, sync 0.2 s, one second per step."""
    syncer = Syncer("abc", grace_safety=0.5, overlap_steps=4, **settings)
    syncer.report("a", 4)
    for name, after in zip("abc", (0.1, 0.0, 0.0), strict=True):
        syncer.send(name, after)
    if 0 in syncer.core.rounds and syncer.core.rounds[0].merge_started_s is None:
        raise AssertionError("not merging")
    syncer.merged(1, after_s=0.2)
    for name in "abc":
        syncer.installed(name, 1)
    return syncer


def test_syncer_2_window_is_the_formula() -> None:
    """ "at most gamma * max(0, tau * step_time - (quorum_time + sync_time))" """
    syncer = measured()
    syncer.report("a", 8)
    (timer,) = of(SetTimer, syncer.send("a", base=1, after_s=0.1))
    assert timer.at_s == pytest.approx(syncer.now_s + 0.5 * (4 * 1.0 - (0.1 + 0.2)))
    syncer.now_s = timer.at_s
    (start,) = of(StartMerge, syncer.tell(TimerFired(key=timer.key)))
    assert [c.learner for c in start.members] == ["a"]


def test_syncer_2_ends_at_once_when_all_live_learners_are_in() -> None:
    """ "It ends at once when all live learners are in." """
    syncer = measured()
    syncer.report("a", 8)
    assert not of(StartMerge, syncer.send("a", base=1, after_s=0.1))
    assert not of(StartMerge, syncer.send("b", base=1, after_s=0.1))
    (start,) = of(StartMerge, syncer.send("c", base=1, after_s=0.1))
    assert len(start.members) == 3
    assert "all live" in syncer.core.rounds[0].merge_reason


def test_syncer_2_the_last_awaited_one_leaves() -> None:
    syncer = measured()
    syncer.report("a", 8)
    syncer.send("a", base=1)
    syncer.send("b", base=1)
    assert of(StartMerge, syncer.tell(LearnerLeft(learner="c", reason="killed")))


def test_syncer_2_the_last_awaited_one_is_refused() -> None:
    syncer = measured()
    syncer.report("a", 8)
    syncer.send("a", base=1)
    syncer.send("b", base=1)
    refused = ContributionRefused(contribution=syncer.contribution("c", base=1), reason="nan")
    effects = syncer.tell(refused)
    (start,) = of(StartMerge, effects)
    assert [c.learner for c in start.members] == ["a", "b"]
    assert of(DropPayload, effects)[0].handle == refused.contribution.handle


def test_grace_learns_in_a_world_with_a_straggler() -> None:
    """Traps, "A grace window that learns, and closes early": the slow one contributes, and is waited for again."""
    steps = {"i0": 1.0, "i1": 1.0, "i2": 1.0, "i3": 1.0}
    faults = (Fault(0.0, "slow", "i3", 12.0), Fault(150.0, "slow", "i3", 1.0))
    rules = Rules(
        step_s=steps,
        num_fragments=1,
        inner_steps=6,
        overlap_steps=3,
        target_steps=300,
        latency_s=(0.01, 0.2),
        faults=faults,
        heartbeat_timeout_s=60.0,
    )
    world = World(rules).run()
    waits = [r["grace_time_s"] for r in world.of("merge") if 20 < r["t"] < 150]
    assert waits
    assert max(waits) < 0.9 * 3 * 1.3 + 0.01
    members = [(r["t"], r["learners"]) for r in world.of("merge")]
    assert any("i3" in names for t, names in members if t < 150)
    assert all(set(names) == set(steps) for t, names in members if t > 200)


def test_grace_at_k_1_two_islands_do_not_answer_alternate_rounds() -> None:
    """With slack within tau both islands are in every merge, though K = 1 would do with one."""
    world = World(even(2, 1.0, inner_steps=6, overlap_steps=2, target_steps=120, latency_s=(0.01, 0.1))).run()
    sizes = [len(r["learners"]) for r in world.of("merge")]
    # The first merges are without measurements, and so without a window.
    assert sizes.count(2) >= len(sizes) - 4
    assert set(sizes[6:]) == {2}


def test_an_island_twice_as_slow_keeps_contributing_and_slows_nobody() -> None:
    slow = Rules(step_s={"i0": 0.1, "i1": 0.1, "i2": 0.2}, inner_steps=6, overlap_steps=3, target_steps=120)
    world = World(slow).run()
    alone = World(even(2, 0.1, inner_steps=6, overlap_steps=3, target_steps=120)).run()
    assert world.finished_s < 1.1 * alone.finished_s + 10.0  # finish_wait: at most
    count = Counter(m for r in world.of("merge") for m in r["learners"])
    assert count["i2"] > 0.7 * len(world.of("merge"))
    for stay in world.stays:
        if stay.learner != "i2":
            # Nobody waits: every step but the last begins when the one before ended.
            assert sum(stay.step_times) == pytest.approx(12.0, rel=0.12)


def test_slow_hardware_ends_near_its_share_of_the_target() -> None:
    rules = Rules(step_s={"i0": 0.1, "i1": 0.2}, target_steps=100, finish_wait_s=0.0, finish_tolerance=0.1, jitter=0.0)
    world = World(rules).run()
    steps = {stay.learner: stay.core.step for stay in world.stays if stay.core}
    assert steps["i0"] == 100
    assert 48 <= steps["i1"] <= 56
    assert world.finished is not None
    assert world.finished.status == "completed"


def test_slightly_slower_learners_are_waited_for() -> None:
    rules = Rules(
        step_s={"i0": 0.1, "i1": 0.105}, target_steps=100, finish_wait_s=0.0, finish_tolerance=0.2, jitter=0.0
    )
    world = World(rules).run()
    assert all(stay.core is not None and stay.core.step == 100 for stay in world.stays)


# ---- Syncer: merge and broadcast -----------------------------------------------------------------------


def test_syncer_3_weight_is_quantity_times_tokens_per_step() -> None:
    """ "Its weight: w_m = tokens * (tokens / steps)"; "zero steps weigh zero" """
    syncer = Syncer()
    assert syncer.contribution("a", tokens=60, steps=4).weight == 900.0
    assert syncer.contribution("a", tokens=60, steps=0).weight == 0.0


def test_syncer_4_version_grows_by_one_when_the_merge_is_done() -> None:
    syncer = Syncer("a")
    syncer.report("a", 4)
    (start,) = of(StartMerge, syncer.send("a"))
    assert (start.version, syncer.core.versions) == (1, [0])
    syncer.merged(1)
    assert syncer.core.versions == [1]


def test_syncer_5_broadcast_goes_to_those_that_did_not_contribute_too() -> None:
    """ "Broadcast the new Theta_p to every connected learner, those that did not contribute included." """
    syncer = Syncer("abc", quorum=2)
    syncer.report("a", 4)
    syncer.send("a")
    syncer.send("b")
    syncer.tell(LearnerJoined(learner="d"))
    (publish,) = of(Publish, syncer.merged(1))
    assert publish.to == ("a", "b", "c", "d")
    assert publish.taken == ("a", "b")


def test_late_contribution_is_counted_and_dropped() -> None:
    """ "A contribution that arrives after its merge is counted as late and dropped" """
    syncer = Syncer("ab")
    syncer.report("a", 4)
    syncer.send("a")
    effects = syncer.send("b")
    assert len(of(DropPayload, effects)) == 1
    assert syncer.core.ledger.of_fragment(0)["late"] == 40
    syncer.merged(1)
    assert syncer.core.ledger.of_fragment(0) == {
        "processed": 80, "merged": 40, "late": 40, "refused": 0, "lost": 0, "pending": 0,
    }  # fmt: skip


def test_late_next_keeps_it_for_the_next_round() -> None:
    """ "(or, `late: next`, kept for the next round of p)" """
    syncer = Syncer("ab", keep_late=True, grace_safety=0.0)
    syncer.report("a", 4)
    syncer.send("a")
    assert not of(DropPayload, syncer.send("b"))
    syncer.merged(1)
    syncer.installed("a", 1)
    syncer.installed("b", 1, tokens=50, steps=5)
    syncer.report("a", 8)
    (start,) = of(StartMerge, syncer.send("a", base=1))
    assert [(c.learner, c.base_version) for c in start.members] == [("a", 1), ("b", 0)]
    row = syncer.core.ledger.of_fragment(0)
    assert (row["merged"], row["late"]) == (120, 10)


def test_late_next_never_merges_the_same_steps_twice() -> None:
    """The late one from base 0 is contained in the next one from base 0: only the newer one is merged."""
    syncer = Syncer("ab", keep_late=True, grace_safety=0.0)
    syncer.report("a", 4)
    syncer.send("a")
    syncer.send("b", tokens=40, steps=4)
    syncer.merged(1)
    syncer.installed("a", 1)
    syncer.report("a", 8)
    effects = syncer.send("b", base=0, tokens=80, steps=8)  # asked again before it installed
    (start,) = of(StartMerge, effects)
    assert [(c.learner, c.tokens) for c in start.members] == [("b", 80)]
    assert len(of(DropPayload, effects)) == 1
    assert syncer.core.ledger.of_fragment(0)["merged"] == 120


def test_late_tokens_that_a_later_contribution_contains_count_as_merged() -> None:
    syncer = Syncer("ab", grace_safety=0.0)
    syncer.report("a", 4)
    syncer.send("a")
    syncer.send("b")  # late: 40
    syncer.merged(1)
    syncer.installed("a", 1)
    syncer.report("a", 8)
    syncer.send("b", base=0, tokens=90, steps=9)  # the same 40 and 50 more
    row = syncer.core.ledger.of_fragment(0)
    assert (row["merged"], row["late"]) == (130, 0)


@pytest.mark.parametrize(("base", "words"), [(1, "newest is 0"), (-1, "never had"), (-9, "no longer known")])
def test_unknown_versions_are_refused(base: int, words: str) -> None:
    """ "A contribution with a NaN or infinity, of the wrong size, or from an unknown version is refused, counted" """
    syncer = Syncer("ab")
    syncer.report("a", 4)
    effects = syncer.send("a", base=base)
    (drop,) = of(DropPayload, effects)
    assert words in drop.reason
    assert not of(StartMerge, effects)


def test_refused_tokens_are_counted() -> None:
    syncer = Syncer("ab")
    syncer.report("a", 4)
    syncer.tell(ContributionRefused(contribution=syncer.contribution("a"), reason="nan"))
    assert syncer.core.ledger.of_fragment(0)["refused"] == 40


def test_k_2_of_2_with_one_refused_for_ever_still_ends() -> None:
    world = World(
        even(2, quorum=2, target_steps=40, max_bad_in_a_row=1_000, faults=(Fault(0.0, "poison", "i1"),))
    ).run()
    assert world.finished is not None
    assert world.finished.status == "completed"
    assert {m for r in world.of("merge") for m in r["learners"]} == {"i0"}
    assert world.syncer.ledger.summary()["refused"] > 0


# ---- Baselines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_offset", [False, True], ids=["streaming", "diloco"])
@pytest.mark.parametrize("tau", [1, 3, 6])
def test_lockstep_is_the_same_whatever_the_latencies(same_offset: bool, tau: int) -> None:
    """ "streaming: ... lock-step: every learner must contribute"; "diloco: all learners stop every H steps" """
    histories, merges = set(), set()
    for seed, latency in enumerate([(0.0, 0.0), (0.001, 0.1), (0.2, 0.9), (0.001, 2.0)]):
        rules = Rules(
            step_s={"i0": 0.1, "i1": 0.13, "i2": 0.3},
            num_fragments=4,
            inner_steps=6,
            overlap_steps=tau,
            target_steps=33,
            lockstep=True,
            same_offset=same_offset,
            latency_s=latency,
            seed=seed,
        )
        world = World(rules).run()
        assert world.finished is not None
        assert world.finished.status == "completed"
        target_not_reached = [
            tuple(e for e in _before_the_end(stay.history, 33)) for stay in sorted(world.stays, key=lambda s: s.learner)
        ]
        histories.add(tuple(target_not_reached))
        lists = [(r["fragment"], r["version"], tuple(r["learners"]), tuple(r["tokens"])) for r in world.of("merge")]
        merges.add(tuple(sorted(lists)))
        assert all(names == ("i0", "i1", "i2") for _, _, names, _ in lists)
    assert len(histories) == 1
    assert len(merges) == 1


def _before_the_end(history: list[tuple[Any, ...]], target: int) -> list[tuple[Any, ...]]:
    """What happened up to the last step; the order of fragments within one boundary is of no account."""
    result: list[tuple[Any, ...]] = []
    steps, boundary = 0, []
    for entry in history:
        if entry[0] == "step":
            result += [*sorted(boundary), entry]
            boundary, steps = [], steps + 1
            if steps == target:
                break
        else:
            boundary.append(entry)
    return result


@pytest.mark.parametrize("tau", [1, 2, 5])
def test_streaming_installs_exactly_tau_steps_after_sending(tau: int) -> None:
    rules = even(3, num_fragments=3, inner_steps=6, overlap_steps=tau, target_steps=40, lockstep=True)
    for latency in ((0.0, 0.0), (0.5, 1.0)):
        world = World(Rules(**{**rules.__dict__, "latency_s": latency})).run()
        for stay in world.stays:
            sent: dict[int, int] = {}
            for entry in stay.history:
                if entry[0] == "send":
                    sent[entry[1]] = entry[5]
                elif entry[0] == "install" and entry[3] < 40:
                    assert entry[3] == sent[entry[1]] + tau


def test_diloco_stops_for_every_merge() -> None:
    world = World(even(2, num_fragments=2, inner_steps=5, target_steps=20, lockstep=True, same_offset=True)).run()
    for stay in world.stays:
        for entry in stay.history:
            if entry[0] in ("send", "install"):
                assert entry[5 if entry[0] == "send" else 3] % 5 == 0


def test_lockstep_rejoins_and_goes_on() -> None:
    faults = (Fault(0.62, "kill", "i1"), Fault(1.3, "join", "i1"), Fault(2.1, "reconnect", "i0"))
    world = World(even(3, num_fragments=3, lockstep=True, target_steps=60, faults=faults)).run()
    assert world.finished is not None
    assert world.finished.status == "completed"
    last = [r["learners"] for r in world.of("merge")][-3:]
    assert all(len(names) == 3 for names in last)


def test_lockstep_heals_a_learner_whose_contributions_are_refused() -> None:
    """All wait for the merge, so there must be one, even if nothing is in it."""
    faults = (Fault(0.0, "poison", "i0"), Fault(1.5, "heal", "i0"))
    world = World(even(1, lockstep=True, target_steps=40, max_bad_in_a_row=1_000, faults=faults)).run()
    assert world.finished is not None
    assert world.finished.status == "completed"
    assert [] in [r["learners"] for r in world.of("merge")]
    assert ["i0"] in [r["learners"] for r in world.of("merge")]


def test_three_bad_contributions_in_a_row_take_a_learner_out_until_it_is_another_process() -> None:
    faults = (Fault(0.0, "poison", "i1"), Fault(3.0, "heal", "i1"), Fault(3.5, "join", "i1"))
    world = World(even(2, target_steps=60, faults=faults)).run()
    assert [r["in_a_row"] for r in world.of("unhealthy")] == [1, 2, 3]
    (expelled,) = world.of("expelled")
    assert "3 bad contributions in a row" in expelled["reason"]
    assert not any("i1" in r["learners"] for r in world.of("merge") if r["t"] < 3.5)
    assert any("i1" in r["learners"] for r in world.of("merge") if r["t"] > 3.5)
    assert world.finished is not None
    assert world.finished.status == "completed"


def test_a_good_contribution_ends_the_row() -> None:
    """One or two bad ones (the next is on its way when the first is refused), good ones, bad ones again, ..."""
    world = World(even(2, target_steps=60, num_fragments=1, faults=(Fault(0.0, "poison", "i1"),)))
    tell = world._tell

    def watch(event: object) -> None:
        if isinstance(event, ContributionRefused):
            world.poisoned = set()
        elif isinstance(event, ContributionReceived) and event.contribution.learner == "i1":
            world.poisoned = {"i1"}
        tell(event)

    world._tell = watch  # type: ignore[method-assign]
    world.run()
    assert len(world.of("unhealthy")) >= 4
    assert not world.of("expelled")


def test_below_the_quorum_those_who_may_come_back_are_waited_for_and_no_longer_than_allowed() -> None:
    kill = Fault(2.0, "kill", "i1")
    waited = World(even(2, quorum=2, target_steps=60, quorum_timeout_s=5.0, faults=(kill,))).run()
    assert waited.finished is not None
    assert waited.finished.status == "quorum_lost"
    assert waited.finished_s == pytest.approx(2.0 + 5.0, abs=0.01)
    (said,) = waited.of("waiting_for_quorum")
    assert (said["available"], said["quorum"], said["timeout_s"]) == (1, 2, 5.0)
    back = World(
        even(2, quorum=2, target_steps=60, quorum_timeout_s=5.0, faults=(kill, Fault(4.0, "join", "i1")))
    ).run()
    assert back.finished is not None
    assert back.finished.status == "completed"
    assert back.of("quorum_back")
    at_once = World(even(2, quorum=2, target_steps=60, faults=(kill,))).run()
    assert at_once.finished_s == pytest.approx(2.0, abs=0.01)


def test_a_killed_syncer_costs_no_learner_a_step_and_no_merge() -> None:
    crash = Fault(2.05, "syncer", "i0", 1.0)
    world = World(even(3, target_steps=60, faults=(crash,))).run()
    calm = World(even(3, target_steps=60)).run()
    assert {m: s.core.step for m, s in world.current.items() if s.core} == {
        m: s.core.step for m, s in calm.current.items() if s.core
    }
    assert len(world.of("return")) == 3
    assert not world.of("leave")
    tokens = world.syncer.ledger.summary()
    assert tokens["lost"] == 0
    assert tokens["processed"] == calm.syncer.ledger.summary()["processed"]
    for f in range(3):
        versions = [r["version"] for r in world.of("merge") if r["fragment"] == f]
        assert versions == list(range(1, len(versions) + 1))


# ---- Failure and return --------------------------------------------------------------------------------------


def test_a_silent_learner_is_missed_after_the_timeout_and_not_before() -> None:
    """ "is missed after heartbeat_timeout and from then on counts in no quorum; nothing else stops" """
    syncer = Syncer("ab", heartbeat_timeout_s=8.0)
    for at in (2.0, 4.0, 6.0, 8.0):
        syncer.now_s = at
        syncer.tell(LearnerAlive(learner="a"))
        assert not of(Disconnect, syncer.tell(TimerFired(key="liveness")))
    syncer.now_s = 10.0
    syncer.tell(LearnerAlive(learner="a"))
    (gone,) = of(Disconnect, syncer.tell(TimerFired(key="liveness")))
    assert gone.learner == "b"
    assert list(syncer.core.learners) == ["a"]


def test_hang_of_one_learner_stops_nobody() -> None:
    faults = (Fault(1.0, "hang", "i2"),)
    world = World(even(3, quorum=2, target_steps=80, faults=faults, heartbeat_timeout_s=2.0)).run()
    assert world.finished is not None
    assert world.finished.status == "completed"
    for stay in world.stays:
        if stay.learner != "i2":
            assert stay.core is not None
            assert stay.core.step == 80


def test_a_rejoining_learner_gets_versions_and_the_global_step_and_starts_at_zero() -> None:
    """ "gets ... Theta with all versions, the global step"; "joins again at a step boundary with counters at zero" """
    syncer = Syncer("ab", num_fragments=2)
    syncer.report("a", 4)
    syncer.send("a", fragment=1)
    syncer.merged(1, fragment=1)
    syncer.tell(LearnerLeft(learner="b", reason="killed"))
    (state,) = of(SendState, syncer.tell(LearnerJoined(learner="b")))
    assert (state.versions, state.global_step) == ((0, 1), 4)
    core = LearnerCore(LearnerSettings(num_fragments=2), step=state.global_step, versions=state.versions)
    assert (core.steps, core.tokens, core.step) == ([0, 0], [0, 0], 4)


def test_a_learner_that_was_never_there_before_may_join() -> None:
    """ "Learners may also join that were never there before (borrowed capacity) and leave for good." """
    syncer = Syncer("ab")
    assert of(SendState, syncer.tell(LearnerJoined(learner="z")))
    syncer.report("a", 4)
    assert "z" in syncer.core.rounds[0].asked
    syncer.tell(LearnerLeft(learner="z", reason="for good"))
    assert "z" not in syncer.core.learners


def test_a_learner_that_comes_back_is_asked_in_the_round_that_is_open() -> None:
    syncer = Syncer("abc", quorum=2)
    syncer.report("a", 4)
    syncer.send("a")
    syncer.tell(LearnerLeft(learner="b", reason="killed"))
    (pull,) = of(Pull, syncer.tell(LearnerJoined(learner="b")))
    assert pull.to == ("b",)
    assert of(StartMerge, syncer.send("b", tokens=10, steps=1))


def test_a_reconnect_is_no_loss_of_quorum() -> None:
    syncer = Syncer("ab", quorum=2)
    effects = syncer.tell(LearnerJoined(learner="b"))
    assert not of(Finish, effects)
    assert of(SendState, effects)


def test_fewer_than_the_quorum_left_ends_the_run_at_once() -> None:
    """Traps, "Quorum that can never be met": then and there, not by a time-out."""
    syncer = Syncer("abcd", quorum=2)
    assert not of(Finish, syncer.tell(LearnerLeft(learner="a", reason="killed")))
    assert not of(Finish, syncer.tell(LearnerLeft(learner="b", reason="killed")))
    (finish,) = of(Finish, syncer.tell(LearnerLeft(learner="c", reason="killed")))
    assert finish.status == "quorum_lost"
    assert "killed" in finish.reason
    assert syncer.report("d", 9) == ()


def test_start_timeout_with_and_without_a_quorum() -> None:
    for present, status in ((frozenset({"i0"}), "quorum_lost"), (frozenset({"i0", "i1"}), "completed")):
        world = World(even(3, quorum=2, present=present, start_timeout_s=5.0)).run()
        assert world.finished is not None
        assert world.finished.status == status
        if status == "quorum_lost":
            assert world.finished_s == pytest.approx(5.0)
            assert "i1" in world.finished.reason


def test_who_was_given_up_at_the_start_is_not_counted_on() -> None:
    rules = even(4, quorum=2, present=frozenset({"i0", "i1"}), start_timeout_s=1.0, faults=(Fault(2.0, "kill", "i1"),))
    world = World(rules).run()
    assert world.finished is not None
    assert world.finished.status == "quorum_lost"
    assert world.finished_s == pytest.approx(2.0)


def test_rounds_go_on_when_the_foremost_learner_leaves() -> None:
    """ "nothing else stops": the slower ones do not wait until they have caught up with its step."""
    rules = Rules(step_s={"i0": 0.05, "i1": 0.2, "i2": 0.2}, target_steps=100, faults=(Fault(4.0, "kill", "i0"),))
    world = World(rules).run()
    times = [r["t"] for r in world.of("merge") if r["t"] > 4.5]
    assert len([t for t in times if t < 12]) > 10


@pytest.mark.parametrize("at_s", [0.0, 0.001, 0.5, 1.7, 3.01, 3.2])
def test_stop_at_any_time(at_s: float) -> None:
    world = World(even(3, stop_at_s=at_s, target_steps=30)).run()
    assert world.finished is not None
    assert world.finished.status == "stopped"
    assert world.finished_s == pytest.approx(at_s)
    assert world.finished.reason == "ctrl-c"


def test_learner_leaves_during_the_final_cut() -> None:
    base = even(3, target_steps=20, latency_s=(0.05, 0.05), jitter=0.0)
    whole = World(base).run()
    cut = next(t for t, event, _ in whole.records if event == "final_cut")
    for after in (0.0, 0.02, 0.06, 0.1, 0.15, 0.2, 0.25):
        for kind in ("kill", "hang", "reconnect"):
            rules = Rules(**{**base.__dict__, "faults": (Fault(cut + after, kind, "i1"),), "heartbeat_timeout_s": 1.0})
            world = World(rules).run()
            assert world.finished is not None
            assert world.finished.status == "completed", (kind, after)


def test_everything_is_in_the_final_model() -> None:
    """ "processed = merged + late + refused + lost + pending", and the last steps are in the last merge."""
    world = World(even(3, target_steps=31, latency_s=(0.001, 0.01))).run()
    row = world.syncer.ledger.of_fragment(0)
    assert row["processed"] == sum(stay.tokens for stay in world.stays)
    assert row["pending"] == row["lost"] == row["refused"] == 0
    assert row["merged"] > 0.8 * row["processed"]


# ---- what a peer may not do to the syncer ---------------------------------------------------------------


def test_nonsense_is_answered_and_never_raises() -> None:
    """Rules of the core: "Unknown or late input is an event with an outcome ..., never an exception"."""
    syncer = Syncer("ab", num_fragments=2)
    for fragment in (-1, 2, 10**9):
        for tokens, steps in ((10, 1), (-10, 1), (10, -1), (10**30, 1)):
            effects = syncer.send("a", fragment=fragment, tokens=tokens, steps=steps)
            assert len(of(DropPayload, effects)) == 1
            c = syncer.contribution("a", fragment=fragment)
            assert len(of(DropPayload, syncer.tell(ContributionRefused(contribution=c, reason="nan")))) == 1
        syncer.installed("a", 1, fragment=fragment)
    syncer.report("a", 4)
    for tokens, steps in ((-10, 1), (10, -1), (-1, -1)):
        syncer.send("b", fragment=1, tokens=tokens, steps=steps)
    syncer.installed("a", 99)
    assert syncer.core.learners["a"].versions == [0, 0]
    syncer.installed("a", -5)
    syncer.send("stranger")
    syncer.report("stranger", 5)
    syncer.tell(LearnerLeft(learner="stranger", reason=""))
    syncer.tell(LearnerAlive(learner="stranger"))
    syncer.tell(TimerFired(key="grace:0"))
    syncer.tell(TimerFired(key="start"))
    syncer.tell(StopRequested(reason="enough"))
    assert syncer.send("a") == ()
