"""What is checked between a run's preparation and its first step: static facts, data, memory, and a rehearsed step. Imports no torch."""
