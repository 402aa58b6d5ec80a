"""Random views of images: crops, flips and colours, on the images' own device, by torch's generator.

Pixels may lie in [0, 1], [−1, 1] or be standardised: colours are changed relative to each image's own mean and spread.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def view(
    images: Tensor, *, smallest: float = 0.2, flip: float = 0.5, strength: float = 0.4, grey: float = 0.2
) -> Tensor:
    """One random view of every image (examples, channels, height, width).

    A part of its area, from `smallest` to all, of a ratio from 3:4 to 4:3 stretched to the whole, flipped with
    probability `flip`; brightness, contrast and, with three channels, saturation changed by up to `strength`, and all
    colour taken with probability `grey`.
    """
    return colours(crops(images, smallest, flip), strength, grey)


def crops(images: Tensor, smallest: float, flip: float) -> Tensor:
    def between(low: float, high: float) -> Tensor:
        return torch.empty(len(images), device=images.device).uniform_(low, high)

    side, ratio = between(smallest, 1.0).sqrt(), between(math.log(3 / 4), math.log(4 / 3)).mul(0.5).exp()
    width, height = (side * ratio).clamp(max=1.0), (side / ratio).clamp(max=1.0)
    sign = torch.where(between(0.0, 1.0) < flip, -1.0, 1.0)
    zero = torch.zeros_like(width)
    across = torch.stack([width * sign, zero, between(-1.0, 1.0) * (1 - width)], 1)
    down = torch.stack([zero, height, between(-1.0, 1.0) * (1 - height)], 1)
    grid = F.affine_grid(torch.stack([across, down], 1).to(images.dtype), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def colours(images: Tensor, strength: float, grey: float) -> Tensor:
    def factor() -> Tensor:
        return torch.empty(len(images), 1, 1, 1, device=images.device, dtype=images.dtype).uniform_(-strength, strength)

    mean, spread = images.mean((1, 2, 3), keepdim=True), images.std((1, 2, 3), keepdim=True)
    images = mean + (1 + factor()) * (images - mean) + factor() * spread
    if images.shape[1] == 3:
        plain = images.mean(1, keepdim=True)
        keep = torch.rand(len(images), 1, 1, 1, device=images.device) >= grey
        images = plain + torch.where(keep, 1 + factor(), torch.zeros_like(plain[:, :, :1, :1])) * (images - plain)
    return images
