"""`import isotype.hook` in a program explains the dtype error that ends it, as `isotype doctor run`
does.
"""

from .doctor.run.hook import install

install()
