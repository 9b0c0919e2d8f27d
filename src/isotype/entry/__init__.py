"""Training from Python: `isotype.train(...)` and the `Run` that it returns."""
