"""A window of the last images of a stream of single images, for methods that compare the samples of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.statecheck import COUNT
from ..errors import InputError
from ..models.view import ModelView, require_supported


class Window(nn.Module):
    """A ring buffer of the last `size` images and their logits.

    Whenever the last entry of the buffer is filled, the window is a batch to learn from.
    """

    def __init__(self, size: int, view: ModelView) -> None:
        super().__init__()
        self.images: Tensor
        self.logits: Tensor
        self.seen: Tensor
        self.register_buffer("images", memory_of(size, view))
        self.register_buffer("logits", torch.zeros(size, view.classes, dtype=view.precise, device=view.device))
        self.register_buffer("seen", torch.tensor(0))
        self.ranges = {"seen": COUNT}

    def with_next(self, image: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return the images and logits with one more image, and whether this image completes a batch.

        The window itself does not change.
        """
        require_size_of(self.images, image)
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


def memory_of(count: int, view: ModelView) -> Tensor:
    """Return a memory of images, which are all black."""
    size = view.usual_size
    require_supported(view.model, size is not None, "this method remembers images, which have to be of one size")
    return torch.zeros(count, view.channels, *(size or ()), dtype=view.dtype, device=view.device)


def require_size_of(memory: Tensor, images: Tensor) -> None:
    """Refuse images of another size than those that a memory holds."""
    if images.shape[-3:] != memory.shape[1:]:
        channels, height, width = memory.shape[1:]
        raise InputError(
            f"This method remembers images, which have to be of one size, here {height} x {width}; got "
            f"{tuple(images.shape)}. Resize them, or say before adapt() which size the model gets: model.pretrained_cfg = "
            f"{{'input_size': ({channels}, height, width)}}."
        )
