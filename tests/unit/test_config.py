"""The schema's numbers, the rules of validate, and composition: precedence, grammar, messages."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.config import keys
from diloco_cli.config.compose import (
    compose,
    expand_sweeps,
    group_options,
    list_recipes,
    recipe_path,
    share_dir,
)
from diloco_cli.config.schema import (
    Algorithm,
    Anchor,
    Config,
    FailureEvent,
    IslandNetwork,
    IslandOverride,
    LauncherKind,
    LinkConfig,
    MergeRule,
    Parallel,
    Tunnel,
    WireType,
    dump_config,
    load_config,
)
from diloco_cli.config.validate import problems, validate
from diloco_cli.core.faults import Fault
from diloco_cli.errors import ConfigError
from diloco_cli.run.settings import fault_plan


@pytest.fixture(autouse=True)
def _no_thread_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


# ---- schema ---------------------------------------------------------------------------------------


def test_link_takes_network_then_direction_then_island_then_its_direction() -> None:
    cfg = Config()
    cfg.network.bandwidth, cfg.network.latency = "3gbps", "40ms"
    cfg.network.up.bandwidth = "1gbps"
    cfg.network.named["island-1"] = IslandNetwork(latency="10ms", jitter="1ms", down=LinkConfig(latency="20ms"))
    cfg.network.named["island-2"] = IslandNetwork(bandwidth="unlimited", up=LinkConfig(bandwidth="5mbps"))
    plain, one, two = (cfg.link(f"island-{i}") for i in range(3))
    assert (plain.up.rate_bps, plain.down.rate_bps) == (1e9, 3e9)
    assert (plain.up.latency_s, plain.up.jitter_s) == (0.04, 0.0)
    assert (one.up.latency_s, one.down.latency_s, one.up.jitter_s) == (0.01, 0.02, 0.001)
    assert one.up.rate_bps == 1e9
    assert (two.up.rate_bps, two.down.rate_bps) == (5e6, math.inf)


def test_island_takes_each_then_named_and_leaves_both_as_they_are() -> None:
    cfg = Config()
    cfg.islands.each.env = {"A": "1", "B": "2"}
    cfg.islands.named["island-1"] = IslandOverride(speed=0.5, nproc_per_node=2, env={"B": "3"})
    assert cfg.island("island-0") == cfg.islands.each
    own = cfg.island("island-1")
    assert (own.speed, own.nproc_per_node, own.batch) == (0.5, 2, cfg.islands.each.batch)
    assert own.env == {"A": "1", "B": "3"}
    assert cfg.islands.each.env == {"A": "1", "B": "2"}
    assert cfg.islands.each.speed == 1.0


def test_target_steps_from_tokens() -> None:
    cfg = Config()
    cfg.data.seq_len, cfg.islands.count, cfg.islands.each.batch = 100, 4, 5
    assert cfg.target_steps() == cfg.run.steps
    cfg.run.tokens = "1m"
    assert cfg.target_steps() == 500
    cfg.run.tokens = "1000001"
    assert cfg.target_steps() == 501
    # A learner at half speed is not waited for, so that the others must do more; one at 0.95 is.
    cfg.run.tokens = "1m"
    cfg.islands.named["island-1"] = IslandOverride(speed=0.5)
    assert cfg.target_steps() == math.ceil(1e6 / (3.5 * 500))
    cfg.islands.named["island-1"] = IslandOverride(speed=0.95)
    assert cfg.target_steps() == 500


def test_numbers_behind_written_quantities() -> None:
    cfg = Config()
    assert cfg.sync.min_fragment_num_bytes == 65536
    assert (cfg.sync.heartbeat_interval_s, cfg.sync.heartbeat_timeout_s) == (1.0, 10.0)
    assert (cfg.launcher.start_timeout_s, cfg.launcher.stop_timeout_s) == (120.0, 8.0)
    assert (cfg.logging.interval_s, cfg.network.connect_timeout_s) == (0.5, 30.0)


def test_config_file_reads_back_equal(tmp_path: Path) -> None:
    cfg = compose(
        [
            "islands.named.island-1={speed: 0.5, parallel: fsdp}",
            "network.named.island-2.up.bandwidth=1mbps",
            "outer.anchor=global",
            "model.entry_args={a: 1, b: [x, null]}",
            "islands.each.env.NAME='a: b # c'",
        ]
    )
    dump_config(cfg, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again == cfg
    assert again.outer.anchor is Anchor.global_
    assert again.islands.named["island-1"].parallel is Parallel.fsdp


@pytest.mark.parametrize("text", ["run: {stps: 3}", "run: {steps: x}", "run: [", "3", "run:\n\t- x"])
def test_a_damaged_config_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.where == str(path)


def test_a_missing_config_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_config(tmp_path / "config.yaml")


def test_every_setting_says_what_it_is() -> None:
    assert [s.key for s in keys.settings() if not s.doc] == []
    assert all(keys.type_of(s.key) is not None for s in keys.settings())
    assert set(keys.groups()) == {f.name for f in dataclasses.fields(Config)}


# ---- rules ----------------------------------------------------------------------------------------


def _with(**settings: Any) -> Config:
    """Config with `group__name=value` set."""
    cfg = Config()
    for key, value in settings.items():
        *path, name = key.split("__")
        target: Any = cfg
        for part in path:
            target = getattr(target, part)
        setattr(target, name, value)
    return cfg


def test_the_defaults_are_valid() -> None:
    assert list(problems(Config(), {})) == []


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"sync__quorum": 0}, "sync.quorum", "1 to 4"),
        ({"sync__quorum": -1}, "sync.quorum", "1 to 4"),
        ({"sync__quorum": 5}, "sync.quorum", "1 to 4"),
        ({"islands__count": 1, "sync__quorum": 2}, "sync.quorum", "1 to 1"),
        ({"islands__count": 0}, "islands.count", "from 1"),
        ({"islands__each__nproc_per_node": 3}, "islands.each.batch", "does not divide by nproc_per_node 3"),
        ({"islands__each__accumulate": 16}, "islands.each.batch", "accumulate 16"),
        ({"islands__each__speed": 0.0}, "islands.each.speed", "above 0"),
        ({"islands__each__speed": 2.0}, "islands.each.speed", "to 1"),
        ({"islands__each__threads": 0}, "islands.each.threads", "1 or more"),
        ({"islands__named": {"island-4": IslandOverride()}}, "islands.named.island-4", "island-0 to island-3"),
        ({"islands__named": {"island-1": IslandOverride(batch=0)}}, "islands.named.island-1.batch", "1 or more"),
        ({"islands__each__launcher": LauncherKind.ssh}, "islands.each.launcher", "ssh is not built yet"),
        ({"launcher__kind": LauncherKind.slurm}, "launcher.kind", "slurm is not built yet"),
        (
            {"islands__named": {"island-1": IslandOverride(hosts=["a"])}},
            "islands.named.island-1.hosts",
            "not built yet",
        ),
        ({"islands__each__tunnel": Tunnel.ssh}, "islands.each.tunnel", "ssh is not built yet"),
        ({"network__streams": 4}, "network.streams", "not built yet"),
        ({"network__wire_up": WireType.auto}, "network.wire_up", "auto is not built yet"),
        ({"network__wire_down": WireType.auto}, "network.wire_down", "auto is not built yet"),
        ({"sync__shards": 2}, "sync.shards", "not built yet"),
        ({"islands__each__batch": 1.5}, "islands.each.batch", "neither a whole number nor auto"),
        ({"islands__each__batch": True}, "islands.each.batch", "neither a whole number nor auto"),
        ({"islands__each__batch": None}, "islands.each.batch", "neither a whole number nor auto"),
        ({"islands__each__batch": [8]}, "islands.each.batch", "neither a whole number nor auto"),
        ({"islands__each__batch": "aut"}, "islands.each.batch", "neither a whole number nor auto"),
        ({"islands__named": {"island-1": IslandOverride(batch=3, accumulate=2)}}, "islands.named.island-1.batch", "3"),
        ({"network__named": {"iland-1": IslandNetwork()}}, "network.named.iland-1", "no island"),
        ({"network__bandwidth": "3gbs"}, "network.bandwidth", "3gbs"),
        ({"network__up": LinkConfig(bandwidth="0gbps")}, "network.up.bandwidth", "0gbps"),
        ({"network__latency": "-1ms"}, "network.latency", "-1ms"),
        (
            {"network__named": {"island-1": IslandNetwork(down=LinkConfig(jitter="1"))}},
            "network.named.island-1.down.jitter",
            "'1'",
        ),
        ({"network__port": 70000}, "network.port", "65535"),
        ({"network__connect_timeout": "0s"}, "network.connect_timeout", "above zero"),
        ({"network__connect_timeout": "300s"}, "network.connect_timeout", "below launcher.start_timeout"),
        ({"sync__heartbeat_interval": "10s"}, "sync.heartbeat_interval", "below sync.heartbeat_timeout"),
        ({"sync__grace_safety": 1.0}, "sync.grace_safety", "to below 1"),
        ({"sync__alpha": 1.5}, "sync.alpha", "from 0 to 1"),
        ({"sync__alpha": math.nan}, "sync.alpha", "from 0 to 1"),
        ({"sync__overlap_steps": 0}, "sync.overlap_steps", "1 or more"),
        ({"sync__algorithm": Algorithm.data_parallel}, "sync.algorithm", "simulator"),
        ({"sync__min_fragment_bytes": "64"}, "sync.min_fragment_bytes", "64"),
        ({"model__num_kv_heads": 3}, "model.num_kv_heads", "does not divide"),
        ({"model__num_heads": 10}, "model.num_heads", "does not divide"),
        ({"model__dim": 100}, "model.num_heads", "odd"),
        ({"model__num_experts": 1}, "model.experts_per_token", "1 to model.num_experts 1"),
        ({"model__vocab_size": 100}, "model.vocab_size", "256"),
        ({"model__max_seq_len": 64}, "model.max_seq_len", "data.seq_len"),
        ({"inner__lr": math.nan}, "inner.lr", "above 0"),
        ({"inner__lr": math.inf}, "inner.lr", "above 0"),
        ({"inner__beta2": 1.0}, "inner.beta2", "to below 1"),
        ({"outer__lr": -0.7}, "outer.lr", "above 0"),
        ({"outer__momentum": 1.0}, "outer.momentum", "to below 1"),
        ({"run__steps": 0}, "run.steps", "1 or more"),
        ({"run__tokens": "12g"}, "run.tokens", "12g"),
        ({"run__name": "../x"}, "run.name", "folder name"),
        ({"run__finish_tolerance": 1.0}, "run.finish_tolerance", "to below 1"),
        ({"run__finish_wait": "10"}, "run.finish_wait", "not a duration"),
        ({"data__path": "/nonexistent/x"}, "data.path", "there is no"),
        ({"data__tokenizer": "x.json"}, "data.tokenizer", "neither bytes nor a file"),
        ({"data__token_dtype": "int8"}, "data.token_dtype", "uint16"),
        ({"data__validation_fraction": 0.0}, "data.validation_fraction", "above 0"),
        ({"data__heterogeneity": 1.1}, "data.heterogeneity", "from 0 to 1"),
        ({"failures__random__distribution": "weibul"}, "failures.random.distribution", "exponential, weibull, fixed"),
        ({"failures__random__kinds": []}, "failures.random.kinds", "nothing could happen"),
        ({"failures__random__kinds": ["crash", "disk-full"]}, "failures.random.kinds", "there is no 'disk-full'"),
        ({"failures__random__mean_time_between": "0s"}, "failures.random.mean_time_between", "above zero"),
        ({"failures__random__mean_time_between": "often"}, "failures.random.mean_time_between", "not a duration"),
        ({"failures__random__mean_time_between": "1s"}, "failures.random.mean_time_between", "more than 100000"),
        ({"failures__random__repair_time": "0s"}, "failures.random.repair_time", "above zero"),
        ({"failures__random__horizon": "0s"}, "failures.random.horizon", "above zero"),
        ({"failures__random__seed": -1}, "failures.random.seed", "from 0"),
        ({"launcher__stop_timeout": "x"}, "launcher.stop_timeout", "x"),
    ],
)
def test_each_rule_names_its_key_in_one_sentence(settings: dict[str, Any], key: str, words: str) -> None:
    found = list(problems(_with(**settings), {}))
    assert [p.where for p in found] == [key]
    assert found[0].what.startswith(f"{key}: ")
    assert words in found[0].what
    assert "\n" not in found[0].what
    with pytest.raises(ConfigError):
        validate(_with(**settings), {})


@pytest.mark.parametrize(
    ("event", "key", "words"),
    [
        ({"island": None}, "", "it has no target; give one of island, link and syncer"),
        ({"syncer": True}, "", "island and syncer are 2 targets"),
        ({"kind": "partition", "link": "island-1"}, "", "island and link are 2 targets"),
        ({"kind": "crsh"}, ".kind", "there is no 'crsh'; there are crash, hang"),
        ({"island": "island-9"}, ".island", "there is no island 'island-9'; there are island-0 to island-3"),
        ({"island": None, "link": "x", "kind": "partition"}, ".link", "there is no island 'x'"),
        ({"island": None, "link": "island-1"}, ".link", "crash cannot happen to a link; partition and degrade can"),
        ({"island": None, "syncer": True, "kind": "corrupt"}, ".syncer", "corrupt cannot happen to the syncer"),
        ({"rank": 2}, ".rank", "2 is out of range; island-0 has the ranks 0 to 1"),
        ({"rank": -1}, ".rank", "-1 is out of range"),
        ({"rank": 0, "kind": "preempt"}, ".rank", "a preempt has no rank; crash, hang and slow of an island may"),
        ({"rank": 0, "island": None, "syncer": True}, ".rank", "the syncer has no rank"),
        ({"kind": "slow", "factor": 1.0}, ".factor", "above 0 to below 1"),
        ({"kind": "slow", "factor": 0.0}, ".factor", "above 0 to below 1"),
        ({"kind": "degrade", "loss": 1.0}, ".loss", "from 0 to below 1"),
        ({"kind": "degrade"}, "", "say what gets worse: bandwidth, latency or loss"),
        ({"bandwidth": "1mbps"}, ".bandwidth", "crash does not change it"),
        ({"kind": "degrade", "bandwidth": "1"}, ".bandwidth", "not a bandwidth"),
        ({"kind": "degrade", "latency": "1"}, ".latency", "not a duration"),
        ({"kind": "corrupt", "payload": "zeros"}, ".payload", "neither nan nor bytes"),
        ({"kind": "corrupt", "duration": "5s"}, ".duration", "has no duration"),
        ({"duration": "0s"}, ".duration", "above zero"),
        ({"duration": "long"}, ".duration", "not a duration"),
        ({"at": "soon"}, ".at", "not a duration"),
        ({"at": "step 0"}, ".at", "not a number of steps"),
    ],
)
def test_each_rule_of_a_failure_names_its_key(event: dict[str, Any], key: str, words: str) -> None:
    cfg = _with(islands__each__nproc_per_node=2)
    cfg.failures.events = [FailureEvent(island="island-1"), FailureEvent(**{"island": "island-0", **event})]
    (found,) = problems(cfg, {})
    assert found.where == f"failures.events.1{key}"
    assert found.what.startswith(f"failures.events.1{key}: ")
    assert words in found.what
    assert "\n" not in found.what


def test_failures_that_are_right_become_the_plan() -> None:
    cfg = _with(islands__each__nproc_per_node=2)
    cfg.failures.events = [
        FailureEvent(at="step 20", kind="disk_full", syncer=True),
        FailureEvent(at="1min", kind="degrade", link="island-1", bandwidth="1mbps", latency="1s", loss=0.1),
        FailureEvent(at="20 steps", kind="crash", island="island-0", rank=1),
        FailureEvent(at="2s", kind="hang", island="island-0", duration="3s"),
        FailureEvent(at="2s", kind="preempt", island="island-1"),
        FailureEvent(at="1s", kind="corrupt", island="island-1", payload="bytes"),
    ]
    assert list(problems(cfg, {})) == []
    assert fault_plan(cfg) == (
        Fault(kind="corrupt", target="island-1", at_s=1.0, payload="bytes"),
        Fault(kind="hang", target="island-0", at_s=2.0, duration_s=3.0),
        Fault(kind="preempt", target="island-1", at_s=2.0, duration_s=5.0),
        Fault(kind="degrade", target="island-1", at_s=60.0, duration_s=5.0, rate_bps=1e6, latency_s=1.0, loss=0.1),
        Fault(kind="disk-full", target="syncer", at_step=20, duration_s=5.0),
        Fault(kind="crash", target="island-0", at_step=20, rank=1),
    )
    assert fault_plan(Config()) == ()


@pytest.mark.parametrize("option", ["flaky", "mixed"])
def test_random_failures_follow_the_seed(option: str) -> None:
    plans = [fault_plan(compose([f"failures={option}", f"run.seed={seed}"])) for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    assert len(plans[0]) > 500


def test_islands_each_need_not_fit_where_every_island_has_its_own() -> None:
    cfg = _with(islands__count=1, islands__each__nproc_per_node=3)
    cfg.islands.named["island-0"] = IslandOverride(nproc_per_node=2)
    assert list(problems(cfg, {})) == []


@pytest.mark.parametrize("value", ["x", "0", "-1", "1.5", "2 3"])
def test_a_malformed_thread_variable_is_found_before_anything_starts(value: str) -> None:
    (problem,) = problems(Config(), {"OMP_NUM_THREADS": value})
    assert "OMP_NUM_THREADS" in problem.where
    assert list(problems(Config(), {"OMP_NUM_THREADS": "4"})) == []


# ---- composition ----------------------------------------------------------------------------------


def _needs(group: str, option: str, tmp_path: Path) -> list[str]:
    """What an option cannot do without."""
    (tmp_path / "text.txt").write_text("x")
    if group == "data" and option != "stdlib":
        return [f"data.path={tmp_path / 'text.txt'}"]
    return {
        "custom": ["model.entry_point=a.b:c"],
        "huggingface": [f"model.hf_config={tmp_path}"],
    }.get(option if group == "model" else "", [])


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group in keys.groups() for option in group_options(group)]
)
def test_every_option_of_every_group_composes_and_says_what_it_is(group: str, option: str, tmp_path: Path) -> None:
    compose([f"{group}={option}", *_needs(group, option, tmp_path)])
    assert group_options(group)[option]


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_every_recipe_composes_and_says_what_to_expect(name: str, tmp_path: Path) -> None:
    needed = _needs("data", "text", tmp_path) if name == "your-own-text" else []
    cfg = compose(needed, name)
    recipe = next(r for r in list_recipes() if r.name == name)
    assert all((recipe.purpose, recipe.time, recipe.hardware, recipe.result))
    assert cfg.run.name == name


def test_the_recipes_that_are_promised_are_there() -> None:
    promised = "first-run bring-your-own-model fsdp-island mixed-hardware thin-links your-own-text"
    assert {r.name for r in list_recipes()} >= set(promised.split())
    assert list_recipes()[0].name == "first-run"


def test_precedence_schema_group_recipe_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults:\n  - override /model: small\n  - inner: muon\nmodel: {dim: 128}\nrun: {steps: 7, seed: 5}\n"
    )
    cfg = compose(["run.steps=9"], str(recipe))
    assert cfg.model.num_layers == 4  # the group's, over the schema's 2
    assert cfg.model.dim == 128  # the recipe's, over the group's 256
    assert (cfg.run.steps, cfg.run.seed) == (9, 5)
    assert cfg.inner.optimizer.value == "muon"
    assert cfg.sync.fragments == Config().sync.fragments
    # A group named on the command line wins over the recipe's choice of it, the recipe's own values stay.
    cfg = compose(["model=tiny"], str(recipe))
    assert (cfg.model.num_layers, cfg.model.dim) == (2, 128)


def test_short_forms_in_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: small\nalgorithm: streaming\n")
    cfg = compose([], str(recipe))
    assert (cfg.model.name, cfg.sync.algorithm, cfg.sync.quorum) == ("small", Algorithm.streaming, 4)


def test_no_recipe_is_first_run() -> None:
    assert compose([], None) == compose([], "first-run") == compose([], str(share_dir("recipes") / "first-run.yaml"))


def test_algorithm_is_short_for_sync_and_lock_step_needs_everyone() -> None:
    cfg = compose(["algorithm=diloco", "islands.count=6"])
    assert (cfg.sync.algorithm, cfg.sync.quorum) == (Algorithm.diloco, 6)
    assert compose(["sync=diloco", "islands.count=6"]) == cfg


def test_override_grammar(tmp_path: Path) -> None:
    odd = tmp_path / "a b = (c), d.txt"
    odd.write_text("x")
    cfg = compose(
        [
            "islands.count=8",
            "+sync.quorum=2",
            "++outer.lr=0.5",
            "outer.merge=average",
            "islands.named.island-1.speed=0.5",
            "+islands.named.island-2={speed: 0.25}",
            "sync.max_drift_steps=${sync.inner_steps}",  # the least that makes sense
            "model.vocab_size=null",
            "run.name='x'",
            "~failures",
            "data=text",
            f'data.path="{odd}"',
        ]
    )
    assert (cfg.islands.count, cfg.sync.quorum, cfg.outer.lr, cfg.outer.merge) == (8, 2, 0.5, MergeRule.average)
    assert {n: o.speed for n, o in cfg.islands.named.items()} == {"island-1": 0.5, "island-2": 0.25}
    assert cfg.sync.max_drift_steps == cfg.sync.inner_steps
    assert cfg.data.path == str(odd)


def test_a_drift_bound_below_h_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"less than sync\.inner_steps=24") as refused:
        compose(["sync.max_drift_steps=23"])
    assert refused.value.hint == "sync.max_drift_steps=48"


def test_paths_need_no_quotes_and_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my text=1").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose(["data=text", "data.path=~/my text=1"]).data.path == str(tmp_path / "my text=1")
    monkeypatch.chdir(tmp_path)
    assert compose(["data=text", "data.path=my text=1"]).data.path == str(tmp_path / "my text=1")


def test_sweeps_are_every_combination_in_order() -> None:
    assert expand_sweeps(["outer.lr=0.5,0.7", "run.seed=3", "sync=decoupled,diloco"]) == [
        ["outer.lr=0.5", "run.seed=3", "sync=decoupled"],
        ["outer.lr=0.5", "run.seed=3", "sync=diloco"],
        ["outer.lr=0.7", "run.seed=3", "sync=decoupled"],
        ["outer.lr=0.7", "run.seed=3", "sync=diloco"],
    ]
    assert expand_sweeps([]) == [[]]
    assert expand_sweeps(["run.seed=range(1,4)"]) == [["run.seed=1"], ["run.seed=2"], ["run.seed=3"]]
    assert expand_sweeps(["algorithm=glob(d*)"]) == [["algorithm=decoupled"], ["algorithm=diloco"]]
    assert expand_sweeps(["run.name=choice(a,b)"]) == [["run.name=a"], ["run.name=b"]]
    for each in expand_sweeps(["algorithm=streaming,diloco", "islands.each.hosts=[],[]"]):
        compose(each)


FORBIDDEN = (
    "$VALUE",
    "earch path",
    "To append",
    "Traceback",
    "hydra",
    "omegaconf",
    "full_key",
    "use +",
    "diloco_schema",
)


def _refused(overrides: list[str], conf: str | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, conf)
    text = str(caught.value)
    assert not any(word in text for word in FORBIDDEN), text
    assert "\n" not in caught.value.what
    return caught.value


@pytest.mark.parametrize(
    ("override", "what", "hint"),
    [
        ("islands.cuont=4", "islands.cuont: there is no such setting", "islands.count"),
        ("islands.count=four", "islands.count: 'four' is not a whole number", ""),
        ("islands.count=2.5", "islands.count: '2.5' is not a whole number", ""),
        ("islands.count=null", "islands.count: 'null' is not a whole number", ""),
        ("inner.lr=fast", "inner.lr: 'fast' is not a number", ""),
        ("inner.lr=nan", "inner.lr: nan is out of range", ""),
        ("run.deterministic=maybe", "run.deterministic: 'maybe' is not true or false", ""),
        ("outer.merge=averge", "outer.merge: 'averge' is not one of rda, average", "outer.merge=average"),
        ("outer.anchor=globl", "outer.anchor: 'globl' is not one of base, global", "outer.anchor=global"),
        ("outer.lr=[0.1", "outer.lr: '[0.1' cannot be read", "quotes"),
        ("model=hge", "model: there is no option 'hge'", ""),
        ("model=tny", "model: there is no option 'tny'", "model=tiny"),
        ("sync=5", "sync: there is no option '5'", ""),
        ("algorithm=streming", "there is no option 'streming'", "=streaming"),
        ("algorithm=data_parallel", "data_parallel is for the simulator", "algorithm=decoupled"),
        (
            "islands.0.bandwith=3gbps",
            "islands.0.bandwith: there is no such setting",
            "network.named.island-0.bandwidth",
        ),
        ("islands.island-1.sped=1", "islands.island-1.sped: there is no", "islands.named.island-1.speed"),
        ("islands.named.island-1.sped=1", "islands.named.island-1.sped: there is", "islands.named.island-1.speed"),
        ("islands.named.island-9.speed=1", "islands.named.island-9: there is no island", "island-"),
        ("islands.named.island-1=3", "islands.named.island-1: '3' is not a group of settings", ""),
        ("islands.named.island-1.speed=x", "islands.named.island-1.speed: 'x' is not a number", ""),
        (
            "islands.named.island-1={sped: 1}",
            "islands.named.island-1.sped: there is no",
            "islands.named.island-1.speed",
        ),
        ("lr=3", "lr: there is no such setting", "lr"),
        ("+new.key=1", "new.key: there is no such setting", "diloco config"),
        ("++inner.new=1", "inner.new: there is no such setting", ""),
        ("model={dmi: 64}", "model.dmi: there is no such setting", "model.dim"),
        ("model.dim={a: 1}", "model.dim.a: there is no such setting", "model.dim"),
        ("islands.each=3", "islands.each: '3' is not a group of settings", ""),
        ("islands.each.hosts=a", "islands.each.hosts: 'a' is not a list", ""),
        ("~inner.lr", "inner.lr: a setting cannot be taken away", "inner.lr=VALUE"),
        ("~inner.ler", "inner.ler: there is no such setting", "inner.lr"),
        ("network.bandwidth=3gbs", "network.bandwidth: '3gbs' is not a bandwidth", '"3gbps"'),
        ("network.bandwidth=-1gbps", "network.bandwidth: '-1gbps'", '"1gbps"'),
        ("network.latency=40", "network.latency: '40' is not a duration", '"40ms"'),
        ("run.tokens=12g", "run.tokens: '12g' is not a count", '"12'),
        ("run.steps=-1", "run.steps: -1 is out of range", ""),
        ("run.name=${nope.x}", "run.name: its reference cannot be resolved", ""),
        ("islands.each.batch=${islands.nope}", "islands.each.batch: its reference cannot be resolved", ""),
        ("islands.each.batch=${run.name}", "islands.each.batch: ", ""),
        ("run.name=${oc.env:DILOCO_NO_SUCH_VARIABLE}", "run.name: its reference cannot be resolved", ""),
        ("failures.events=[{at: step 200, kind: crash}]", "failures.events.0: it has no target", "island: island-0"),
        (
            "failures.events=[{kind: hangs, island: island-0}]",
            "failures.events.0.kind: there is no 'hangs'",
            "kind: hang",
        ),
        ("failures.random.kind=[crash]", "failures.random.kind: there is no such setting", "failures.random.kinds"),
        ("failures.events=[{att: step 200}]", "failures.events.0.att: there is no such setting", ""),
        ("failures.events=[3]", "failures.events.0: ", ""),
        ("model@foo=tiny", "model: this is not a setting of diloco", ""),
        ("islands.count=1,2", "islands.count: '1,2' stands for several runs", "--multirun"),
        ("first-run", "'first-run' is not KEY=VALUE", "conf=first-run"),
        ("=3", "'=3' is not KEY=VALUE", ""),
        ("--islands.count=3", "overrides have no dashes", "islands.count=3"),
        ("data=text", "data.path: say which file or folder", "data.path="),
        ("sync.quorum=5", "sync.quorum: 5 is out of range", ""),
    ],
)
def test_each_mistake_names_key_and_nearest_right_thing(override: str, what: str, hint: str) -> None:
    error = _refused([override])
    assert what in error.what
    assert hint in error.hint
    assert error.where


def test_hydra_settings_of_its_own_are_not_ours() -> None:
    for override in ("hydra.run.dir=x", "hydra/launcher=joblib", "hydra.searchpath=[file:///tmp]"):
        with pytest.raises(ConfigError, match="not a setting of diloco"):
            compose([override])


def test_where_is_what_was_typed_or_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("sync: {quorum: 9}\n")
    assert _refused([], str(recipe)).where == f"{recipe}: sync.quorum"
    assert _refused(["sync.quorum=7"], str(recipe)).where == "command line: sync.quorum=7"
    assert compose(["sync.quorum=2"], str(recipe)).sync.quorum == 2


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("model:\n  dim: [1\n", "not valid YAML", "line"),
        ("run: {steps: 3}\nrun: {seed: 3}\n", "not valid YAML", "line 2"),
        ("sync: {quorumm: 2}", "sync.quorumm: there is no such setting", "mine.yaml"),
        ("sync: {quorum: two}", "sync.quorum: 'two' is not a whole number", "mine.yaml"),
        ("islands: {named: {island-1: {speed: fast}}}", "islands.named.island-1.speed: 'fast'", "mine.yaml"),
        ("network: {named: {island-1: 3}}", "network.named.island-1: '3' is not a group", "mine.yaml"),
        ("failures: {events: [{att: 3}]}", "failures.events.0.att: there is no", "mine.yaml"),
        ("defaults:\n  - model: hge\n", "model: there is no option 'hge'", "defaults"),
        ("defaults:\n  - modl: tiny\n", "modl: there is no such group", "defaults"),
        ("defaults: 3", "defaults: this is a list", "defaults"),
        ("defaults: [3]", "defaults: 3 is not a group choice", "defaults"),
        ("- a\n", "a recipe is a mapping", "mine.yaml"),
        ("3: 4\n", "3: there is no such setting", "mine.yaml"),
        ("run:\n  steps: ${nope}", "run.steps: its reference", "mine.yaml"),
        ("data:\n  kind: text\n  path: ???", "data.path: say which file or folder", "mine.yaml"),
        ("run:\n  name: ???", "run.name: the recipe leaves this to you", "mine.yaml"),
    ],
)
def test_mistakes_in_a_recipe(tmp_path: Path, text: str, what: str, where: str) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    error = _refused([], str(recipe))
    assert what in error.what
    assert where in error.where


def test_a_recipe_that_is_not_text(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_bytes(b"\xff\xfe\x00\x91" * 9)
    assert _refused([], str(recipe)).where == str(recipe)


def test_recipes_are_found_by_name_or_path(tmp_path: Path) -> None:
    assert recipe_path("thin-links").name == "thin-links.yaml"
    for wrong, hint in (
        ("thin-link", "conf=thin-links"),
        ("recipes/thin-lnks.yaml", "conf=thin-links"),
        ("zzz", "one of"),
    ):
        assert hint in _refused([], wrong).hint
    assert "folder" in _refused([], str(tmp_path)).what


def test_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert compose([], str(tmp_path / "empty.yaml")) == Config()


def test_composing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = compose(["islands.named.island-1.speed=0.5"])
    assert compose([]).islands.named == {}
    assert first.islands.named["island-1"].speed == 0.5
    assert os.listdir(tmp_path) == []
