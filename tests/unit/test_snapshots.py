"""Snapshots on disk: states come back bit for bit, any damage is found and named, a full disk leaves nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco_cli.run import snapshots

TENSORS = [
    torch.randn(3, 5),
    torch.randn(7).bfloat16(),
    torch.tensor(3, dtype=torch.int64),
    torch.tensor([True, False]),
    torch.arange(9, dtype=torch.uint8),
    torch.empty(0),
    torch.randn(4, 6).t(),
    torch.tensor([math.nan, -0.0, math.inf]),
]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(TENSORS),
)
STATES = st.dictionaries(
    st.one_of(st.text(max_size=4), st.integers(-5, 5)),
    st.recursive(
        LEAVES,
        lambda below: st.one_of(
            st.lists(below, max_size=3),
            st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), below, max_size=3),
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def same(a: object, b: object) -> bool:
    """Of the same kind, and bit for bit."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and (a == b or (a != a and b != b)) and math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and a == b


@settings(deadline=None)
@given(STATES)
def test_a_state_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, state: dict[object, object]) -> None:
    stem = tmp_path_factory.mktemp("state") / "rank-0"
    snapshots.write_state(stem, state)
    back = snapshots.read_state(stem)
    # NaN signs are not JSON's.
    assert same(state, back) or "nan" in repr(state)
    assert sorted(p.name for p in stem.parent.iterdir()) == ["rank-0.json", "rank-0.safetensors"]


def test_an_optimizers_state_comes_back_and_steps_on_alike(tmp_path: Path) -> None:
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]

    def step(i: int) -> None:
        optimizers[i].zero_grad()
        models[i](torch.ones(1, 3)).square().sum().backward()
        optimizers[i].step()

    step(0)
    snapshots.write_state(tmp_path / "o", {"o": optimizers[0].state_dict(), "m": dict(models[0].state_dict())})
    state = snapshots.read_state(tmp_path / "o")
    models[1].load_state_dict(state["m"])
    optimizers[1].load_state_dict(state["o"])
    for _ in range(3):
        step(0)
        step(1)
    assert models[0].weight.equal(models[1].weight)
    assert models[0].bias.equal(models[1].bias)


def make(checkpoints: Path, step: int) -> Path:
    folder = snapshots.begin(checkpoints, step)
    snapshots.write_state(
        folder / "islands" / "island-0" / "rank-0", {"x": torch.arange(6.0), "step": step, "lr": 1e-5}
    )
    (folder / "core.json").write_text('{"a": 1}')
    assert snapshots.finish(folder, {"step": step, "ratio": 1e-5}) > 0
    return folder


def test_every_flipped_bit_and_every_truncation_is_found_and_the_one_before_is_taken(tmp_path: Path) -> None:
    before, newest = make(tmp_path, 5), make(tmp_path, 7)
    assert snapshots.newest_good(tmp_path) == (newest, [])
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        right = path.read_bytes()
        damaged = [right[:n] for n in range(0, len(right), max(1, len(right) // 40))] + [right[:-1], right + b"x"]
        for bit in range(0, 8 * len(right), max(1, len(right) // 12)):
            flipped = bytearray(right)
            flipped[bit // 8] ^= 1 << (bit % 8)
            damaged.append(bytes(flipped))
        for wrong in damaged:
            path.write_bytes(wrong)
            found, problems = snapshots.newest_good(tmp_path)
            assert found == before, f"{path} as {wrong!r} was not found out"
            assert str(path) in problems[0] or path.name == "manifest.json"
        path.unlink()
        assert snapshots.newest_good(tmp_path)[0] == before
        path.write_bytes(right)
    assert snapshots.newest_good(tmp_path) == (newest, [])


def test_what_is_no_snapshot_is_left_alone(tmp_path: Path) -> None:
    good = make(tmp_path, 3)
    for name in ("step-x", "notes", "step-9"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-4").write_text("a file")
    found, problems = snapshots.newest_good(tmp_path)
    assert found == good
    assert problems == [f"{tmp_path / 'step-9'}: the snapshot has no manifest: it was not finished"]
    assert snapshots.newest_good(tmp_path / "nowhere") == (None, [])


def test_retention_counts_whole_ones_only(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    (tmp_path / "step-40" / "core.json").write_text('{"a": 2}')
    (tmp_path / "step-35").mkdir()
    snapshots.retain(tmp_path, 2)
    assert snapshots.newest_good(tmp_path)[0] == tmp_path / "step-30"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-20", "step-30", "step-35", "step-40"]


def test_a_snapshot_of_the_same_step_stays_until_the_new_one_is_finished(tmp_path: Path) -> None:
    make(tmp_path, 10)
    folder = snapshots.begin(tmp_path, 10)
    found, _ = snapshots.newest_good(tmp_path)
    assert found is not None
    assert snapshots.step_of(found) == 10
    # The run dies here, and is resumed from what was set aside.
    assert snapshots.put_back(found) == folder
    assert snapshots.verify(folder) == ""
    make(tmp_path, 10)
    snapshots.retain(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-10"]


FULL = """
import sys
from pathlib import Path
import torch
from diloco_cli.run import snapshots
checkpoints = Path(sys.argv[1])
if sys.argv[2:]:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    folder = snapshots.begin(checkpoints, 9)
    snapshots.write_state(folder / "rank-0", {"x": torch.zeros(1 << 20)})
    snapshots.finish(folder, {"step": 9})
except OSError as error:
    print("refused:", error.strerror)
"""


def fill(checkpoints: Path, *more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(checkpoints), *more], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("limit", [0, 100, 1 << 20])
def test_a_disk_that_takes_nothing_more_leaves_no_snapshot_that_counts(tmp_path: Path, limit: int) -> None:
    good = make(tmp_path, 3)
    assert "refused: File too large" in fill(tmp_path, str(limit))
    assert snapshots.newest_good(tmp_path)[0] == good


@pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED LOUDLY: only root can mount a small file system to fill")
def test_a_full_file_system_too(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], check=False)
    if mounted.returncode:
        pytest.skip("SKIPPED LOUDLY: this machine lets nobody mount a file system")
    try:
        good = make(tmp_path, 3)
        assert "refused: No space left on device" in fill(tmp_path)
        assert snapshots.newest_good(tmp_path)[0] == good
    finally:
        subprocess.run(["umount", tmp_path], check=True)
