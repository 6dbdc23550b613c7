"""What a process of a run does first and last: run.process, and how run.agent sums up its ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from diloco_cli.run.agent import exit_code
from diloco_cli.run.process import PARENT


def test_a_process_whose_parent_died_before_it_could_look_ends_at_once():
    """A rank that was being started when its torchrun agent was killed must not train on as an orphan."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    body = "from diloco_cli.run import process; process.die_with_parent(); print('lives')"
    for parent, says in ((os.getpid(), "lives\n"), (gone.pid, "")):
        env = {**os.environ, PARENT: str(parent)}
        done = subprocess.run([sys.executable, "-c", body], env=env, capture_output=True, text=True, check=False)
        assert done.stdout == says, done.stderr
        assert (done.returncode == 0) == bool(says)


@pytest.mark.parametrize(
    ("codes", "code"), [([1], 1), ([2, 1], 2), ([1, -9], 137), ([-9, -15], 137), ([-15, -15], 143), ([3, -15], 3)]
)
def test_the_islands_exit_code_is_that_of_the_cause(codes, code):
    assert exit_code(codes) == code
