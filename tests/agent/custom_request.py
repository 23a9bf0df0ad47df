"""A kind of request that the package does not know, defined as a new one would be, and a second host's agent."""

from __future__ import annotations

import sys

from closeranks.agent.remote_agent import RemoteAgent
from closeranks.agent.transport.token import parse_token
from closeranks.core.requests import define

CUSTOM = define("custom")


if __name__ == "__main__":
    address, token = sys.argv[1:]
    RemoteAgent(address, parse_token(token, "the test"), name="second", num_workers=1, on_note=print).run()
