"""Contains the kinds of runs. Each folder implements one `training.task.Task`. The module `choose`
selects the task for a configuration.
"""
