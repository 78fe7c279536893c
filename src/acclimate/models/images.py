"""What a tensor of images has to be before a model can use it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError


def ordinary(images: Tensor) -> Tensor:
    """Return images as an ordinary dense tensor of floats, or raise an `InputError` that says how to convert them."""
    kind = type(images)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise InputError(f"Images are a {kind.__name__}, a tensor with rules of its own: pass an ordinary torch.Tensor.")
    with torch._C.DisableTorchFunctionSubclass():
        if images.is_nested:
            raise InputError("Images are a nested tensor: resize or crop them to one size, and use torch.stack.")
        if images.layout is not torch.strided:
            raise InputError(f"Images have the layout {images.layout}: pass images.to_dense().")
        if images.is_meta:
            raise InputError("Images are on the meta device, where tensors have no values: create them on another device.")
        if images.is_quantized:
            raise InputError(f"Images have the quantised type {images.dtype}: pass images.dequantize().")
        if images.is_complex():
            raise InputError(f"Images have the complex type {images.dtype}: pass real numbers, such as images.abs().")
        if not images.is_floating_point():
            raise InputError(
                f"Images have the integer type {images.dtype}: convert them to float and normalise as the model expects."
            )
        if str(images.dtype).endswith("_x2"):  # two numbers in a byte
            raise InputError(f"Images have the packed type {images.dtype}: pass them in float32.")
        return images.as_subclass(Tensor)
