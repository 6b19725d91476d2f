"""Independent random streams from one seed."""

import hashlib


def derive(seed: int, *key: int | str) -> int:
    """A 63-bit seed that depends on `seed` and every part of `key`, equal on all machines."""
    text = "/".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def uniform(seed: int, *key: int | str) -> float:
    """A number in [0, 1) that depends on `seed` and every part of `key`."""
    return (derive(seed, *key) >> 10) / 2**53
