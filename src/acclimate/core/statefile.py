"""The state file: tensors in the safetensors format, with a JSON header and a digest over both in the metadata.

Files are written atomically, and reading one runs no code. A file that is truncated, damaged, written in a newer format, or
not a state file is refused as a whole. The digest shows that a file is whole, but not who wrote it: whoever uses the content
checks it first (`statecheck`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, uint8

from ..errors import StateError
from .files import ATTEMPTS, file_version, read_whole, replacing

FORMAT = 1
DEPTH = 50  # the deepest nesting of a header
PAUSE = 0.05  # seconds after which a file is looked at again, to see whether it is being overwritten
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # the names of types in the safetensors format


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a state file atomically.

    Even after a crash, `path` holds either its previous content or the whole new file.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each starts at a multiple of its size
    tensors = {name: tensors[name].detach().cpu().contiguous() for name in order}
    try:
        text = json.dumps({**header, "format": FORMAT}, sort_keys=True, default=_plain)
    except TypeError as error:
        raise StateError(f"Cannot write {path}: an option is not a number, a text, or a list of these ({error}).") from error
    start = _start(path, tensors, {"acclimate": text, "digest": digest(tensors, text)})
    with replacing(Path(path)) as file:  # written piece by piece, because a copy of all tensors may be large
        file.write(start)
        for tensor in tensors.values():
            file.write(_bytes(tensor))


def _plain(value: object) -> int | float:
    """Return a number of numpy's in the form that JSON can represent."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{value!r:.100}")


def _start(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return what precedes the tensors in a safetensors file: where each of them is, and the metadata."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise StateError(f"Cannot write {path}: {name} is of the type {tensor.dtype}, which a state file cannot hold.")
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a state file, after checking its digest.

    A file that is overwritten while it is read is read again.
    """
    for attempt in range(ATTEMPTS):
        content, version = read_whole(Path(path))
        try:
            return parse(path, content)
        except StateError:
            time.sleep(PAUSE)
            if attempt + 1 == ATTEMPTS or file_version(Path(path)) == version:
                raise
    raise AssertionError("the last attempt returns or raises")


def parse(path: str | os.PathLike[str], content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header in the content of a state file. `path` is used in error messages."""
    try:
        size = int.from_bytes(content[:8], "little")
        metadata = _json(content[8 : 8 + size].decode()).get("__metadata__", {})
        if "acclimate" not in metadata:
            raise StateError(f"{path} is a safetensors file, but not a state file of acclimate.")
        header = _json(metadata["acclimate"])
        version = header["format"]
        if type(version) is not int or version < 1:
            raise ValueError(f"its format version is {version!r}")
        if version > FORMAT:
            raise StateError(f"{path} has format version {version}, this acclimate reads up to {FORMAT}: upgrade acclimate.")
        tensors = dict(sorted(load(content).items()))  # checks that names, shapes and sizes agree with the content
        found = digest(tensors, metadata["acclimate"])
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, AssertionError) as error:
        raise StateError(f"{path} is not a state file, or truncated: {error}") from error
    if metadata.get("digest") != found:
        raise StateError(f"{path} is damaged: its content does not match its digest.")
    return tensors, header


def _json(text: str) -> dict[str, Any]:
    """Return a JSON object. One with a repeated name, or nested too deeply, is refused."""
    value = json.loads(text, object_pairs_hook=_distinct)
    if not isinstance(value, dict) or not _shallow(value, DEPTH):
        raise ValueError("its header is not a JSON object, or nested too deeply")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name in its header is repeated")
    return values


def _shallow(value: Any, depth: int) -> bool:
    """Return whether a JSON value is nested less deeply than this."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_shallow(part, depth - 1) for part in parts)


def read_kind(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a file of one kind, and raise a `StateError` for any other file."""
    tensors, header = read(path)
    if header.get("kind") != kind:
        raise StateError(f"{path} is no {kind} that acclimate trained, but a {header.get('kind', 'state file')}.")
    return tensors, header


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return the SHA-256 of a header and of named tensors, which must be on the CPU."""
    content = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        content.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        content.update(_bytes(tensors[name]))
    return content.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(uint8).numpy().data
