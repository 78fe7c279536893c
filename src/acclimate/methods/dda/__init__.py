"""DDA: the method, and the diffusion model that only this method needs."""

from .method import DDA as DDA
