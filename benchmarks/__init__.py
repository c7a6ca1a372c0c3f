"""Figures of this machine, each beside a ceiling measured in the same run. See README.md."""
