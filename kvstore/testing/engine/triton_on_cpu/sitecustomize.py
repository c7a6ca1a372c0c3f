"""Python imports this by itself when the folder is on PYTHONPATH: Triton finds a driver, and interprets its kernels.

vLLM's V2 model runner, the default on GPUs, has small Triton kernels and asks Triton for a driver; on a CPU there is
none.
"""

import os


def _offer_a_driver() -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton import backends

    class InterpreterDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    class InterpreterBackend:
        driver = InterpreterDriver
        compiler = None

    backends.backends["cpu"] = InterpreterBackend


if os.environ.get("TRITON_ON_CPU"):
    _offer_a_driver()
