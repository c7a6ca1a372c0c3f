"""Why a request was resumed no further than it was."""
