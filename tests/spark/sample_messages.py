"""Messages for the tests of reading, and how to read them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dmq
from dmq.pipeline import DmqDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGE = 300


@dataclass(frozen=True)
class Published:
    """What was published, and where."""

    url: str
    messages: list[tuple[dmq.Receipt, dmq.Message]]
    before_middle: int
    middle_ms: int
    large: int = LARGE

    @property
    def servers(self) -> str:
        return self.url.removeprefix("dmq://")


def publish(url: str, prefix: str) -> Published:
    rng = random.Random(prefix)
    small = [
        dmq.Message(
            rng.randbytes(rng.randrange(80)) if number % 3 else b"abc" * 100,
            key=rng.choice([None, f"k-{number}", "ключ"]),
            tag=rng.choice([None, "created"]),
            business_id=rng.choice([None, "u-7"]),
            priority=rng.randrange(10),
            properties=rng.choice([None, {"a": "1", "é": ""}]),
        )
        for number in range(200)
    ]
    found: list[tuple[dmq.Receipt, dmq.Message]] = []
    with dmq.connect(url, app="shop") as client:
        client.admin.create_topic(f"{prefix}.orders", queues=4)
        client.admin.create_topic(f"{prefix}.large", queues=2)
        with client.producer(compression="auto") as producer:
            found += zip(producer.send_many(f"{prefix}.orders", small[:80]), small[:80], strict=True)
            time.sleep(0.02)
            middle_ms = time.time_ns() // 1_000_000
            time.sleep(0.02)
            producer.send_many(f"{prefix}.large", [dmq.Message(rng.randbytes(5000)) for _ in range(LARGE)])
            for message in small[80:]:
                found.append((producer.send(f"{prefix}.orders", message.body, **_fields(message)), message))
    return Published(url, found, 80, middle_ms)


def _fields(message: dmq.Message) -> dict[str, Any]:
    return {
        "key": message.key,
        "tag": message.tag,
        "business_id": message.business_id,
        "priority": message.priority,
        "properties": message.properties,
    }


def reading(spark: SparkSession, url: str, *, stream: bool = False, **options: Any) -> Any:
    """A reader of a broker with these options."""
    spark.dataSource.register(DmqDataSource)
    reader = spark.readStream if stream else spark.read
    return reader.format("dmq").option("dmq.bootstrap.servers", url.removeprefix("dmq://")).options(**options)
