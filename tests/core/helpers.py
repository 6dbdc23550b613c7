"""What several files of tests/core share."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("DILOCO_THOROUGH"))


def examples(quick: int) -> int:
    """How many examples a property is tried on: `quick`, or 40 times as many in the thorough mode."""
    return quick * 40 if THOROUGH else quick
