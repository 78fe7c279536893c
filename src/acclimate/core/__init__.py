"""What every method runs on: the adapter, the engine, the guard, the state, and the contract of a method."""
