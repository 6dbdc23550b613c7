"""The installed `diloco` command: exit codes, streams, messages, start-up time, trained parameters."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_cli.cli import app as cli_app
from diloco_cli.cli import commands
from diloco_cli.cli.app import printable
from diloco_cli.errors import ConfigError
from diloco_cli.observe.summary import next_commands

DILOCO = str(Path(sys.executable).parent / "diloco")
HEAVY = {
    "torch",
    "numpy",
    "hydra",
    "omegaconf",
    "yaml",
    "rich",
    "diloco_cli.config.schema",
    "diloco_cli.config.compose",
}


def diloco(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.run(
        [DILOCO, *arguments],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


# ---- start-up -------------------------------------------------------------------------------------


def test_help_lists_the_commands_and_answers_at_once(tmp_path: Path) -> None:
    done = diloco("--help", cwd=tmp_path)
    assert done.returncode == 0
    listed = re.findall(r"^  ([a-z]+)  ", done.stdout.partition("Commands:")[2], re.MULTILINE)
    looking = ["status", "watch", "doctor", "replay", "join", "leave", "simulate"]
    assert listed == ["train", "resume", *looking, "evaluate", "generate", "export", "recipes", "config"]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        diloco("--help", cwd=tmp_path)
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 0.5, times


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["simulate", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from diloco_cli.cli.app import _run\n"
        f"code = _run({arguments!r})\n"
        "print('IMPORTED', *sys.modules, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.partition("IMPORTED ")[2].split())
    assert imported
    assert not imported & HEAVY


def test_lists_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom diloco_cli.cli.app import _run\n"
        "assert _run(['recipes']) == 0 and _run(['config', 'sync']) == 0\n"
        "try:\n    _run(['train', 'sync.quorum=9'])\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_version_and_no_arguments(tmp_path: Path) -> None:
    assert re.fullmatch(r"diloco \d+\.\d+\.\d+\n", diloco("--version", cwd=tmp_path).stdout)
    assert diloco(cwd=tmp_path).returncode == 2


# ---- wrong usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "islands.0.bandwith=3gbps"], "network.named.island-0.bandwidth"),
        (["train", "islands.each.batch=${islands.nope}"], "islands.each.batch"),
        (["train", "network.bandwidth=3gbs"], "3gbps"),
        (["train", "+new.key=1"], "new.key"),
        (["train", "sync.quorum=9"], "sync.quorum"),
        (["train", "conf=first-rn"], "conf=first-run"),
        (["train", "conf=a", "conf=b"], "one recipe at a time"),
        (["train", "conf="], "diloco recipes"),
        (["train", "conf=nowhere.yaml", "run.steps=1"], "there is no recipe"),
        (["train", "-m", "sync.quorum=1,9"], "sync.quorum"),
        (["train", "sync.quorum=1,2"], "--multirun"),
        (["train", "--islands.count=4"], "islands.count=4"),
        (["train", "--dryrun"], "--dry-run"),
        (["train", "--run-dir", ".."], "not empty"),
        (["trian"], "train"),
        (["evaluate"], "RUN"),
        (["evaluate", "nope"], "there is no run"),
        (["evaluate", "nope", "--max-sequences", "0"], "--max-sequences"),
        (["generate", "nope", "--prompt", "x"], "there is no run"),
        (["generate", "."], "--prompt"),
        (["generate", ".", "--prompt", "x", "--device", "gpu"], "cuda"),
        (["export", "nope", "--to", "out"], "there is no run"),
        (["config", "snyc"], "diloco config sync"),
    ],
)
def test_mistakes_exit_2_with_a_plain_message_and_leave_nothing(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    here = tmp_path / "work"
    here.mkdir()
    start = time.perf_counter()
    done = diloco(*arguments, cwd=here)
    assert time.perf_counter() - start < 5
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) <= 4
    for word in ("Traceback", "$VALUE", "earch path", "To append"):
        assert word not in done.stderr
    assert os.listdir(here) == []


def test_a_malformed_environment_variable_is_named(tmp_path: Path) -> None:
    done = diloco("train", cwd=tmp_path, OMP_NUM_THREADS="many")
    assert done.returncode == 2
    assert "OMP_NUM_THREADS" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [["train", "sync.quorum=9"], ["train", "--nope"], ["evaluate", "nope"]])
def test_errors_are_json_too(arguments: list[str], tmp_path: Path) -> None:
    done = diloco(*arguments, "--json", cwd=tmp_path)
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["status"]) == (1, "failed")
    assert set(document["error"]) == {"what", "where", "why", "hint", "exit_code"}
    assert document["error"]["exit_code"] == 2
    assert done.stderr.startswith(f"error: {document['error']['what']}")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "Traceback" in diloco("train", "sync.quorum=9", "--debug", cwd=tmp_path).stderr


def test_text_from_outside_is_neither_markup_nor_terminal_control(tmp_path: Path) -> None:
    done = diloco("train", "model=[bold red]x", "--json", cwd=tmp_path)
    assert "[bold red]x" in done.stderr
    done = diloco("train", "conf=\x1b[2J\x07x", cwd=tmp_path)
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr
    assert printable("a\tb\n\x9b1mé\u202e") == "a\tb\n\ufffd1mé\ufffd"


def test_internal_errors_are_one_line_and_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(json_output: bool) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(commands, "recipes", broken)
    assert cli_app._run(["recipes"]) == 70
    assert capsys.readouterr().err == (
        "error: internal error: ZeroDivisionError: oops\n  hint: --debug shows the traceback\n"
    )
    assert cli_app._run(["recipes", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(json_output: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "recipes", interrupted)
    assert cli_app._run(["recipes"]) == 130


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [DILOCO, "config"], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60, check=False
    )
    os.close(writer)
    assert process.stderr == b""
    assert process.returncode != 0


# ---- dry run, lists -------------------------------------------------------------------------------


def test_dry_run_shows_configuration_and_plan_and_starts_nothing(tmp_path: Path) -> None:
    done = diloco("train", "--dry-run", "islands.count=3", "network.bandwidth=30mbps", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "  count: 3\n" in done.stdout
    for word in ("parameters", "fragment", "30mbps", "island-0 .. island-2", "syncer", "tokens"):
        assert word in done.stdout
    assert os.listdir(tmp_path) == []


def test_dry_run_of_a_sweep_as_json(tmp_path: Path) -> None:
    done = diloco("train", "-m", "--dry-run", "--json", "outer.lr=0.5,0.7", "model=tiny,small", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    documents = json.loads(done.stdout)
    shown = [(d["config"]["outer"]["lr"], d["config"]["model"]["name"]) for d in documents]
    assert shown == [(0.5, "tiny"), (0.5, "small"), (0.7, "tiny"), (0.7, "small")]
    assert all(d["schema_version"] == 1 and d["plan"]["fragments"]["count"] == 4 for d in documents)
    assert os.listdir(tmp_path) == []


def test_recipes_and_config_lists(tmp_path: Path) -> None:
    text = diloco("recipes", cwd=tmp_path).stdout
    assert all(name in text for name in ("first-run", "mixed-hardware", "fsdp-island", "your-own-text"))
    assert len(json.loads(diloco("recipes", "--json", cwd=tmp_path).stdout)["recipes"]) >= 6
    groups = diloco("config", cwd=tmp_path).stdout
    assert "sync " in groups
    assert "Options: decoupled, diloco, streaming." in groups
    one = diloco("config", "sync", cwd=tmp_path).stdout
    assert "sync.quorum=1" in one
    assert "fewest learners" in one
    (group,) = json.loads(diloco("config", "sync", "--json", cwd=tmp_path).stdout)["groups"]
    assert {s["key"] for s in group["settings"]} >= {"sync.fragments", "sync.overlap_steps"}


def test_completion(tmp_path: Path) -> None:
    assert commands.complete_override("conf=thin") == ["conf=thin-links"]
    assert commands.complete_override("algorithm=d") == ["algorithm=decoupled", "algorithm=diloco"]
    assert commands.complete_override("outer.mer") == ["outer.merge="]
    assert commands.complete_override("outer.merge=r") == ["outer.merge=rda"]
    assert "model=12b" in commands.complete_override("model=")
    script = diloco("--show-completion", "bash", cwd=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_DILOCO_COMPLETE" in script.stdout


# ---- runs -----------------------------------------------------------------------------------------


def test_run_names_and_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first-run-20260101-120000", "first-run-20260102-120000"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert commands.find_run("first-run-20260101-120000") == Path("runs/first-run-20260101-120000")
    assert commands.find_run("runs/first-run-20260102-120000").is_dir()
    for wrong in ("first-run-20260101-12000", "first-run", "runs/first-run-20260101-120001"):
        with pytest.raises(ConfigError) as caught:
            commands.find_run(wrong)
        assert "did you mean first-run-2026010" in caught.value.hint
    statuses = {"completed": 0, "failed": 1, "stopped": 130, "waiting": 4, "unheard-of": 1}
    assert {s: commands.exit_code({"status": s}) for s in statuses} == statuses
    assert commands.exit_code({}) == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with final parameters of an untrained tiny model, and a text to measure it on."""
    from diloco_cli.config.compose import compose
    from diloco_cli.train.export import save_final
    from diloco_cli.train.model import build_model, state_tensors
    from diloco_cli.train.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").mkdir()
    for index in range(40):
        (folder / "text" / f"{index}.txt").write_text(f"{index} the quick brown fox jumps over the lazy dog. " * 40)
    cfg = compose(["data=text", f"data.path={folder / 'text'}", "model.dim=32", "model.ffn_dim=64", "data.seq_len=32"])
    model = build_model(cfg.model, 256, seed=0)
    save_final(folder / "runs" / "mine", state_tensors(model), cfg, load_tokenizer("bytes"))
    return folder


