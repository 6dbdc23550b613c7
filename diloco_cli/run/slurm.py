"""Islands as Slurm jobs, through submitit.

Called by: run.children.
"""

from __future__ import annotations

from diloco_cli.config.schema import Config
from diloco_cli.errors import EnvironmentNotReady
from diloco_cli.run.children import Child
from diloco_cli.run.rundir import RunDir


def start(run: RunDir, cfg: Config, name: str, env: dict[str, str]) -> Child:
    """Start an island's ranks.

    Args:
        env: what the ranks have in their environment besides what their machine gives.
    """
    raise EnvironmentNotReady(f"{name}: islands of this kind are not started yet", where="launcher")
