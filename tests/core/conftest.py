"""Hypothesis profiles: short by default, long for ``make soak`` (``HYPOTHESIS_PROFILE=soak``)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("quick", max_examples=100, stateful_step_count=40, derandomize=True, **_COMMON)
settings.register_profile("soak", max_examples=3000, stateful_step_count=60, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