def test_evaluate_generate_export(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)

    def result(*arguments: str) -> str:
        assert cli_app._run(list(arguments)) == 0
        return capsys.readouterr().out

    document = json.loads(result("evaluate", "mine", "--json", "--max-sequences", "8", "--device", "cpu"))
    assert document["schema_version"] == 1
    assert document["loss"]["validation"] == pytest.approx(5.55, abs=0.3)  # log 256: nothing was learnt
    assert "nats per token" in result("evaluate", "mine", "--max-sequences", "8", "--device", "cpu")

    generate = ["generate", "runs/mine", "--prompt", "the [bold]", "--max-tokens", "8", "--device", "cpu"]
    text = result(*generate)
    assert text.startswith("the [bold]")
    document = json.loads(result(*generate, "--json"))
    assert document["prompt"] == "the [bold]"
    assert printable(document["prompt"] + document["text"]) + "\n" == text

    exported = json.loads(result("export", "mine", "--to", "out", "--json"))
    assert {"config.json", "model.safetensors"} <= set(exported["files"])
    assert cli_app._run(["export", "mine", "--to", "out"]) != 0


def test_generate_writes_to_stdout_only(trained: Path) -> None:
    done = diloco("generate", "mine", "--prompt", "x", "--max-tokens", "2", "--device", "cpu", cwd=trained)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("x")


