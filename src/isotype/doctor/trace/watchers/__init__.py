"""Each file watches for one way in which a program goes wrong without an error; `tracer` lists them."""
