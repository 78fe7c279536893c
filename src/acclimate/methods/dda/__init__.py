"""DDA: the method, and the diffusion model that it alone needs."""

from .method import DDA as DDA
