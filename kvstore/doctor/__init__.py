"""Finds what is wrong with a set-up, and how to fix it. See README.md."""

from kvstore.doctor.check import Finding, Verdict, run_checks, without
from kvstore.doctor.checks import checks_of
from kvstore.doctor.service import ServiceAddress

__all__ = ["Finding", "ServiceAddress", "Verdict", "checks_of", "run_checks", "without"]
