"""One structural view of many models, and models by name."""
