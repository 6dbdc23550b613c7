"""The simulator is held against the protocol's own test world and against real runs."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("core", "e2e"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
