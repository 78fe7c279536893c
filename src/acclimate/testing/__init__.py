"""The conformance suite and the replay of recordings, also for methods of others."""
