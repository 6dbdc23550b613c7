"""The built wheel, unpacked and used from an empty folder: settings and recipes travel with the program."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the wheel is built without network")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would put into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=100,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def _run(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "diloco_cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_wheel_carries_conf_and_recipes(installed: Path) -> None:
    for name in ("conf", "recipes"):
        shipped = {str(p.relative_to(ROOT / name)) for p in (ROOT / name).rglob("*.yaml")}
        packed = {
            str(p.relative_to(installed / "diloco_cli/_share" / name))
            for p in (installed / "diloco_cli/_share" / name).rglob("*.yaml")
        }
        assert packed == shipped
    assert "diloco=diloco_cli.cli.app:main" in next(installed.glob("*.dist-info/entry_points.txt")).read_text().replace(
        " ", ""
    )


def test_commands_work_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    listed = _run(installed, tmp_path, "recipes")
    assert listed.returncode == 0, listed.stderr
    assert f"files: {installed}" in listed.stdout
    for arguments in (
        ["--help"],
        ["config", "model"],
        ["train", "--dry-run", "conf=bring-your-own-model"],
    ):
        done = _run(installed, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []
