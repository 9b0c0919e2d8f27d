"""The way in from Python: `isotype.train(...)` and the `Run` it returns."""
