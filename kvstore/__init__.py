"""kvstore: a store for the KV-cache pages of inference engines.

The public surface is `kvstore.api`, `.model`, `.format`, `.codec`, `.errors` and `.client`.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
