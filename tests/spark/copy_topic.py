"""A program for `spark-submit`: a stream from topic to topic. `copy_topic.py SERVERS FROM TO CHECKPOINT`."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession


def main(servers: str, source: str, target: str, checkpoint: str) -> None:
    spark = SparkSession.builder.appName("copy").getOrCreate()
    rows = (
        spark.readStream.format("dmq")
        .option("dmq.bootstrap.servers", servers)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 3000)
        .option("minPartitions", 4)
        .load()
    )
    (
        rows.select("key", "value")
        .writeStream.format("dmq")
        .option("dmq.bootstrap.servers", servers)
        .option("topic", target)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
