"""Starting and ending the processes of a run on this machine: torchrun groups, or a forkserver.

Owns: command lines, environments, process groups. Decides nothing: run.launcher does. Called by: run.launcher.

torchrun starts in seconds and is what a user gets. The forkserver (launcher.kind: forkserver) keeps one process with
torch imported and forks every rank from it in a tenth of a second; the learner's code is the same.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol

from diloco_cli.config.schema import Config, LauncherKind
from diloco_cli.run import process
from diloco_cli.run.rundir import RunDir

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "diloco_cli.run.children"]


RETURN_VARIABLE = "DILOCO_RETURN_TO_STEP"
"""For the ranks of an island at its first start after `diloco resume`: the snapshot to go on from."""

# A killed process is gone in milliseconds, unless the kernel keeps it in a system call.
REAP_TIMEOUT_S = 2.0

CHILD_ENVIRONMENT = {
    # A file called like a standard module in the user's folder must not break torch.
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    # torch then takes large buffers in huge pages: a fragment's first touch costs as much as moving it does otherwise.
    "THP_MEM_ALLOC_ENABLE": "1",
}


class Child(Protocol):
    """A started process, or the processes of one island."""

    name: str

    def poll(self) -> int | None:
        """Exit code (negative: the signal), None while it lives. An island's is that of the first rank that failed."""

    def pids(self) -> list[int]:
        """Processes that were started directly."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""

    def kill(self) -> None:
        """SIGKILL to it and its whole process group. Does not wait."""

    def reap(self) -> None:
        """Wait for the end, after kill()."""


def threads_per_rank(cfg: Config, name: str) -> int:
    """CPU threads of each rank: as configured, or OMP_NUM_THREADS, or this machine's cores shared out among ranks."""
    if (threads := cfg.island(name).threads) is not None:
        return threads
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(asked) > 0:
        return int(asked)
    ranks = sum(cfg.island(n).nproc_per_node for n in cfg.island_names())
    return max(1, available_cores() // ranks)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def syncer_threads(cfg: Config) -> int:
    """Threads of the syncer's merges: all cores, since merges are short and rare; the system shares them out."""
    return min(8, available_cores())


class Children:
    """Starts the processes of one run.

    Attributes:
        cfg: what they are started by; replaced when an island joins.
    """

    def __init__(self, run: RunDir, cfg: Config, listening: socket.socket) -> None:
        self._run = run
        self.cfg = cfg
        self._listening = listening
        self._forks = cfg.launcher.kind is LauncherKind.forkserver
        self._control_write: int | None = None
        self.return_to: int | None = None
        """Step of the snapshot that islands go on from at their first start."""
        self._returned: set[str] = set()

    def start_syncer(self) -> Child:
        """Start the syncer with the listening socket, which outlives it, and a control pipe of its own."""
        self.close()
        env = {"OMP_NUM_THREADS": str(syncer_threads(self.cfg))}
        if self._forks:
            context = _forkserver()
            reader, writer = context.Pipe(duplex=False)
            self._control_write = os.dup(writer.fileno())
            writer.close()
            child: Child = _ForkedChild(
                "syncer", [_fork(_forked_syncer, self._run, "syncer", env, self._listening, reader)]
            )
            reader.close()
            return child
        read_fd, self._control_write = os.pipe()
        listen_fd = self._listening.fileno()
        module = ["diloco_cli.run.syncer_main", str(self._run.path), str(listen_fd), str(read_fd)]
        child = self._popen("syncer", module, env, (listen_fd, read_fd))
        os.close(read_fd)
        return child

    def start_island(self, name: str, more: Mapping[str, str] | None = None) -> Child:
        """Start one island's ranks.

        Args:
            more: environment variables for what is not the run proper (run.measure).
        """
        island = self.cfg.island(name)
        env = {**island.env, "OMP_NUM_THREADS": str(threads_per_rank(self.cfg, name)), RETURN_VARIABLE: ""}
        if more is not None:
            env |= more
        elif self.return_to is not None and name not in self._returned:
            self._returned.add(name)
            env[RETURN_VARIABLE] = str(self.return_to)
        match self.cfg.launcher_of(name):
            case LauncherKind.ssh:
                from diloco_cli.run import ssh

                return ssh.start(self._run, self.cfg, name, env)
            case LauncherKind.slurm:
                from diloco_cli.run import slurm

                return slurm.start(self._run, self.cfg, name, env)
            case LauncherKind.torchrun:
                return self._start_torchrun(name, env)
            case LauncherKind.forkserver:
                return self._fork_island(name, env)

    def _start_torchrun(self, name: str, env: dict[str, str]) -> Child:
        arguments = ["diloco_cli.run.agent", str(self._run.path), name, str(self.cfg.num_ranks(name))]
        return self._popen(name, arguments, env, ())

    def _fork_island(self, name: str, env: dict[str, str]) -> Child:
        num_ranks = self.cfg.num_ranks(name)
        env |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(_free_port())}
        ranks = [
            _fork(_forked_rank, self._run, name, env | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(num_ranks)
        ]
        return _ForkedChild(name, ranks)

    def tell_syncer(self, line: bytes) -> None:
        """Write one line to the syncer's control pipe; nothing happens if it is gone."""
        if self._control_write is not None:
            with suppress(BrokenPipeError):
                os.write(self._control_write, line)

    def close(self) -> None:
        """Close the control pipe."""
        if self._control_write is not None:
            os.close(self._control_write)
            self._control_write = None

    def _popen(self, name: str, module: list[str], env: dict[str, str], fds: tuple[int, ...]) -> Child:
        with open(self._run.log(name), "ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                # A session of its own: Ctrl-C in the terminal reaches the launcher alone, and the group can be killed.
                start_new_session=True,
                env={**CHILD_ENVIRONMENT, **os.environ, "PYTHONSAFEPATH": "1", **env, process.PARENT: str(os.getpid())},
            )
        return _PopenChild(name, popen)


class _PopenChild:
    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._popen = popen
        self._killed: set[int] = set()

    def poll(self) -> int | None:
        code = self._popen.poll()
        # As shells do, and run.agent: above 128 it stands for a signal.
        return code if code is None or code <= 128 else 128 - code

    def pids(self) -> list[int]:
        return [self._popen.pid]

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            self._popen.terminate()

    def kill(self) -> None:
        # torchrun gives each rank a session of its own. They would die with it all the same, only a moment later.
        below = _descendants(self._popen.pid) if self._popen.returncode is None else []
        for pid in below:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._killed.update(below)
        # Even when the agent is gone, members of its group may be there.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            self._popen.kill()

    def reap(self) -> None:
        self._popen.wait()
        deadline_s = time.monotonic() + REAP_TIMEOUT_S
        while any(_is_there(pid) for pid in self._killed) and time.monotonic() < deadline_s:
            time.sleep(0.005)


class _ForkedChild:
    def __init__(self, name: str, ranks: list[Any]) -> None:
        self.name = name
        self._ranks = ranks

    def poll(self) -> int | None:
        codes = [r.exitcode for r in self._ranks]
        failed = [int(c) for c in codes if c]
        if failed:
            # As torchrun does: an island that lost a rank is no learner any more. The others' errors follow from it.
            self.kill()
            return -signal.SIGKILL if -signal.SIGKILL in failed else failed[0]
        return None if None in codes else 0

    def pids(self) -> list[int]:
        return [r.pid for r in self._ranks]

    def terminate(self) -> None:
        for rank in self._ranks:
            rank.terminate()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def reap(self) -> None:
        for rank in self._ranks:
            rank.join()


def _descendants(pid: int) -> list[int]:
    """Processes below this one; none where the system does not tell (not Linux)."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _is_there(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _fork(target: Any, run: RunDir, name: str, env: dict[str, str], *more: object) -> Any:
    # Not daemonic: a daemonic process may not have children, and data loaders of user models may want some.
    rank = _forkserver().Process(target=target, args=(run.path, name, env, *more), name=name)
    rank.start()
    return rank


def _begin_forked(run: RunDir, name: str, env: dict[str, str]) -> None:
    process.die_with_parent(os.getppid())
    _let_the_forkserver_end()
    process.redirect_output(run.log(name))
    os.environ.update(env)


def _let_the_forkserver_end() -> None:
    """Give up our end of the pipe by which the forkserver knows that somebody still needs it.

    Otherwise its own children would keep it, and so themselves, alive when the launcher is killed.
    """
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _forked_rank(path: Path, name: str, env: dict[str, str]) -> None:
    _begin_forked(RunDir(path), name, env)
    from diloco_cli.run.learner_main import run_rank

    _exit(run_rank(path, name))


def _forked_syncer(path: Path, name: str, env: dict[str, str], listening: socket.socket, control: Connection) -> None:
    _begin_forked(RunDir(path), name, env)
    from diloco_cli.run.syncer_main import run_syncer

    _exit(run_syncer(path, listening, os.dup(control.fileno())))


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
