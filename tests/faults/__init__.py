"""What happens to runs, done to them on purpose: kills, full disks, damage, NaN, hostile input.
`python -m tests.faults`.
"""
