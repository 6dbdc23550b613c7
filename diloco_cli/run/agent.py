"""One island's torchrun agent: torch.distributed.run, made to die with the launcher.

    python -m diloco_cli.run.agent RUN ISLAND NPROC

Owns nothing but the command line for torchrun. Called by: run.children.
"""

from __future__ import annotations

import os
import signal
import sys

from diloco_cli.run import process


def torchrun_arguments(run: str, island: str, nproc_per_node: int) -> list[str]:
    """What `torchrun` would be typed with for an island on this machine.

    Port 0 and c10d: any free port, so islands of one machine never meet; no restarts, since an island that lost a
    rank starts again as a whole.
    """
    return [
        "--nnodes=1",
        f"--nproc-per-node={nproc_per_node}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={island}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "-m",
        "diloco_cli.run.learner_main",
        run,
        island,
    ]


def main() -> None:
    """Become the agent."""
    run, island, nproc_per_node = sys.argv[1:]
    process.die_with_parent()
    os.environ[process.PARENT] = str(os.getpid())
    process.ignore_terminal_signals()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(torchrun_arguments(run, island, int(nproc_per_node)))
    except ChildFailedError as error:
        sys.exit(exit_code([failure.exitcode for failure in error.failures.values()]))


def exit_code(codes: list[int]) -> int:
    """The island's, from those of the ranks that failed, the first one first; 128 + the number for a signal.

    A rank that was killed is the cause of what the others say of it.
    """
    code = -signal.SIGKILL if -signal.SIGKILL in codes else codes[0]
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
