"""The Lua scripts that change an entry together with the totals of its slot. Layouts: `entry.py` and below.

Each takes three keys, which share a slot: entry, totals, tombstones. Its first arguments are:

| 1 | namespace |
| 2 | size of an entry in bytes |
| 3 | level |
| 4, 5 | first and last byte of the level's row of bits |
| 6 | first byte of all rows of bits |
| 7 | now in seconds |
| 8 | tombstones to keep |

Totals of a slot are a hash by namespace. A value is seven numbers of 6 bytes: entries, then boundaries, records and
bytes of each level. A tombstone is: namespace, prefix, level u8, reason u8, group u16, slice u16 (65535: all), bytes
u48, time u32. The end of this file has the arguments and values as bytes.

During a recount the hash also has a field `<namespace>r`: the recount's mark of 2 bytes, which are not both zero, and
the totals of the entries that have this mark. A script that changes a marked entry changes both values, and a new entry
is marked at once. So the recount is exact while services change entries.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvstore.catalog.base import Addition, LeaveReason, LevelTotals, NamespaceTotals, Removal, Tombstone
from kvstore.catalog.entry import EntryShape, Level
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId, PrefixHash

_PAYLOAD_AT = 112
"""Offset of the payload's size in a record's header. A striped record's value is its header alone, so its size is
read from there."""

_TOMBSTONE = struct.Struct("<16s32sBBHHIHI")
"""Bytes are two fields, as in the totals."""

_ALL_SLICES = 0xFFFF

_TOTALS = struct.Struct("<" + "IH" * 7)
"""Each number is two fields: the low 4 bytes, the high 2."""


DAMAGED = "CATALOG damaged"
"""The start of the error with which every script refuses a damaged key, before it changes anything."""

_COMMON = f"""
local entry = redis.call('GET', KEYS[1])
if entry and (#entry ~= tonumber(ARGV[2]) or string.byte(entry, 1) ~= 1) then
  return redis.error_reply('{DAMAGED} entry: it has another shape')
end
local held, recount = unpack(redis.call('HMGET', KEYS[2], ARGV[1], ARGV[1] .. 'r'))
if held and #held ~= 42 then return redis.error_reply('{DAMAGED} totals: they have another shape') end
redis.call('LLEN', KEYS[3])
"""
_COMMON += """
local level = tonumber(ARGV[3])
local mark = recount and #recount == 44 and string.sub(recount, 1, 2)
local counted = mark and entry and string.sub(entry, 3, 4) == mark
local leaving = entry and math.floor(string.byte(entry, 2) / 2 ^ level) % 2 == 1
local function u32(at) return (struct.unpack('<I4', entry, at + 1)) end
local function number(at) return (struct.unpack('<I6', redis.call('GETRANGE', KEYS[1], at, at + 5))) end
local function set_number(at, value) redis.call('SETRANGE', KEYS[1], at, struct.pack('<I6', value)) end
local function in_level() return redis.call('BITCOUNT', KEYS[1], ARGV[4], ARGV[5]) end
local function sum(packed, entries, boundaries, records, bytes)
  local t = packed and {struct.unpack('<I6I6I6I6I6I6I6', packed)} or {0, 0, 0, 0, 0, 0, 0}
  local at = 2 + 3 * level
  t[1] = math.max(0, t[1] + entries)
  t[at] = math.max(0, t[at] + boundaries)
  t[at + 1] = math.max(0, t[at + 1] + records)
  t[at + 2] = math.max(0, t[at + 2] + bytes)
  return struct.pack('<I6I6I6I6I6I6I6', t[1], t[2], t[3], t[4], t[5], t[6], t[7])
end
local function set_recount(packed) redis.call('HSET', KEYS[2], ARGV[1] .. 'r', mark .. packed) end
local function change(entries, boundaries, records, bytes)
  if entries == 0 and boundaries == 0 and records == 0 and bytes == 0 then return end
  redis.call('HSET', KEYS[2], ARGV[1], sum(held, entries, boundaries, records, bytes))
  if counted then set_recount(sum(string.sub(recount, 3), entries, boundaries, records, bytes)) end
end
local function gone(prefix, reason, group, slice, bytes)
  local rest = struct.pack('<BBI2I2I6I4', level, reason, group, slice, bytes, ARGV[7])
  redis.call('LPUSH', KEYS[3], ARGV[1] .. prefix .. rest)
  redis.call('LTRIM', KEYS[3], 0, tonumber(ARGV[8]) - 1)
end
local function drop_if_empty()
  if redis.call('BITCOUNT', KEYS[1], ARGV[6], -1) > 0 then return 0 end
  redis.call('UNLINK', KEYS[1])
  return -1
end
local function fill(tokens, parent)
  if tokens ~= 0 and u32(4) == 0 then redis.call('SETRANGE', KEYS[1], 4, struct.pack('<I4', tokens)) end
  local none = string.rep('\\0', 32)
  if parent ~= none and string.sub(entry, 9, 40) == none then redis.call('SETRANGE', KEYS[1], 8, parent) end
end
local function used(now)
  if u32(44) < now then redis.call('SETRANGE', KEYS[1], 44, struct.pack('<I4', now)) end
end
"""


ALWAYS = "#!lua flags=allow-oom\n"
"""The first line of scripts that free memory, or take no more of it: they also run on a full server, which could
otherwise never drain."""

EPOCH = (
    ALWAYS
    + """
local epoch = redis.call('GET', KEYS[1])
if not epoch then
  epoch = ARGV[1]
  redis.call('SET', KEYS[1], epoch)
end
return epoch
"""
)
"""The epoch, which begins now if there is none. Also on a full server: retention, which frees memory, asks for it."""

MARK_COMPLETE = (
    ALWAYS
    + """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""
)
"""Mark the catalog complete if its epoch is still the given one."""


