"""The names of entries in Redis, and the command that reads many."""

from __future__ import annotations

import hashlib

import pytest
from hiredis import pack_command

from kvstore.catalog.redis.entry_names import GetEntries, entry_name, parse_entry_name
from kvstore.model.keys import NamespaceId, PrefixHash

NAMESPACE = NamespaceId(bytes(range(16)))


@pytest.mark.parametrize("num_names", [1, 2, 9, 10, 512])
def test_many_names_are_packed_as_redis_reads_them(num_names: int) -> None:
    prefixes = [PrefixHash(hashlib.sha256(b"%d" % number).digest()) for number in range(num_names)]
    command, names = GetEntries(NAMESPACE, prefixes), [entry_name(NAMESPACE, prefix) for prefix in prefixes]
    assert command.packed() == pack_command(("MGET", *names))
    assert [*command] == ["MGET", *names] and len(command) == 1 + num_names
    assert [parse_entry_name(name.encode()) for name in names] == [(NAMESPACE, prefix) for prefix in prefixes]
