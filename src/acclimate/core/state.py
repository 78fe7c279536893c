"""The state file: tensors in safetensors, a JSON header in its metadata, a digest over both, written atomically.

Reading one runs no code. A file that is truncated, damaged, of a newer format or of something else is refused whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from ..errors import StateError

FORMAT = 1


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a state file so that `path` holds either what it held before or the whole new file, even after a crash."""
    path = Path(path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({**header, "format": FORMAT}, sort_keys=True)
    metadata = {"acclimate": text, "digest": digest(tensors, text)}
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise StateError(f"Cannot write {path}: {error.strerror}.") from error
    try:
        os.close(descriptor)
        save_file(tensors, temporary, metadata)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # a temporary file is private; a saved one is like any other
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise StateError(f"Cannot write {path}: {error}") from error
        raise
    _sync(path.parent)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a state file, after its digest has been checked."""
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if "acclimate" not in metadata:
                raise StateError(f"{path} is a safetensors file, but not a state file of acclimate.")
            header: dict[str, Any] = json.loads(metadata["acclimate"])
            if header["format"] > FORMAT:
                raise StateError(
                    f"{path} has format version {header['format']}, this acclimate reads up to {FORMAT}: upgrade acclimate."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist.") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is not a state file, or truncated: {error}") from error
    if metadata.get("digest") != digest(tensors, metadata["acclimate"]):
        raise StateError(f"{path} is damaged: its content does not match its digest.")
    return tensors, header


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 of tensors, which are on the CPU, with their names, and of what is said about them."""
    content = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        content.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        content.update(tensors[name].flatten().view(uint8).numpy().data)
    return content.hexdigest()


def _sync(path: str | os.PathLike[str]) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if os.name == "nt" and os.path.isdir(path):
        return  # Windows cannot open a folder, and needs no such flush
    descriptor = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
