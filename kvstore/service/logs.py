"""The format of the service's log: text or JSON, with the request that a line belongs to, and never with a secret."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvstore.runtime.tracing import request_context
from kvstore.service.hidden_secrets import without_secrets

LogFormat = Literal["text", "json"]

_FILE_BYTES_MAX = 1 << 20

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9} | {10: "\\n", 13: "\\r"}
_LINES_AND_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_ESCAPED = _CONTROL | {code: f"\\u{code:04x}" for code in _LINES_AND_DIRECTIONS}
"""Escapes control characters, and the characters of Unicode that begin a line or change the direction of text. So a
peer's text can neither begin another line, nor move a terminal's cursor, nor show text in another order."""
_ESCAPED_IN_TRACEBACKS = {code: text for code, text in _ESCAPED.items() if code != 10}


class ServiceFormatter(logging.Formatter):
    """Renders a record as one line of text, followed by its traceback, or as one JSON object.

    Args:
        prefix: Prefix of a line of text, in `%` style.
    """

    def __init__(self, prefix: str = "%(asctime)s %(levelname)s %(name)s: ") -> None:
        super().__init__(f"{prefix}%(message)s")
        self._format: LogFormat = "text"
        self._secrets: Sequence[str] = ()

    def shape(self, log_format: LogFormat, secrets: Sequence[str]) -> None:
        """Set the format, and the secrets to hide."""
        self._format, self._secrets = log_format, secrets

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a line end."""
        if self._format == "json":
            return self._json(record)
        return without_secrets(super().format(record).translate(_ESCAPED_IN_TRACEBACKS), self._secrets)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """A line of text before its traceback."""
        known = "".join(f" {name}={value}" for name, value in request_context.get().fields().items())
        return (super().formatMessage(record) + known).translate(_ESCAPED)

    def _json(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **request_context.get().fields(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        # in the values only: a secret may be a part of the JSON syntax
        return json.dumps({name: without_secrets(value, self._secrets) for name, value in line.items()})


def log_to_stderr() -> None:
    """Log to stderr, from INFO on; `shape_logs` sets the format once the settings are read."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ServiceFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _hush_libraries()


def log_to_file(path: Path) -> None:
    """Log to `path` and one rotated file beside it, a megabyte each."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_FILE_BYTES_MAX, backupCount=1)
    handler.setFormatter(ServiceFormatter("%(asctime)s %(process)d %(levelname)s %(name)s: "))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    _hush_libraries()


def _hush_libraries() -> None:
    """Botocore tells where each client has its credentials from. A rebuild of the catalog opens one at each attempt."""
    for name in ("aiobotocore", "botocore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def shape_logs(log_format: LogFormat, secrets: Sequence[str]) -> None:
    """Apply the settings to the handlers with our formatter, and to no others."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, ServiceFormatter):
            handler.formatter.shape(log_format, secrets)
