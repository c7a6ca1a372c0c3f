"""Where our lines, and those of the store's client, go in an engine of vLLM."""

from __future__ import annotations

import logging

LOG = logging.getLogger("vllm.kvstore")
"""Below vLLM's logger, so that its handlers and levels apply."""


def join_vllm_logs() -> None:
    """Log the client's lines by vLLM's handlers and level, like ours. Without handlers Python writes bare warnings,
    which have no time and no process, and drops the line that an outage is over.

    Where the process has handlers of its own for them, they are used.
    """
    client = logging.getLogger("kvstore")
    if not client.handlers and not logging.root.handlers:
        client.parent = LOG
        client.setLevel(logging.NOTSET)  # this also has Python compute the levels of the loggers below it again
