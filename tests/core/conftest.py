"""Hypothesis profiles of tests/core: `quick` by default; DILOCO_THOROUGH=1 looks at many more examples."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Each test names its number of examples through helpers.examples(); the profile only sets what they share.
settings.register_profile(
    "core",
    deadline=None,
    print_blob=True,
    derandomize=not os.environ.get("DILOCO_THOROUGH"),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("core")
