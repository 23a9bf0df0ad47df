"""Laws are checked without a deadline: a busy machine is not a counterexample."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
