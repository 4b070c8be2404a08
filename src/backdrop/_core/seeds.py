"""Generators of random numbers that are a function of a key."""

from __future__ import annotations

import hashlib

import torch


def generator_for(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator whose whole state is a hash of the key, so that no two keys share their numbers.

    The seed of a CPU generator has 32 bits only: among a hundred thousand hashed seeds two would be equal.
    """
    words = 624
    digest = hashlib.shake_128(repr(key).encode()).digest(4 * words)
    generator = torch.Generator(device)
    if device.type != "cpu":
        return generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    state = generator.manual_seed(0).get_state()
    mersenne = state[24 : 24 + 8 * words].view(torch.int64)  # the layout of torch's CPU generator
    if mersenne[:3].tolist() != [0, 1, 1812433255]:  # what seed 0 gives
        raise RuntimeError(f"torch {torch.__version__} keeps the state of its CPU generator in a way not known here")
    mersenne.copy_(torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF)
    return generator.set_state(state)
