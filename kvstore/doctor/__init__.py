"""What is wrong with a set-up, and what mends it: facts in, verdict out. See README.md."""

from kvstore.doctor.checks import checks_of
from kvstore.doctor.finding import Finding, Verdict, without
from kvstore.doctor.running import run_checks
from kvstore.doctor.service import EMBEDDED, ServiceAddress

__all__ = ["EMBEDDED", "Finding", "ServiceAddress", "Verdict", "checks_of", "run_checks", "without"]
