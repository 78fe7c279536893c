"""Zero-shot classifiers: the image tower of CLIP or SigLIP with a head that is made of text embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, ModelError
from .normalisation import processor_normalisation
from .trace import title

TEMPLATES = ("a photo of a {}.",)


class ZeroShot(nn.Module):
    """An image tower and a linear head, whose rows are the text embeddings of the classes.

    Args:
        tower: A module from images to their embeddings.
        weight: The embeddings of the classes, of length 1, times the scale of the logits.
        bias: A number that is added to all logits.
        class_names: The names of the classes.
    """

    def __init__(self, tower: nn.Module, weight: Tensor, bias: Tensor | None, class_names: Sequence[str]) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device=weight.device, dtype=weight.dtype)
        self.class_names = tuple(class_names)
        with torch.no_grad():
            self.head.weight.copy_(weight)
            if bias is not None:
                self.head.bias.fill_(float(bias))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch, (batch, classes)."""
        return self.head(F.normalize(self.tower(images), dim=-1))


class HuggingFaceTower(nn.Module):
    """The image tower of a CLIP or SigLIP of transformers, with its projection to the common space."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision_model = model.vision_model
        self.projection = getattr(model, "visual_projection", nn.Identity())

    def forward(self, images: Tensor) -> Tensor:
        """Return the embeddings of a batch."""
        return self.projection(self.vision_model(pixel_values=images).pooler_output)


def zero_shot(
    model: nn.Module,
    class_names: Sequence[str],
    *,
    tokenizer: Callable[..., Any],
    templates: Sequence[str] = TEMPLATES,
) -> ZeroShot:
    """Return an image classifier whose classes are described by words, to which every method can be applied.

    The image tower is that of the given model, and is not copied. The head is linear: a row is the mean of the text
    embeddings of a class over the templates, with the length of the scale of the logits.

    Args:
        model: A CLIP or SigLIP of transformers, or of open_clip.
        class_names: The names of the classes, at least two.
        tokenizer: The processor or the tokenizer of the model (transformers), or its tokenizer (open_clip). A processor also
            says how images are normalised.
        templates: Sentences in which {} stands for the name of a class.

    Example:
        >>> clip = transformers.CLIPModel.from_pretrained(name)
        >>> processor = transformers.CLIPProcessor.from_pretrained(name)
        >>> model = acclimate.adapt(acclimate.zero_shot(clip, ["cat", "dog"], tokenizer=processor), "keel")
    """
    if len(class_names) < 2 or isinstance(class_names, str):
        raise ConfigError(f"class_names={class_names!r}: give the names of at least two classes.")
    if not templates or isinstance(templates, str) or not all("{}" in template for template in templates):
        raise ConfigError(f"templates={templates!r}: give sentences in which {{}} stands for the name of a class.")
    anyhow: Any = model
    if hasattr(anyhow, "vision_model") and hasattr(anyhow, "get_text_features"):
        tower: nn.Module = HuggingFaceTower(anyhow)
    elif hasattr(anyhow, "visual") and hasattr(anyhow, "encode_text"):
        tower = anyhow.visual
    else:
        raise ModelError(f"{title(model)} is no CLIP or SigLIP of transformers or open_clip: it has no towers for both.")
    with torch.no_grad():
        rows = [_embedding(anyhow, [template.format(name) for template in templates], tokenizer) for name in class_names]
        weight = torch.stack(rows) * anyhow.logit_scale.exp()
    made = ZeroShot(tower, weight, getattr(model, "logit_bias", None), class_names).eval()
    processor = getattr(tokenizer, "image_processor", tower)  # that of open_clip has image_mean and image_std
    try:
        mean, std = processor_normalisation(processor)
        made.pretrained_cfg = {"mean": tuple(mean), "std": tuple(std)}  # type: ignore[assignment]
    except ConfigError:
        pass  # adapt(mean=, std=) can still say it
    return made


def _embedding(model: Any, texts: list[str], tokenizer: Callable[..., Any]) -> Tensor:
    """Return the mean embedding of some texts, with a length of 1."""
    training = model.training
    device = model.logit_scale.device
    try:
        model.eval()
        if hasattr(model, "get_text_features"):
            tokens = tokenizer(text=texts, padding="max_length", truncation=True, return_tensors="pt").to(device)
            out = model.get_text_features(**tokens)
            embeddings = getattr(out, "pooler_output", out)
        else:
            embeddings = model.encode_text(tokenizer(texts).to(device))
    finally:
        model.train(training)
    return F.normalize(F.normalize(embeddings, dim=-1).mean(0), dim=-1)
