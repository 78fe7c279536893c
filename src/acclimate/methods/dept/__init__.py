"""DePT-G: the method, its networks, and their training on the source data."""

from .method import DePT as DePT
