"""Train a source model, resumable."""
