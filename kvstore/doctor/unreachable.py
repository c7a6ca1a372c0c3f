"""Why a service does not answer, from the text of the error, and what to do: for `doctor`, and for every verb."""

from __future__ import annotations

import re

from kvstore.settings import TOKEN_VARIABLE

CERTIFICATE_FIX = (
    "set tls_ca_file (KVSTORE_TLS_CA_FILE) to the authority of its certificate, and use a host name that the "
    "certificate contains; if the service requires a client certificate, set tls_certificate_file"
)


def step_of(text: str, url: str, *, has_token: bool = False) -> str:
    """The next step for an error of a connection attempt; empty: nothing listens there, as far as is known.

    Args:
        text: The error with its details.
        url: The address, whose words in the text mean nothing.
        has_token: A token was sent.
    """
    text = text.replace(url, "") if url else text
    if "WRONG_VERSION_NUMBER" in text:
        return "that port does not use TLS; write tcp:// instead of tls://"
    if "certificate" in text or "TLS" in text:
        return CERTIFICATE_FIX
    if "token" in text:
        which = "another" if has_token else "a"
        return (
            f"give {which} token of this service with --token-file, KVSTORE_TOKEN_FILE or {TOKEN_VARIABLE} (chmod 600)"
        )
    if "Permission denied" in text or "serves its own user" in text:
        path = url.removeprefix("unix:")
        return f"the service runs, but as another user: run this as that user, whom `stat -c %U {path}` names"
    if "must start with the magic" in text and not re.search("(seen=|got )b'KVW", text):
        return (
            "another program listens there, or the service's administration interface: name the address of the line "
            "`ready: set url to ...` in the service's log"
        )
    if "version" in text:
        return "use one release of kvstore on both sides: `kvstore --version` names that of this command"
    # the last of these: the queue of connections that wait to be accepted is full
    if "deadline" in text or "in time" in text or "temporarily unavailable" in text:
        return (
            "the service is frozen or very busy; check its process and its log, and do not start a second one beside "
            "it. If both are well, the address may be that of its administration interface, or of another program"
        )
    if "closed by the other side" in text or "connection lost" in text:
        tls = "; if the service listens at tls://, write that" if url.startswith("tcp:") else ""
        return (
            f"what listens there ended the connection: read its log{tls}; if it is no kvstore service, name another one"
        )
    return ""
