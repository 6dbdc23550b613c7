"""`diloco join` and `diloco leave`: how settings are read, and what is refused before anything is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from diloco_cli.cli.app import _run
from diloco_cli.cli.members import own_settings
from diloco_cli.config.compose import compose
from diloco_cli.config.schema import Config, Device, dump_config, load_config
from diloco_cli.errors import ConfigError
from diloco_cli.run.members import Members, ask, check_leave, store_config, with_island
from diloco_cli.run.rundir import RunDir, hold_lock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    dump_config(compose(["islands.count=3", "sync.quorum=2"], None), run.config)
    return run


def cfg_of(run: RunDir) -> Config:
    return load_config(run.config)


def test_settings_are_of_the_island_or_of_its_link():
    island, link = own_settings(
        ["speed=0.5", "nproc_per_node=2", "batch=4", "device=cpu", "env={A: b}", "bandwidth=1gbps", "latency=20ms"]
    )
    assert island == {"speed": 0.5, "nproc_per_node": 2, "batch": 4, "device": "cpu", "env": {"A": "b"}}
    assert link == {"bandwidth": "1gbps", "latency": "20ms"}
    json.dumps([island, link])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("spede=1", "speed=1"),
        ("speed", "KEY=VALUE"),
        ("speed=fast", "makes no sense"),
        ("device=tpu", "makes no sense"),
    ],
)
def test_wrong_settings_are_named(text, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        own_settings([text])
    assert caught.value.where == text


def test_the_next_free_name_and_the_rest_as_it_was(run):
    before = cfg_of(run)
    time_before = run.config.stat().st_mtime_ns
    for number, own in ((3, {"speed": 0.5, "device": "cpu"}), (4, {})):
        name, cfg = with_island(cfg_of(run), own, {"latency": "9ms"})
        assert name == f"island-{number}"
        store_config(run, cfg)
    after = cfg_of(run)
    assert after.island_names() == [f"island-{i}" for i in range(5)]
    assert (after.island("island-3").speed, after.island("island-3").device) == (0.5, Device.cpu)
    assert after.island("island-4") == after.islands.each == before.islands.each
    assert after.link("island-4").up.latency_s == 0.009
    assert all(after.link(name) == before.link(name) for name in before.island_names())
    assert run.config.stat().st_mtime_ns == time_before
    assert after.islands.count == 3


def test_a_value_that_cannot_be_leaves_the_file_alone(run):
    before = run.config.read_bytes()
    _, cfg = with_island(cfg_of(run), {"speed": "fast"}, {})
    with pytest.raises(ConfigError, match="make no sense"):
        store_config(run, cfg)
    assert run.config.read_bytes() == before
    assert [p.name for p in run.path.iterdir()] == ["config.yaml"]


def test_who_may_leave(run):
    cfg = cfg_of(run)
    check_leave(cfg, "island-2", ["island-0", "island-1", "island-2"])
    for name, left, says in (
        ("island-9", ["island-0", "island-1", "island-2"], "no island 'island-9'"),
        ("island-2", ["island-0", "island-1"], "has left already"),
        ("island-0", ["island-0", "island-1"], "the quorum is 2"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_leave(cfg, name, left)


def test_a_run_that_nobody_runs_is_refused_at_once(run, capsys):
    for command in (["join", str(run.path), "speed=0.5"], ["leave", str(run.path), "island-0"]):
        assert _run(command) == 3
        said = capsys.readouterr().err
        assert "is not running" in said
        assert f"diloco resume {run.path}" in said
    assert _run(["join", str(run.path), "speed=0"]) == 3
    assert _run(["join", str(run.path / "nothing")]) == 2


def test_what_is_out_of_range_is_refused_before_anything_is_asked(run, capsys):
    with hold_lock(run):
        assert _run(["join", str(run.path), "speed=7"]) == 2
        assert "speed" in capsys.readouterr().err
    assert not run.commands.exists()


def test_a_launcher_that_does_not_answer_is_said_to(run):
    with hold_lock(run):
        with pytest.raises(Exception, match=r"did not answer within 0\.2 s"):
            ask(run, {"command": "leave", "island": "island-0"}, timeout_s=0.2)
        assert list(run.commands.iterdir()) == []
        assert run.commands.stat().st_mode & 0o777 == 0o700


def test_nonsense_in_the_folder_is_answered_and_nothing_else(run):
    class Host:
        cfg = cfg_of(run)

        def add_island(self, cfg, name):
            raise AssertionError

        def remove_island(self, name, reason):
            raise AssertionError

        def islands_left(self):
            return []

    members = Members(run, Host())
    for number, text in enumerate(["", "{", "[]", "{}", '{"command": 7}', '{"command": "join", "island": 3}']):
        (run.commands / f"{number}.json").write_text(text)
    (run.commands / "half.json.tmp").write_text("{")
    members.poll()
    answers = sorted(p.name for p in run.commands.glob("*.answer.json"))
    assert answers == [f"{n}.answer.json" for n in range(6)]
    assert all(not json.loads((run.commands / a).read_text())["ok"] for a in answers)
