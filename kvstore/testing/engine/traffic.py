"""Many requests at once in an in-process engine: a fixed number in flight, aborts at chosen moments, a census of leaks.

The engine is stepped here, so that a moment is a step and a request's state can be read between steps.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any

_IDLE_STEPS_MAX = 20_000
_LOGPROBS = 5
"""How many of the most likely tokens are reported at each position."""


def run_traffic(
    llm: Any, requests: list[dict[str, Any]], *, in_flight: int, resets: list[int], stop_after_aborts: bool = False
) -> dict[str, Any]:
    """Run requests in order, at most `in_flight` at once, and then step the idle engine until nothing is left to do.

    Args:
        llm: vLLM's, with the engine core in this process.
        requests: As JSON of `TrafficRequest`.
        in_flight: Requests that are handed over and not answered.
        resets: Before these steps the engine is asked to drop its own cache and to take the blocks of running requests.
            vLLM does the second, and refuses the first while a block is loaded to or saved from.
        stop_after_aborts: Return at once when the last request was handed over and the last abort is done; what still
            runs is left in the engine.

    Returns:
        Answers (`None`: aborted), for each abort the state that it met, and figures.
    """
    from vllm import SamplingParams

    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    waiting = deque(range(len(requests)))
    running: dict[str, _Running] = {}
    answers: list[dict[str, Any] | None] = [None] * len(requests)
    aborted: dict[int, str] = {}
    counts: Counter[str] = Counter()
    wanted_resets = set(resets)
    preemptions_before = num_preemptions(llm)
    while waiting or running:
        while waiting and len(running) < in_flight:
            index = waiting.popleft()
            asked = requests[index]
            told = asked["kv_transfer_params"]
            params = SamplingParams(
                temperature=0.0,
                max_tokens=asked["max_tokens"],
                logprobs=_LOGPROBS,
                detokenize=False,
                ignore_eos=True,
                extra_args=None if told is None else {"kv_transfer_params": told},
            )
            name = f"{index}"
            prompt = {"prompt_token_ids": asked["prompt"]}
            if asked["cache_salt"] is not None:
                prompt["cache_salt"] = asked["cache_salt"]
            own = engine.add_request(name, prompt, params)
            running[name] = _Running(index, own, asked["abort_state"], asked["abort_after_steps"])
        if stop_after_aborts and not waiting and all(request.abort_state is None for request in running.values()):
            break
        if counts["steps"] in wanted_resets:
            counts["resets_done" if _reset(llm) else "resets_refused"] += 1
        for output in engine.step():
            request = running.get(output.request_id)
            if request is None or not output.finished:
                continue
            del running[output.request_id]
            answers[request.index] = answer_of(output)
        counts["steps"] += 1
        for name, request in list(running.items()):
            state = state_of(core, request.own_name)
            if request.is_due(state):
                engine.abort_request([name])
                aborted[request.index] = state
                del running[name]
    if not stop_after_aborts:
        counts["idle_steps"] = _drain(engine, core)
    return {
        "answers": answers,
        "aborted": aborted,
        "preemptions": num_preemptions(llm) - preemptions_before,
        **counts,
    }


def answer_of(output: Any, *, ttft_s: float = 0.0, total_s: float = 0.0) -> dict[str, Any]:
    """What vLLM made of a request that has ended, as JSON of `Answer`."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            {token: logprob.logprob for token, logprob in position.items()} for position in completion.logprobs or ()
        ],
        "num_cached_tokens": output.num_cached_tokens or 0,
        "ttft_s": ttft_s,
        "total_s": total_s,
    }


def _reset(llm: Any) -> bool:
    try:
        return bool(llm.reset_prefix_cache(reset_running_requests=True))
    except RuntimeError:  # how vLLM says that blocks are still held when nothing runs any more
        return False


class _Running:
    """One request in the engine, and when to abort it: once it was seen so often in a state, or in any."""

    def __init__(self, index: int, own_name: str, abort_state: str | None, after_steps: int) -> None:
        self.index = index
        self.own_name = own_name
        self.abort_state = abort_state
        self._steps_left = after_steps

    def is_due(self, state: str) -> bool:
        if self.abort_state is None or self.abort_state not in (state, "any"):
            return False
        self._steps_left -= 1
        return self._steps_left < 0


def state_of(core: Any, own_name: str) -> str:
    """Where a request stands: `queued`, `asking` (lookup or staging), `loading`, `prefilling`, `decoding`, `gone`."""
    request = core.scheduler.requests.get(own_name)
    if request is None:
        return "gone"
    status = request.status.name
    if status == "WAITING_FOR_REMOTE_KVS":
        return "loading"
    if status == "RUNNING":
        return "decoding" if request.num_computed_tokens >= request.num_prompt_tokens else "prefilling"
    side = getattr(core.scheduler.connector, "scheduler_side", None)
    state = side.requests.get(own_name) if side is not None else None
    if state is None or not state.is_polled:
        return "queued"
    return "staging" if state.fetch is not None else "asking"


def _drain(engine: Any, core: Any) -> int:
    """Step as the core's own loop would, until it would sleep; returns how many steps that took."""
    for steps in range(_IDLE_STEPS_MAX):
        if not core.scheduler.has_requests():
            return steps
        engine.step()
    raise RuntimeError("the idle engine never comes to rest")


def num_preemptions(llm: Any) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def take_census(llm: Any) -> dict[str, Any]:
    """What an engine could leak: blocks, requests, what the connector remembers, threads and descriptors."""
    gc.collect()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    census: dict[str, Any] = {
        "blocks": pool.num_gpu_blocks - 1,  # without the null block
        "free_blocks": pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(_targets()),
    }
    side = getattr(scheduler.connector, "scheduler_side", None)
    if side is not None:
        census["remembered_requests"] = len(side.requests)
        census["saves_in_flight"] = len(side.save_jobs)
    return census


def _targets() -> list[str]:
    """What open descriptors point at, without numbers that differ from one socket to the next."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(link.readlink()).split(":[")[0])
        except OSError:
            continue  # the one that lists the folder
    return targets
