"""The server: an adapter with requests as its streams, the Open Inference Protocol, and a live page."""
