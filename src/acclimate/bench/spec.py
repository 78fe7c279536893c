"""What a run is: everything that decides its result, and nothing else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..data.datasets import title
from ..data.streams import Stream
from ..method import create
from ..vit import fingerprint, view


@dataclass(frozen=True)
class Spec:
    """One model, one stream, one method with its configuration."""

    model: dict[str, str]  # name, digests of its architecture and weights, device
    domains: list[str]
    data: list[dict[str, Any]]  # for each domain what its pictures are: digest, corruption, normalisation
    setting: str
    batch_size: int
    seed: int  # of the stream's order and of the method
    order: str  # digest of the stream's order
    method: str
    config: dict[str, Any]
    protocol: dict[str, str]  # what holds for every run of the bench
    versions: dict[str, str]

    @cached_property
    def id(self) -> str:
        """A name that two runs share if and only if they are the same run."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> str:
        """Where the run is kept, readable at a glance."""
        where = self.domains[0].replace("/", "-") if len(self.domains) == 1 else f"{len(self.domains)}-domains"
        return f"{self.method}-{where}-{self.setting}-{self.seed}-{self.id}"


PROTOCOL = {"predict": "before the update", "guard": "default", "precision": "float32", "reset": "source model for each run"}
LIBRARIES = ("torch", "timm", "numpy", "scipy", "pillow")


def specify(stream: Stream, method: str, options: dict[str, Any], *, model: dict[str, str]) -> Spec:
    """The run of a method on a stream; `model` comes from `describe`."""
    config = create(method, options).config
    return Spec(
        model=model,
        domains=[title(domain) for domain in stream.domains],
        data=[dict(domain.identity) for domain in stream.domains],
        setting=stream.setting,
        batch_size=stream.batch_size,
        seed=stream.seed,
        order=stream.digest,
        method=method,
        config=json.loads(json.dumps(config)),  # as it will come back from the file
        protocol=PROTOCOL,
        versions={"acclimate": __version__, **{library: version(library) for library in LIBRARIES}},
    )


def describe(model: nn.Module, name: str) -> dict[str, str]:
    """A model's name, digests and device."""
    vit = view(model)
    where = torch.cuda.get_device_name(vit.device) if vit.device.type == "cuda" else vit.device.type
    return {"name": name, "device": where, **fingerprint(vit, model.state_dict())}
