"""Why a request found less than its prompt."""
