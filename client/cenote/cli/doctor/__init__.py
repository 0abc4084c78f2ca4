"""`cenote doctor`: is this host fit, and does it reach what it needs? Each check reads facts with a
deadline, and judges them in a function of its own that does no I/O."""
