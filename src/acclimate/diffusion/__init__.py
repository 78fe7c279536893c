"""Diffusion models: the process, networks that predict the noise, and sampling towards a given picture."""
