"""Uses the result of a run: chats with it, draws samples, evaluates, merges and exports it."""
