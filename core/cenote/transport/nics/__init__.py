"""Which NICs move the bytes: facts from /sys, and what is decided over them without any I/O."""
