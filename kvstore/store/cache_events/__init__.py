"""Cache events of the service: which of the pages that engines named are on which medium."""
