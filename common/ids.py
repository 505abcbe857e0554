"""Names for the things that cross a boundary."""

from typing import NewType

AgentId = NewType("AgentId", str)
"""One agent process; a new one each time the process starts."""

RequestId = NewType("RequestId", str)
"""One accepted request; made by the balancer, unlike the ids that clients choose on their sockets."""

SequenceId = NewType("SequenceId", int)
"""One KV sequence of a llama.cpp context."""

TokenId = NewType("TokenId", int)
"""An index into a model's vocabulary."""
