"""Fixtures of real servers, and hypothesis settings: no time limit per example, since the machines are shared."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["kvstore.testing.fixtures"]

settings.register_profile("kvstore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("kvstore")
