"""Kinds of runs. Each folder is one `training.task.Task`; `choose` takes the right one for a
configuration.
"""
