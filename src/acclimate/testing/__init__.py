"""The conformance suite and the replay of recordings, which also serve methods outside of this package."""
