"""Finds what is wrong with a set-up, and how to fix it. See README.md."""

from kvstore.doctor.checks import ToldStore, checks_of
from kvstore.doctor.finding import Finding, Verdict, without
from kvstore.doctor.running import run_checks
from kvstore.doctor.service import ServiceAddress

__all__ = ["Finding", "ServiceAddress", "ToldStore", "Verdict", "checks_of", "run_checks", "without"]
