"""The one random number behind a sampled token.

It depends on the seed of the request and the place of the token in its answer, and on
nothing else: neither on the batch nor on the backend, nor on how often the request was
preempted. A counter-based generator, as in Salmon et al. 2011, with a hash from the
standard library.

In vLLM: vllm/v1/worker/gpu/sample/gumbel.py (murmur3_uniform64).
Source: appendix A5, "Records"; appendix A14, "One prompt, many answers".
"""

import struct
from hashlib import blake2b


def uniform(seed: int, position: int) -> float:
    """Return a number from 0 up to 1, exclusive, in steps of 2**-53.

    Args:
        seed: Of the request, from 0 to 2**64 - 1.
        position: Output tokens before this one.
    """
    digest = blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def seed_of(seed: int, index: int) -> int:
    """Return the seed of one of several continuations of a prompt.

    Args:
        seed: Of the request; the first continuation (index 0) takes it as it is.
        index: Number of the continuation.
    """
    if index == 0:
        return seed
    digest = blake2b(struct.pack("<QQ", seed, index), digest_size=8, person=b"seed")
    return int.from_bytes(digest.digest(), "little")