@pytest.mark.parametrize(
    ("words", "current", "found"),
    [
        ("diloco train conf = th", 4, ["thin-links"]),
        ("diloco train algorithm =", 3, ["decoupled", "diloco", "streaming"]),
        ("diloco train -m outer.mer", 3, ["outer.merge="]),
    ],
)
def test_bash_completion_breaks_words_at_equals(words: str, current: int, found: list[str], tmp_path: Path) -> None:
    done = diloco(cwd=tmp_path, _DILOCO_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(current))
    assert done.stdout.split() == found


def test_a_run_folder_runs_no_code_of_its_own_unless_it_is_trusted(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from diloco_cli.config.compose import compose
    from diloco_cli.train.export import save_final
    from diloco_cli.train.model import build_model, state_tensors
    from diloco_cli.train.tokenizer import load_tokenizer

    monkeypatch.chdir(trained)
    cfg = compose(["data=text", f"data.path={trained / 'text'}", "data.seq_len=32"], "bring-your-own-model")
    save_final(trained / "runs" / "own", state_tensors(build_model(cfg.model, 256, 0)), cfg, load_tokenizer("bytes"))
    evaluate = ["evaluate", "own", "--max-sequences", "4", "--device", "cpu"]
    assert cli_app._run(evaluate) != 0
    hint = capsys.readouterr().err.partition("--trust-entry-point")
    assert hint[1]
    assert cli_app._run([*evaluate, "--trust-entry-point", "other.module:build"]) != 0
    assert cli_app._run([*evaluate, hint[1], hint[2].split()[0]]) == 0
    # What a run of such a model proposes at its end works as it is typed.
    proposed = next_commands({"status": "completed", "run_dir": "own"}, cfg.model.entry_point)[1]
    assert cli_app._run([*shlex.split(proposed)[1:], *evaluate[2:]]) == 0
