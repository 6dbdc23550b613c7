"""`diloco status`, `watch` and `doctor` as typed, on the files of real runs and beside one that runs."""

from __future__ import annotations

import json
import os
import pty
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.cli.app import _run
from diloco_cli.config.compose import compose
from diloco_cli.config.schema import Config, Device
from diloco_cli.errors import ConfigError, EnvironmentNotReady
from diloco_cli.observe.events import read_jsonl
from diloco_cli.run import doctor, rundir
from diloco_cli.run.launcher import run_training
from diloco_cli.run.rundir import RunDir, hold_lock, is_alive

DILOCO = str(Path(sys.executable).parent / "diloco")
SMALL = [
    "launcher=forkserver",
    "model.dim=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=64",
    "data=text",
    "data.seq_len=32",
    "islands.count=2",
    "islands.each.batch=4",
    "run.eval_sequences=4",
    "sync.fragments=2",
    "sync.min_fragment_bytes=4KiB",
    "sync.inner_steps=10",
    "network.latency=2ms",
    "logging.interval=0.2s",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small text, so that the run's time is not spent on reading one."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(30):
        (folder / f"{index}.txt").write_text(f"{index} the quick brown fox jumps over the lazy dog. " * 20)
    return f"data.path={folder}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """The folder of a real run that reached its target; not to be changed."""
    path = tmp_path_factory.mktemp("finished") / "done"
    run_training(compose([*SMALL, text, "run.steps=40"], None), [], run_dir=path, quiet=True)
    return path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert _run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return dict(json.loads(out))


def wait_until(true: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Look again until it is so."""
    deadline_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline_s, f"not within {seconds} s: {what}"
        time.sleep(0.02)


# ---- status of runs that are over -----------------------------------------------------------------


def test_a_finished_run_has_the_figures_of_its_summary(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "status", str(finished))
    summary = json.loads((finished / "summary.json").read_text())
    assert found["schema_version"] == 1
    assert (found["state"], found["alive"], found["error"]) == ("completed", False, None)
    assert (found["step"], found["target_steps"], found["progress"]) == (40, 40, 1.0)
    for key in ("merges", "tokens", "goodput", "uptime", "tokens_per_s", "run_dir"):
        assert found[key] == summary[key], key
    assert found["loss"]["validation"] == summary["loss"]["validation"]
    islands = found["islands"]
    assert {island["name"]: island["step"] for island in islands} == summary["steps"]
    assert {island["state"] for island in islands} == {"finished"}
    assert [island["lag_steps"] for island in islands] == [40 - island["step"] for island in islands]
    assert found["time_s"] == pytest.approx(max(e["time"] for e in read_jsonl(finished / "events.jsonl")), abs=1e-3)
    assert found["next"][0].startswith("diloco generate")

    assert _run(["status", str(finished)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("completed", "40 of 40 (100%)", "island-1", "finished", "diloco evaluate"):
        assert words in out


def test_a_run_that_died_is_as_of_its_last_record(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "summary.json").unlink()
    events = (copied / "events.jsonl").read_bytes().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(events) if b'"final_cut"' in line)
    restart = {"time": 9000.0, "event": "restart", "process": "island-1", "attempt": 2, "reason": "OOM", "delay_s": 1.0}
    # The last line is half written, as a machine leaves it that loses power.
    kept = [*events[:cut], json.dumps(restart).encode() + b"\n", b'{"time": 99999.0, "event": "fin']
    (copied / "events.jsonl").write_bytes(b"".join(kept))
    found = document(capsys, "status", str(copied))
    assert (found["state"], found["alive"]) == ("died", False)
    assert found["time_s"] == 9000.0
    assert found["eta_s"] is None
    assert found["tokens_per_s"] is None
    one = found["islands"][1]
    assert (one["state"], one["restarts"], one["last_reason"]) == ("gone", 1, "OOM")
    assert one["reason"] == "was restarting: attempt 2 in 1 s: OOM"
    assert (found["islands"][0]["state"], found["islands"][0]["reason"]) == ("gone", "was training")
    assert found["restarts"] == 1
    assert found["recent"][-1]["text"] == "island-1, attempt 2 in 1 s: OOM"
    assert any(command.startswith("diloco resume") for command in found["next"])


def test_a_run_just_made_has_nothing_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = rundir.create(Config(), [], tmp_path / "new")
    found = document(capsys, "status", str(run.path))
    assert (found["state"], found["step"], found["merges"]) == ("not started", 0, 0)
    assert found["goodput"] is None
    assert found["tokens"] is None
    with hold_lock(run):
        assert document(capsys, "status", str(run.path))["state"] == "starting"
        # Its syncer waits for a quorum that the islands' own records do not show.
        wait = {"time": 1.0, "event": "waiting_for_quorum", "available": 1, "quorum": 2, "timeout_s": 120.0}
        run.events.write_text(json.dumps(wait) + "\n")
        assert document(capsys, "status", str(run.path))["state"] == "waiting for quorum 1/2"
        assert _run(["status", str(run.path)]) == 0
        assert "waiting for quorum 1/2" in capsys.readouterr().out
    assert document(capsys, "status", str(run.path))["state"] == "died"


def test_a_summary_from_before_a_resumption_is_not_the_runs(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "status", str(copied))["state"] == "completed"
    hold_lock(RunDir(copied)).close()  # as a launcher does that comes to nothing
    found = document(capsys, "status", str(copied))
    assert (found["state"], found["alive"]) == ("died", False)


def test_files_full_of_junk_are_shown_not_obeyed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(copied / "events.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "fault", "target": {}, "kind": [1], "text": "\\u001b[2J[red]x", "time": "now"}\n[]\nxx\n')
        file.write('{"event": "restart", "process": null}\n{"event": "snapshot", "step": "a", "bytes": 1e999}\n')
    (copied / "summary.json").write_text("{")
    found = document(capsys, "status", str(copied))
    assert found["snapshot"] == {"step": None, "path": None, "bytes": None, "age_s": 0.0}
    assert _run(["status", str(copied)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]x" in out


def test_the_newest_run_is_the_default(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(["status"]) == 2
    assert "there is no run in ./runs" in capsys.readouterr().err
    names = ["z-20260101-000000", "a-20260102-000000", "m-20251231-000000"]
    for age, name in enumerate(names):
        folder = Path(shutil.copytree(copied, tmp_path / "runs" / name))
        os.utime(folder / "config.yaml", (2e9 - 10 * abs(age - 1), 2e9 - 10 * abs(age - 1)))
    (tmp_path / "runs" / "no-run").mkdir()
    assert document(capsys, "status")["name"] == names[1]
    assert document(capsys, "status", names[2])["name"] == names[2]
    assert _run(["status", "a-20260102-00000"]) == 2
    assert names[1] in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["status", str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_watching_a_finished_run_draws_it_once(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["watch", str(finished)]) == 0
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1  # old events are not told again
    assert "progress step=40/40 percent=100" in err
    assert out.splitlines()[0].split() == ["status", "completed"]
    assert "run folder" in out


# ---- the lock -------------------------------------------------------------------------------------

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from diloco_cli.run.rundir import RunDir, hold_lock
lock = hold_lock(RunDir(Path(sys.argv[1])))
forked = os.fork()
if not forked:
    lock.close()  # harmless here
    time.sleep(600)
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
print(forked, started.pid, flush=True)
time.sleep(600)
"""


def test_the_lock_ends_with_its_holder_and_no_child_keeps_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not is_alive(run)
    assert not run.lock.exists()  # asking leaves nothing
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    children: list[int] = []
    try:
        assert holder.stdout is not None
        children = [int(word) for word in holder.stdout.readline().split()]
        assert len(children) == 2
        assert is_alive(run)
        with pytest.raises(EnvironmentNotReady, match="running already"):
            hold_lock(run)
        holder.kill()
        holder.wait()
        assert not is_alive(run)
        for child in children:
            os.kill(child, 0)  # they do live on
        with hold_lock(run):
            assert is_alive(run)
        assert not is_alive(run)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_an_onlooker_does_not_keep_a_launcher_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    hold_lock(run).close()
    looks = subprocess.Popen(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(Path(rundir.__file__).parents[2])!r})\n"
         "from pathlib import Path\nfrom diloco_cli.run.rundir import RunDir, is_alive\n"
         f"run = RunDir(Path({str(tmp_path)!r}))\nprint(flush=True)\nwhile True: is_alive(run)\n"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert looks.stdout is not None
        looks.stdout.readline()
        for _ in range(50):
            hold_lock(run).close()
    finally:
        looks.kill()
        looks.wait()
        assert looks.stdout is not None
        looks.stdout.close()


# ---- beside a run that runs -----------------------------------------------------------------------


class Watching:
    """`diloco watch` on a pseudo terminal of 110 x 30 (its stderr), stdout in a pipe."""

    def __init__(self, run: Path) -> None:
        self.master, slave = pty.openpty()
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [DILOCO, "watch", str(run)], stdin=slave, stdout=subprocess.PIPE, stderr=slave, env=env, text=True
        )
        os.close(slave)
        self.seen = ""

    def read(self) -> str:
        try:
            while select.select([self.master], [], [], 0.02)[0] and (chunk := os.read(self.master, 65536)):
                self.seen += chunk.decode("utf-8", "replace")
        except OSError:  # the other end is closed
            pass
        return self.seen

    def end(self) -> tuple[int, str]:
        """Exit code and stdout. What it still draws is read meanwhile, or it would wait for that."""
        wait_until(lambda: self.read() is not None and self.process.poll() is not None, "the end of watch")
        assert self.process.stdout is not None
        with self.process.stdout as out:
            return self.process.returncode, out.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def running(tmp_path: Path, text: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run with merges done that would go on for long."""
    path = tmp_path / "live"
    with open(tmp_path / "err", "wb") as err:
        train = subprocess.Popen(
            [DILOCO, "train", *SMALL, text, "run.steps=1000000", "--quiet", "--run-dir", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
    try:
        events = RunDir(path).events
        merged = lambda: events.exists() and b'"merge"' in events.read_bytes()  # noqa: E731
        wait_until(lambda: train.poll() is not None or merged(), "a merge")
        assert train.poll() is None, (tmp_path / "err").read_text()
        yield train, path
    finally:
        if train.poll() is None:
            train.send_signal(signal.SIGINT)
            train.wait(60)


@pytest.mark.e2e
def test_status_and_watch_from_another_terminal(
    running: tuple[subprocess.Popen[bytes], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    train, path = running
    first = document(capsys, "status", str(path))
    assert (first["state"], first["alive"]) == ("running", True)
    assert first["merges"] > 0
    assert first["next"] == [f"diloco watch {path}"]
    with pytest.raises(EnvironmentNotReady, match="running already"):
        hold_lock(RunDir(path))

    leaves, stays = Watching(path), Watching(path)
    plain = subprocess.Popen([DILOCO, "watch", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        for watching in (leaves, stays):
            wait_until(lambda w=watching: "island-1" in w.read() and "2 training" in w.read(), "the live screen")
        leaves.process.send_signal(signal.SIGINT)
        assert leaves.end() == (0, "")  # leaving is no failure, and the run goes on
        assert leaves.seen.rindex("\x1b[?1049l") > leaves.seen.rindex("\x1b[?1049h")
        assert train.poll() is None
        later = document(capsys, "status", str(path))
        assert later["alive"]
        assert later["time_s"] > first["time_s"]
        wait_until(lambda: document(capsys, "status", str(path))["step"] > first["step"], "a step")

        train.send_signal(signal.SIGINT)
        code, out = stays.end()
        assert train.wait(60) == 130
        assert code == 0
        assert out.splitlines()[0].split() == ["status", "stopped"]
        assert f"diloco status {path}" in out
        assert f"diloco resume {path}" in out
        assert stays.seen.rindex("\x1b[?1049l") > stays.seen.rindex("\x1b[?1049h")
        assert plain.stderr is not None
        with plain.stderr as told:
            lines = told.read()
        assert plain.wait(60) == 0
        assert "finish" in lines
        assert "join" not in lines  # that was before
        assert "\x1b" not in lines
    finally:
        for watching in (leaves, stays):
            watching.kill()
        plain.kill()
        plain.wait()
    after = document(capsys, "status", str(path))
    assert (after["state"], after["alive"]) == ("stopped", False)


# ---- doctor ---------------------------------------------------------------------------------------


def of(findings: list[doctor.Finding]) -> tuple[str, str]:
    """The status and the words of the only finding."""
    (one,) = findings
    assert bool(one.fix) == (one.status != "pass"), one
    return one.status, f"{one.says} | {one.fix}"


def test_a_machine_that_is_ready(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"run.dir={tmp_path / 'runs'}"
    found = document(capsys, "doctor", *SMALL, text, where)
    assert found["ready"] is True
    assert found["counts"]["fail"] == 0
    names = {finding["name"] for finding in found["findings"]}
    assert {"python", "packages", "port", "disk", "memory", "processors", "open files", "devices", "data"} <= names
    assert os.listdir(tmp_path) == []  # nothing was left behind
    assert _run(["doctor", *SMALL, text, where]) == 0
    assert "\nready: " in capsys.readouterr().out


def test_what_fails_is_3_and_says_how_to_mend_it(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert _run(["doctor", *SMALL, text, f"network.port={port}", "--json"]) == 3
        found = json.loads(capsys.readouterr().out)
        assert found["ready"] is False
        (failed,) = [finding for finding in found["findings"] if finding["status"] == "fail"]
        assert failed["name"] == "port"
        assert str(port) in failed["says"]
        assert failed["fix"] == "network.port=0 takes any free port"
        assert _run(["doctor", *SMALL, text, f"network.port={port}"]) == 3
        assert "fix: network.port=0" in capsys.readouterr().out
    assert _run(["doctor", "islands.cuont=2"]) == 2


def test_disk_memory_and_model_are_measured_against_this_machine(tmp_path: Path, text: str) -> None:
    cfg = compose([*SMALL, text, f"run.dir={tmp_path}"], None)
    # Closed form: (keep + 1) snapshots of theta, momentum, and per island parameters and two moments; and the result.
    assert doctor.snapshot_bytes(cfg, 1000) == 4 * 1000 + 4 * 1000 + 2 * 3 * 4 * 1000
    free = shutil.disk_usage(tmp_path).free
    per_parameter = (cfg.run.snapshot_keep + 1) * 32 + 4
    assert of(doctor.disk(cfg, 1000))[0] == "pass"
    assert of(doctor.disk(cfg, int(0.7 * free / per_parameter)))[0] == "warn"
    status, words = of(doctor.disk(cfg, int(1.5 * free / per_parameter)))
    assert status == "fail"
    assert "run.snapshot_keep" in words

    def plan(num_bytes: int) -> dict[str, Any]:
        return {"processes": [{"process": "syncer", "ranks": 1, "memory_bytes": {"total": num_bytes}}]}

    assert of(doctor.memory(cfg, plan(1000)))[0] == "pass"
    assert of(doctor.memory(cfg, plan(2**60)))[0] == "fail"
    large = compose(["data=text", text, "model=12b", "islands.count=64"], None)
    findings = {finding.name: finding.status for finding in doctor.check(large)}
    assert (findings["model"], findings["memory"]) == ("pass", "fail")


def test_ports_folders_limits_devices_and_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config()
    cfg.run.dir = str(tmp_path / "file" / "runs")
    assert of(doctor.run_dir(cfg))[0] == "pass"
    cfg.run.dir = "/proc/runs"
    if Path("/proc").is_dir():
        assert of(doctor.run_dir(cfg))[0] == "fail"
    assert os.listdir(tmp_path) == []

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))
        status, words = of(doctor.open_files(cfg))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (status, words.rpartition(" | ")[2]) == ("fail", "ulimit -n 160")
    assert of(doctor.open_files(cfg))[0] == "pass"

    cfg.islands.each.device = Device.cpu
    assert of(doctor.devices(cfg))[0] == "pass"
    import torch

    if not torch.cuda.is_available():
        cfg.islands.each.device = Device.cuda
        status, words = of(doctor.devices(cfg))
        assert (status, words.rpartition(" | ")[2]) == ("fail", "islands.each.device=cpu")
        cfg.islands.each.device = Device.cpu

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cfg.islands.count = 1
    assert of(doctor.processors(cfg))[0] == "pass"
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    status, words = of(doctor.processors(cfg))
    assert status == "warn"
    assert "islands.each.threads=" in words
    monkeypatch.delenv("OMP_NUM_THREADS")
    cfg.islands.count = 100
    assert of(doctor.processors(cfg))[0] == "warn"

    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [name for name in sys.modules if name.partition(".")[0] in ("wandb", "transformers")]:
        monkeypatch.delitem(sys.modules, name)
    cfg.logging.wandb = True
    assert of(doctor.extras(cfg))[0] == "warn"


def test_data_is_read_before_a_run_needs_it(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("hello")
    good = compose(["data=text", f"data.path={folder}"], None)
    assert of(doctor.data(good))[0] == "pass"
    if Path("/proc/self/mem").exists():  # a file that can be opened, by anybody, and not read
        (folder / "b.txt").symlink_to("/proc/self/mem")
        status, words = of(doctor.data(good))
        assert status == "fail"
        assert "b.txt" in words
    good.data.path = str(tmp_path / "nothing")
    assert of(doctor.data(good))[0] == "fail"
    good.data.tokenizer = str(tmp_path / "no.json")
    with pytest.raises(ConfigError, match="no such tokenizer"):
        doctor.tokenizer(good)
    findings = {finding.name: finding for finding in doctor.check(good)}
    assert findings["tokenizer"].status == findings["model"].status == "fail"


@pytest.mark.parametrize(
    ("version", "wanted", "good"),
    [
        ("2.13.0+cpu", ">=2.9,<2.14", True),
        ("2.14.0", "<2.14,>=2.9", False),
        ("2.8.1", ">=2.9", False),
        ("2.10", ">=2.9", True),
        ("47", ">=47.0.0", True),
        ("1.3.8", ">=1.3.2,<1.4", True),
        ("5", "", True),
    ],
)
def test_versions(version: str, wanted: str, good: bool) -> None:
    assert doctor.satisfies(version, wanted) is good
