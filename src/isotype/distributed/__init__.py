"""One run on many processes: who they are, what they agree on, what each of them does, and who is
named when one is lost.
"""
