"""What was imported so far is never looked at by the garbage collector again, here and in every fork.

Imported for that alone, last of what the process that ranks are forked from imports: a rank's first collection would
look through all of torch, which takes longer than most worlds live.
"""

import gc

gc.collect()
gc.freeze()
