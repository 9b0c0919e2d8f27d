"""The rules that determine the cause of an exception from its stack frames (`Evidence`). Each rule
recognises one cause. It returns a finding if it recognises its cause, and otherwise None. The texts of
the findings are in `causes.txt`.
"""

from .decision import decide_cause

__all__ = ["decide_cause"]
