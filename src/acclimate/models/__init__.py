"""A structural view of vision transformers of several libraries, and functions that load models by name."""
