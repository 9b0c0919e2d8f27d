"""Run folders, configurations and adapters that earlier versions wrote; later versions must go on
reading them.
"""
