"""On which published runs may constants be fitted, and which are kept for the test?

Whole sources, by a hash of their name: nobody chooses. A source is a repository (or a paper, or a page): all its tables
were measured with the same software, so they stay on one side. Invariant: the side depends on the name alone, and a
source that is not in our table has a side as well.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Literal

Side = Literal["fit", "held out"]


def source_name(text: str) -> str:
    """``owner/repository`` of ``owner/repository@commit:path (remarks)``; ``arXiv 2205.05198`` of its abstract."""
    found = re.match(r"arXiv\s+[^\s:@]+|[^\s:@]+", text.strip())
    return found.group() if found else text.strip()


def side_of(source: str) -> Side:
    """Of a source's name: ``fit`` if the first byte of its SHA-256 is even."""
    return "held out" if sha256(source.encode()).digest()[0] % 2 else "fit"


FITTED_ON = frozenset(
    {
        "EleutherAI/gpt-neox",
        "NVIDIA-NeMo/Megatron-Bridge",
        "NVIDIA/Megatron-LM",
        "NVIDIA/NeMo",
        "ai-papers.xuzou.cn/papers/opt_2022",
        "deepspeedai/DeepSpeed",
        "hpcaitech/ColossalAI",
        "huggingface.co/spaces/nanotron/ultrascale-playbook",
    }
)
"""The sources of our table on the fitting side: the constants have seen them. Every other source is unseen, also one
that our table does not have."""


def is_unseen(source: str) -> bool:
    return source not in FITTED_ON
