"""Images, the corruptions that shift them, and the streams in which a model meets them."""
