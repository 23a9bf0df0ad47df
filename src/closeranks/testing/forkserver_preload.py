"""Makes forks of this process cheap; imported last by the process that ranks are forked from, for that purpose alone.

Everything imported so far is excluded from garbage collection, here and in every fork: a rank's first collection would
otherwise scan all of torch, which takes longer than most worlds live. It is also moved to huge pages, which halves the
kernel's work for a rank.
"""

import gc

from closeranks.core.system.linux import use_huge_pages

gc.collect()
gc.freeze()
use_huge_pages()
