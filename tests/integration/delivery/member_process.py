"""A member of a group in a process of its own, to be stopped: `python member_process.py URL TOPIC push|pull PACE`.

It says `BODY ATTEMPT` of each message that it has handled.
"""

from __future__ import annotations

import sys
import time

from dmq.client.client import connect
from dmq.client.consumer.message import ReceivedMessage

GROUP = "billing"
LEASE_SECONDS = 1.0
MAX_ATTEMPTS = 3


def main(url: str, topic: str, how: str, pace: float) -> None:
    def handle(message: ReceivedMessage) -> None:
        time.sleep(pace)
        sys.stdout.write(f"{message.body.decode()} {message.attempt}\n")
        sys.stdout.flush()

    with connect(url, app="test") as client:
        consumer = client.consumer(topic, GROUP, prefetch=20, lease=LEASE_SECONDS, max_attempts=MAX_ATTEMPTS)
        if how == "push":
            consumer.run(handle, workers=1)
            return
        while True:
            for message in consumer.pull(5, wait=30.0):
                handle(message)
                message.ack()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
