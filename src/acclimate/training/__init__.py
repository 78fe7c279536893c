"""Training of a source model, which can be interrupted and resumed."""
