"""What clients say of a prompt for the time after it, and what is done about it."""
