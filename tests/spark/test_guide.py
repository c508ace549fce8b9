"""What the guide to Spark shows works: its Python blocks are run, in order, against a broker in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from dmq.testing import TestBroker

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "guide" / "spark.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_guide_shows_what_works(spark: SparkSession, dmq_broker: TestBroker, tmp_path: Path) -> None:
    for page in (README, PAGE):  # a reader has run what the README shows, on the same broker
        text = page.read_text()
        names: dict[str, Any] = {"__name__": "page"}
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            code = match[1].replace("127.0.0.1:9611", dmq_broker.url.removeprefix("dmq://"))
            code = code.replace("/tmp/checkpoints", str(tmp_path)).replace('master("local[*]").', "")
            exec(compile("\n" * line + code, str(page), "exec"), names)
        assert names["spark"] is spark
