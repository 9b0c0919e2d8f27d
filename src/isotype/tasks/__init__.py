"""The kinds of runs. Each folder implements one `training.task.Task`; `choose` selects the one for
a configuration.
"""
