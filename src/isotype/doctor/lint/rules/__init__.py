"""One file a rule: `ltNNN_name.py`."""
