"""What the tracer tells what happened: each file watches for one way in which a program goes wrong in silence."""
