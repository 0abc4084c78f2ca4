"""What to read from where, what to retry, when to give up: decisions without I/O."""
