"""The state file: tensors in the safetensors format, with a JSON header and a digest over both in the metadata.

Files are written atomically, and reading one runs no code. A file that is truncated, damaged, written in a newer format, or
not a state file is refused as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from ..errors import StateError
from .files import replacing

FORMAT = 1


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a state file atomically.

    Even after a crash, `path` holds either its previous content or the whole new file.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({**header, "format": FORMAT}, sort_keys=True)
    metadata = {"acclimate": text, "digest": digest(tensors, text)}
    with replacing(Path(path)) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise StateError(f"Cannot write {path}: {error}") from error


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a state file, after checking its digest."""
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
        content.update(tensors[name].flatten().view(uint8).numpy().data)
    return content.hexdigest()
