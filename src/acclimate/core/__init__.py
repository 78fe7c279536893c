"""The parts that every method runs on: adapter, engine, guard, state, and the contract of a method."""
