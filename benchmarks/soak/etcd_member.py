"""Becomes one member of an etcd cluster: `etcd_member PROGRAM FLAG ...`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.execv(sys.argv[1], sys.argv[1:])
