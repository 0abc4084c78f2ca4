"""Playing a trace of requests through a pool, and checking every byte that comes back."""
