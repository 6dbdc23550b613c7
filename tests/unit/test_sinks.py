"""Trackers get the same numbers as metrics.jsonl, and never end a run."""

import math
import sys
import types
from pathlib import Path

import pytest

from diloco_cli.config.schema import LoggingConfig
from diloco_cli.observe.sinks import TensorBoardSink, make_sinks, scalars

RECORD = {
    "time": 12.5,
    "source": "island-0",
    "step": 40,
    "loss": 2.5,
    "lr": math.nan,
    "state": "training",
    "ok": True,
    "none": None,
    "tokens": {"merged": 3, "late": 0},
}


def test_scalars_are_the_finite_numbers_under_source_and_key() -> None:
    assert dict(scalars(RECORD)) == {
        "island-0/loss": 2.5,
        "island-0/tokens/merged": 3.0,
        "island-0/tokens/late": 0.0,
    }


def test_off_by_default_and_nothing_is_written(tmp_path: Path) -> None:
    assert make_sinks(LoggingConfig(), tmp_path) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_files_hold_the_records(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    sinks, warnings = make_sinks(LoggingConfig(tensorboard=True), tmp_path, started_at=1000.0)
    assert warnings == []
    (sink,) = sinks
    sink.write(RECORD)
    sink.write({"source": "syncer", "step": 41, "time": 13.0, "merges": 7})
    assert sink.failed is None
    sink.close()
    sink.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    read = {
        value.tag: (event.step, event.wall_time, value.tensor.float_val[0])
        for event in loader.EventFileLoader(str(path)).Load()
        for value in event.summary.value
    }
    assert read["island-0/loss"] == (40, 1012.5, 2.5)
    assert read["syncer/merges"] == (41, 1013.0, 7.0)
    assert set(read) == {"island-0/loss", "island-0/tokens/merged", "island-0/tokens/late", "syncer/merges"}


def test_a_missing_package_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    sinks, warnings = make_sinks(LoggingConfig(tensorboard=True, wandb=True), tmp_path)
    assert sinks == []
    assert len(warnings) == 2
    assert all("diloco[track]" in warning for warning in warnings)


def test_a_tracker_that_cannot_write_says_why_and_stays_quiet(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path, 0.0)
    sink.write({"source": "x", "step": 1, "time": "not a number", "loss": 1.0})
    assert sink.failed is not None
    sink.write(RECORD)
    sink.close()
    # A plain file where its folder should be: it can't be made, and the run goes on.
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert make_sinks(LoggingConfig(tensorboard=True), blocked)[0] == []


class FakeWandb(types.ModuleType):
    """Stands in for the wandb package, which tests do not install: records what is asked of it."""

    def __init__(self, api_key: str | None = None, login_error: str | None = None) -> None:
        super().__init__("wandb")
        self.api = types.SimpleNamespace(api_key=api_key)
        self.login_error = login_error
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[str, str]] = []
        self.init_arguments: dict[str, object] = {}
        self.finished = 0

    def Settings(self, **settings: object) -> dict[str, object]:
        return settings

    def init(self, **arguments: object) -> "FakeWandb":
        if self.login_error:
            raise RuntimeError(self.login_error)
        self.init_arguments = arguments
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(autouse=True)
def _no_wandb_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def test_wandb_gives_each_source_its_own_step_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb(api_key="k")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (sink,), warnings = make_sinks(LoggingConfig(wandb=True), tmp_path)
    assert warnings == []
    sink.write(RECORD)
    sink.write({**RECORD, "step": 41})
    sink.close()
    assert fake.axes == [("island-0/*", "island-0/step")]
    assert fake.logged[0] == {
        "island-0/loss": 2.5,
        "island-0/tokens/merged": 3.0,
        "island-0/tokens/late": 0.0,
        "island-0/step": 40,
    }
    assert fake.init_arguments["mode"] is None
    assert fake.init_arguments["project"] == "diloco"
    assert fake.finished == 1


def test_wandb_without_login_writes_offline_and_never_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sinks, warnings = make_sinks(LoggingConfig(wandb=True), tmp_path)
    assert len(sinks) == 1
    assert "offline" in warnings[0]
    assert fake.init_arguments["mode"] == "offline"


def test_wandb_that_refuses_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(login_error="no such team"))
    sinks, warnings = make_sinks(LoggingConfig(wandb=True), tmp_path)
    assert sinks == []
    assert "no such team" in warnings[0]
