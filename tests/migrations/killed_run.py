"""`python -m tests.migrations.killed_run`: runs of a migration of the environment's settings that kill themselves.

Each line of its input, `VERB COUNT WORD`, is one run in a process of its own, forked from this one, which has imported
all. The run ends by SIGKILL at the COUNTth of its steps of that word (of any, where none is given), or not at all. A
line of JSON has its result.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import traceback
from collections import Counter

import kvstore.catalog.redis.catalog
import kvstore.catalog.redis.coordination
import kvstore.tiers.redis
import kvstore.tiers.s3  # noqa: F401 - imports of a run that happen late are here before it is forked
from kvstore.cli.migrate import open_runner
from kvstore.settings import load_settings
from migrations.copying import Progress

LEASE_S = 0.5


async def run(verb: str, count: int, last: str) -> dict[str, object]:
    steps: Counter[str] = Counter()

    def on_step(word: str) -> None:
        steps[word] += 1
        if (steps[last] if last else steps.total()) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    async with open_runner(load_settings(), progress=Progress(on_step=on_step), lease_s=LEASE_S) as runner:
        state = await (runner.copy() if verb == "copy" else runner.finish())
    return {"steps": dict(steps), "totals": state.totals, "phase": state.phase.value}


def child(verb: str, count: int, last: str, answer: int) -> int:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: killed when its parent ends
    try:
        os.write(answer, json.dumps(asyncio.run(run(verb, count, last))).encode())
    except Exception:  # noqa: BLE001 - a run's top: its error is printed, not lost with the process
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    for line in sys.stdin:
        verb, count, *words = line.split()
        answer, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os._exit(child(verb, int(count), " ".join(words), writing))
        os.close(writing)
        with os.fdopen(answer, "rb") as reader:
            text = reader.read()
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"code": code, "answer": json.loads(text) if text else None}), flush=True)


if __name__ == "__main__":
    main()
