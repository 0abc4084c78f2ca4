"""Ten lines of the SDK, against the pool that `cenote up` starts."""

import os

import numpy as np

from cenote.client import Client, chain_keys

address = os.environ.get("CENOTE_MASTER", "127.0.0.1:5110")
with Client(address, namespace="quickstart", fingerprint="demo;block=16") as client:
    # One prompt of three blocks of tokens: each key stands for all tokens up to its block's end.
    keys = chain_keys(np.arange(48).reshape(3, 16))
    blocks = np.random.default_rng(0).integers(0, 256, (3, 64 << 10), np.uint8)
    client.put_from_batch(keys, list(blocks), chain=True).raise_for_errors()

    # Another engine, with a prompt that begins the same: what is there need not be computed again.
    found = client.match([*keys, b"a block that nobody has computed yet"])
    buffers = np.empty((found.prefix_keys, 64 << 10), np.uint8)
    client.get_into_batch(keys[: found.prefix_keys], list(buffers), chain=True).raise_for_errors()
    print(f"{found.prefix_keys} of 4 blocks came from the pool, equal: {(buffers == blocks).all()}")
