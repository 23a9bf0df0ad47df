"""Make forks of this process cheap: imported last by the process that ranks are forked from, for that alone.

What was imported so far is never looked at by the garbage collector again, here and in every fork: a rank's first
collection would look through all of torch, which takes longer than most worlds live. And it lies on huge pages, which
halves what the kernel does for a rank.
"""

import gc

from closeranks.core.system.linux import use_huge_pages

gc.collect()
gc.freeze()
use_huge_pages()
