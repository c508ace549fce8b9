"""A program for `spark-submit`: copies a topic into another. `copy_topic.py SERVERS FROM TO`."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession


def main(servers: str, source: str, target: str) -> None:
    spark = SparkSession.builder.appName("copy").getOrCreate()
    rows = spark.read.format("dmq").option("dmq.bootstrap.servers", servers).option("subscribe", source).load()
    rows.select("key", "value").write.format("dmq").option("dmq.bootstrap.servers", servers).option(
        "topic", target
    ).mode("append").save()
    hosts = spark.sparkContext.parallelize(range(8), 8).map(lambda _: __import__("os").getppid()).distinct().count()
    print(f"copied by {hosts} executors")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
