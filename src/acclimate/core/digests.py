"""Digests: one way to make a short, stable name of some content."""

from __future__ import annotations

import hashlib
import json
from typing import Any

LENGTH = 16  # hexadecimal digits, of which two different contents share all with a chance of 1 in 10^19


def digest_bytes(*contents: bytes | memoryview) -> str:
    """Return the first digits of the SHA-256 of some bytes, one after another."""
    content = hashlib.sha256()
    for part in contents:
        content.update(part)
    return content.hexdigest()[:LENGTH]


def digest_json(value: Any) -> str:
    """Return the digest of a value that JSON can hold, whatever the order of its keys."""
    return digest_bytes(json.dumps(value, sort_keys=True).encode())
