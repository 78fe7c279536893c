"""A window of the last images of a stream of single images, for methods that compare the samples of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.statecheck import COUNT
from ..models.view import ViT, require_supported


class Window(nn.Module):
    """A ring buffer of the last `size` images and their logits.

    Whenever the last entry of the buffer is filled, the window is a batch to learn from.
    """

    def __init__(self, size: int, vit: ViT) -> None:
        super().__init__()
        require_supported(vit.model, vit.image_size is not None, "a window remembers images, which have to be of one size")
        self.images: Tensor
        self.logits: Tensor
        self.seen: Tensor
        zeros = torch.zeros(size, vit.channels, *(vit.image_size or ()), dtype=vit.dtype, device=vit.device)
        self.register_buffer("images", zeros)
        self.register_buffer("logits", torch.zeros(size, vit.classes, dtype=vit.precise, device=vit.device))
        self.register_buffer("seen", torch.tensor(0))
        self.ranges = {"seen": COUNT}

    def with_next(self, image: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return the images and logits with one more image, and whether this image completes a batch.

        The window itself does not change.
        """
        place, size = int(self.seen) % len(self.images), min(int(self.seen) + 1, len(self.images))
        images, all_logits = self.images[:size].clone(), self.logits[:size, : logits.shape[-1]].clone()
        images[place], all_logits[place] = image, logits.to(all_logits)
        return images, all_logits, place == len(self.images) - 1

    def add(self, image: Tensor, logits: Tensor) -> None:
        """Store an image and its logits."""
        place = int(self.seen) % len(self.images)
        self.images[place] = image
        self.logits[place, : logits.shape[-1]] = logits.to(self.logits)
        self.seen += 1
