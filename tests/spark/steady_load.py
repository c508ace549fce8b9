"""A load that never changes: `python -m tests.spark.steady_load URL RATE` sends and acks until its input ends.

Every hundredth message fails once. It prints how many it has sent and settled, at its end.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import dmq

TOPIC = "steady"
GROUP = "billing"


def produce(url: str, rate: float, over: threading.Event) -> int:
    rng, sent, began = random.Random(1), 0, time.monotonic()
    with dmq.connect(url, app="shop") as client, client.producer() as producer:
        while not over.wait(0.05):
            for _ in range(int((time.monotonic() - began) * rate) - sent):
                producer.send_async(TOPIC, rng.randbytes(200), key=f"k-{sent}", business_id=f"b-{sent % 1000}")
                sent += 1
        producer.flush()
    return sent


def consume(url: str, over: threading.Event) -> int:
    settled = 0
    with dmq.connect(url, app="shop") as client:
        consumer = client.consumer(TOPIC, GROUP)
        while not over.is_set():
            for message in consumer.pull(500, 1.0):
                if message.attempt == 1 and int(message.offset) % 100 == 0:
                    message.nack(0.0, "not yet")
                else:
                    message.ack()
                    settled += 1
        consumer.close()
    return settled


def main(url: str, rate: str) -> None:
    over, counts = threading.Event(), {}
    ways = {"sent": lambda: produce(url, float(rate), over), "settled": lambda: consume(url, over)}

    def run(name: str) -> None:
        counts[name] = ways[name]()

    threads = [threading.Thread(target=run, args=(name,)) for name in ways]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    print(counts["sent"], counts["settled"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
