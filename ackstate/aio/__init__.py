"""Topics and subscriptions for asyncio: the same objects, with calls to await.

Calls that wait for the disk do so in a worker thread, so no topic delays another. The calls of one topic come one after
the other, as the threading rules demand (docs/embedding.md).
"""

from ackstate.aio.subscription import AsyncSubscription
from ackstate.aio.topic import AsyncTopic
from ackstate.aio.topics import AsyncTopics as AsyncTopics

__all__ = ["AsyncSubscription", "AsyncTopic"]