@dataclass(frozen=True)
class Script:
    """A script's own part; the common part precedes it."""

    body: str
    grows: bool = False
    """Whether it takes memory, so that a full server refuses it."""

    @cached_property
    def text(self) -> str:
        return ("" if self.grows else ALWAYS) + _COMMON + self.body

    @cached_property
    def sha(self) -> str:
        """The SHA-1 by which EVALSHA calls it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ADD = Script(
    """
-- 9: the entry to store if there is none; 10: bytes of its records; 11: per record: bit, offset of its sum, bytes
local items = ARGV[11]
if not entry then
  redis.call('SET', KEYS[1], ARGV[9])
  if mark then redis.call('SETRANGE', KEYS[1], 2, mark) end
  counted = mark
  change(1, 1, #items / 14, tonumber(ARGV[10]))
  return 1
end
if leaving then return 0 end
fill((struct.unpack('<I4', ARGV[9], 5)), string.sub(ARGV[9], 9, 40))
local before, records, bytes = in_level(), 0, 0
for at = 1, #items, 14 do
  local bit, sum_at, size = struct.unpack('<I4I4I6', items, at)
  if redis.call('SETBIT', KEYS[1], bit, 1) == 0 then
    set_number(sum_at, number(sum_at) + size)
    records, bytes = records + 1, bytes + size
  end
end
if records > 0 then used(tonumber(ARGV[7])) end
change(0, (before == 0 and records > 0) and 1 or 0, records, bytes)
return 1
""",
    grows=True,
)
"""Add records of one boundary at a level; returns 0 if the boundary is leaving it: nothing was changed."""

REMOVE = Script("""
-- 9: prefix; 10: per record: bit, offset of its sum, bytes + 1 (0: not known), first and last byte of its group's bits,
-- group, slice, reason
if not entry then return 0 end
local items, records, bytes = ARGV[10], 0, 0
for at = 1, #items, 28 do
  local bit, sum_at, known, first, last, group, slice, reason = struct.unpack('<I4I4I6I4I4I2I2I2', items, at)
  local held = redis.call('BITCOUNT', KEYS[1], first, last)
  if redis.call('SETBIT', KEYS[1], bit, 0) == 1 then
    local sum = number(sum_at)
    local size = known > 0 and math.min(known - 1, sum) or math.floor(sum / held)
    if held == 1 then size = sum end
    set_number(sum_at, sum - size)
    records, bytes = records + 1, bytes + size
    gone(ARGV[9], reason, group, slice, size)
  end
end
if records == 0 then return 0 end
local boundaries = in_level() == 0 and -1 or 0
if boundaries == -1 and leaving then
  redis.call('SETRANGE', KEYS[1], 1, string.char(string.byte(entry, 2) - 2 ^ level))
end
change(drop_if_empty(), boundaries, -records, -bytes)
return records
""")
"""Remove records of one boundary at a level; returns how many of them it held."""

START = Script("""
-- 9: do nothing if used after this time
if not entry or in_level() == 0 then return false end
if leaving then return entry end
if u32(52) > tonumber(ARGV[7]) then return false end
if u32(44) > tonumber(ARGV[9]) then return false end
redis.call('SETRANGE', KEYS[1], 1, string.char(string.byte(entry, 2) + 2 ^ level))
return redis.call('GET', KEYS[1])
""")
"""Hide a boundary's records at a level; returns the entry, or nothing."""

FINISH = Script("""
-- 9: prefix; 10: reason; 11: offset of the level's sums; 12: number of groups
if not entry or not leaving then return 0 end
local bytes, records, first = 0, in_level(), tonumber(ARGV[11])
for group = 0, tonumber(ARGV[12]) - 1 do bytes = bytes + number(first + 6 * group) end
redis.call('SETRANGE', KEYS[1], first, string.rep('\\0', 6 * tonumber(ARGV[12])))
redis.call('SETRANGE', KEYS[1], ARGV[4], string.rep('\\0', tonumber(ARGV[5]) - tonumber(ARGV[4]) + 1))
redis.call('SETRANGE', KEYS[1], 1, string.char(string.byte(entry, 2) - 2 ^ level))
gone(ARGV[9], tonumber(ARGV[10]), 65535, 65535, bytes)
change(drop_if_empty(), records > 0 and -1 or 0, -records, -bytes)
return bytes
""")
"""Remove a boundary's records at a level that it is leaving; returns their bytes."""

STOP = Script("""
if not entry or not leaving then return 0 end
redis.call('SETRANGE', KEYS[1], 1, string.char(string.byte(entry, 2) - 2 ^ level))
return 1
""")
"""Undo `START`."""

USE = Script("""
-- 9: hits; 10: tokens; 11: parent
if not entry then return 0 end
used(tonumber(ARGV[7]))
fill(tonumber(ARGV[10]), ARGV[11])
redis.call('SETRANGE', KEYS[1], 48, struct.pack('<I4', math.min(4294967295, u32(48) + tonumber(ARGV[9]))))
return 1
""")
"""Count reads of a boundary."""

PIN = Script("""
-- 9: until
if not entry or string.byte(entry, 2) ~= 0 then return 0 end
redis.call('SETRANGE', KEYS[1], 52, struct.pack('<I4', tonumber(ARGV[9])))
return 1
""")
"""Set the end of a boundary's pin, unless it is leaving a level."""

OBSERVE = Script(f"""
-- 9: prefix; 10: reason; 11: start of its records' names; 12: offset of the level's sums; then the number of slices of
-- each group
if not entry or leaving then return 0 end
local before, lost, records, bytes = in_level(), 0, 0, 0
local first, row = tonumber(ARGV[12]), tonumber(ARGV[4])
for group = 0, #ARGV - 13 do
  local slices, sum, old = tonumber(ARGV[13 + group]), 0, number(first + 6 * group)
  for slice = 0, slices - 1 do
    local name = ARGV[11] .. '.g' .. group .. '.s' .. slice
    local size = redis.pcall('STRLEN', name)
    if type(size) ~= 'number' then size = 0 end
    if size == {HEADER_BYTES} then
      local payload = redis.call('GETRANGE', name, {_PAYLOAD_AT}, {_PAYLOAD_AT} + 7)
      if #payload == 8 then size = size + struct.unpack('<I8', payload) end
    end
    local held = redis.call('SETBIT', KEYS[1], row * 8 + slice - slice % 8 + 7 - slice % 8, size > 0 and 1 or 0)
    sum = sum + size
    if size > 0 and held == 0 then records = records + 1 end
    if size == 0 and held == 1 then
      records, lost = records - 1, lost + 1
      gone(ARGV[9], tonumber(ARGV[10]), group, slice, 0)
    end
  end
  if sum ~= old then
    set_number(first + 6 * group, sum)
    bytes = bytes + sum - old
  end
  row = row + math.floor((slices + 7) / 8)
end
local after = in_level()
change(drop_if_empty(), (after > 0 and 1 or 0) - (before > 0 and 1 or 0), records, bytes)
return lost
""")
"""Correct a boundary's hot bits and bytes to the records of this server; returns how many records were lost."""

COUNT = Script("""
-- 9: the mark of the recount; 10: number of groups; 11: offset of the sums
if not entry or counted or mark ~= ARGV[9] then return 0 end
redis.call('SETRANGE', KEYS[1], 2, mark)
local packed, groups, sum_at = string.sub(recount, 3), tonumber(ARGV[10]), tonumber(ARGV[11])
local row, row_bytes = tonumber(ARGV[6]), tonumber(ARGV[5]) - tonumber(ARGV[4]) + 1
for one = 0, 1 do
  level = one
  local records, bytes = redis.call('BITCOUNT', KEYS[1], row, row + row_bytes - 1), 0
  for group = 1, groups do
    bytes, sum_at = bytes + number(sum_at), sum_at + 6
  end
  packed, row = sum(packed, one == 0 and 1 or 0, records > 0 and 1 or 0, records, bytes), row + row_bytes
end
set_recount(packed)
return 1
""")
"""Count an entry at all levels, once in a recount; returns 0 if nothing was counted, as in a later recount."""

BEGIN_RECOUNT = (
    ALWAYS
    + """
-- 1: the mark; then namespaces
for at = 2, #ARGV do redis.call('HSET', KEYS[1], ARGV[at] .. 'r', ARGV[1] .. string.rep('\\0', 42)) end
return #ARGV - 1
"""
)
"""Begin a recount in one slot."""

END_RECOUNT = (
    ALWAYS
    + """
-- 1: the mark; then namespaces
local corrected = 0
for at = 2, #ARGV do
  local held, recount = unpack(redis.call('HMGET', KEYS[1], ARGV[at], ARGV[at] .. 'r'))
  if recount and string.sub(recount, 1, 2) == ARGV[1] then
    local counted = string.sub(recount, 3)
    if counted ~= (held or string.rep('\\0', 42)) then
      redis.call('HSET', KEYS[1], ARGV[at], counted)
      corrected = corrected + 1
    end
    redis.call('HDEL', KEYS[1], ARGV[at] .. 'r')
  end
end
return corrected
"""
)
"""Take the counted totals of one slot as its totals, unless another recount has begun; returns how many differed."""

ALL = (ADD, REMOVE, START, FINISH, STOP, USE, PIN, OBSERVE, COUNT)


_ADD_ITEM = struct.Struct("<IIIH")
_REMOVE_ITEM = struct.Struct("<IIIHIIHHH")

Numbers = tuple[int, ...]


def hash_items(reply: Any) -> Iterator[tuple[bytes, bytes]]:
    """Fields and values of an HGETALL reply: a dict, or a flat list where the client did not convert it."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return ((bytes(name), bytes(value)) for name, value in pairs)


def parse_totals(reply: Any) -> dict[NamespaceId, Numbers]:
    """The totals of one slot, from its HGETALL reply. Damaged ones are skipped: the next change of their namespace
    removes them.
    """
    parsed = {}
    for namespace, packed in hash_items(reply):
        if len(packed) != _TOTALS.size or len(namespace) != NAMESPACE_BYTES:
            continue
        fields = _TOTALS.unpack(packed)
        parsed[NamespaceId(namespace)] = tuple(
            low | high << 32 for low, high in zip(fields[::2], fields[1::2], strict=True)
        )
    return parsed


def sum_totals(
    slots: Iterable[Mapping[NamespaceId, Numbers]], tenants: Mapping[NamespaceId, str]
) -> dict[NamespaceId, NamespaceTotals]:
    """Sums over all slots; includes registered namespaces that hold nothing."""
    sums: dict[NamespaceId, list[int]] = {namespace: [0] * (1 + 3 * len(Level)) for namespace in tenants}
    for slot in slots:
        for namespace, numbers in slot.items():
            row = sums.setdefault(namespace, [0] * len(numbers))
            for index, number in enumerate(numbers):
                row[index] += number
    return {
        namespace: NamespaceTotals(
            tenants.get(namespace, ""),
            row[0],
            tuple(LevelTotals(*row[1 + 3 * level : 4 + 3 * level]) for level in Level),
        )
        for namespace, row in sums.items()
    }


def parse_tombstone(packed: bytes) -> Tombstone | None:
    """Decode a tombstone as the scripts write it; `None`: it is damaged."""
    try:
        namespace, prefix, level, reason, group, slice_, low, high, at_s = _TOMBSTONE.unpack(packed)
        whole = group == _ALL_SLICES
        return Tombstone(
            NamespaceId(namespace),
            PrefixHash(prefix),
            Level(level),
            None if whole else group,
            None if whole else slice_,
            low | high << 32,
            LeaveReason(reason),
            at_s,
        )
    except (struct.error, ValueError):
        return None


def add_item(shape: EntryShape, one: Addition) -> bytes:
    """A record as an argument of the `ADD` script."""
    bit = _set_bit(*shape.bit_at(one.level, one.key.group, one.key.slice))
    return _ADD_ITEM.pack(bit, shape.sum_at(one.level, one.key.group), *_u48(one.num_bytes))


def _set_bit(byte_at: int, bit: int) -> int:
    """The offset that SETBIT uses for a bit: it counts from the highest bit of a byte."""
    return byte_at * 8 + 7 - bit


def _u48(number: int) -> tuple[int, int]:
    return number & 0xFFFFFFFF, number >> 32


def remove_item(shape: EntryShape, one: Removal) -> bytes:
    """A record as an argument of the `REMOVE` script."""
    group = one.key.group
    bit = _set_bit(*shape.bit_at(one.level, group, one.key.slice))
    row = shape.row_at(one.level)
    span = row + shape.group_at[group], row + shape.group_at[group + 1] - 1
    known = _u48(0 if one.num_bytes is None else one.num_bytes + 1)
    at = shape.sum_at(one.level, group)
    return _REMOVE_ITEM.pack(bit, at, *known, *span, group, one.key.slice, int(one.reason))
