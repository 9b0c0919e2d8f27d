"""How compilations fail: each file recognises one kind, from Triton's message and the node at which it stopped."""
