"""Digests, which give content a short and stable name."""

from __future__ import annotations

import hashlib
import json
from typing import Any

LENGTH = 16  # hexadecimal digits; two different contents collide with a probability of 1 in 10^19


def digest_bytes(*contents: bytes | memoryview) -> str:
    """Return the first hexadecimal digits of the SHA-256 of all contents, one after another."""
    content = hashlib.sha256()
    for part in contents:
        content.update(part)
    return content.hexdigest()[:LENGTH]


def digest_json(value: Any) -> str:
    """Return the digest of a value that JSON can represent. The order of keys does not matter."""
    return digest_bytes(json.dumps(value, sort_keys=True).encode())
