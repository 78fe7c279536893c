"""A chain of digests from the specification of a run through the records of its steps to its result.

The chain begins with the identifier of the run. Every record carries the digest of its own text and of the digest before it,
and so does the result. A record that was altered, removed, repeated or moved breaks the chain, and so does a result that was
edited, or that is not the one of these records.

The digests find accidents and careless edits. They do not stop a forger, who can compute them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ..core.digests import LENGTH, digest_bytes, digest_json
from ..errors import StateError

KEY = "chain"  # the last entry of a record and of a result


def seal_record(record: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Return a record as a line that ends with its digest, and the digest, given the digest before it."""
    text = json.dumps(record, allow_nan=False).encode().removesuffix(b"}")
    digest = digest_bytes(previous.encode(), text)
    return text + _end(digest), digest


def read_records(file: Path, run: str, count: int | None = None) -> tuple[list[bytes], str]:
    """Return the lines of a file of records, and the digest of the last one, after checking the digest of each.

    Args:
        file: The file.
        run: The identifier of the run.
        count: The number of lines to read. Default: all.
    """
    lines, digest, length = [], run, len(_end("0" * LENGTH))
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(islice(opened, count), 1):
                digest = digest_bytes(digest.encode(), line[:-length])
                if not line.endswith(_end(digest)):
                    raise StateError(f"Line {number} of {file} is not what the run wrote there, {lost(file.parent)}")
                lines.append(line)
    except OSError as error:
        raise StateError(f"{file} cannot be read ({error.strerror}), {lost(file.parent)}") from None
    return lines, digest


def seal_result(content: Mapping[str, Any], previous: str) -> dict[str, Any]:
    """Return the content of a result with its digest, given the digest of the last record."""
    return {**content, KEY: digest_json([previous, content])}


def lost(folder: Path) -> str:
    """Return the end of an error message: what is lost, and what to do."""
    return f"so this run is lost with all its steps: remove {folder}, and `acclimate bench` makes it again."


def _end(digest: str) -> bytes:
    """Return the end of a line with this digest."""
    return f', "{KEY}": "{digest}"}}\n'.encode()
