"""Images, the corruptions that shift them, and the streams of batches that a model adapts to."""
