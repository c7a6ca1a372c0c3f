"""Hypothesis settings for all tests: no time limit per example, since the machines are shared."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kvstore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("kvstore")
