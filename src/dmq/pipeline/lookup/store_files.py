"""Files of an object store for DuckDB, read through Arrow: DuckDB's own reader would have to be downloaded.

What always holds: nothing is written, and a file is read where it is asked for and not from its beginning.
"""

from __future__ import annotations

from typing import Any

from fsspec import AbstractFileSystem
from pyarrow import fs

from dmq.pipeline.object_store import file_system, store_errors

__all__ = ["StoreFiles"]


class StoreFiles(AbstractFileSystem):  # type: ignore[misc]
    """The files of all addresses with one scheme.

    Parameters:
        scheme: as `scheme_of` gives it.
    """

    cachable = False

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.protocol = scheme

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def info(self, path: str, **how: Any) -> dict[str, Any]:
        files, below = file_system(path)
        with store_errors(path):
            found = files.get_file_info(below)
        if found.type != fs.FileType.File:
            raise FileNotFoundError(path)
        return {"name": path, "size": found.size, "type": "file", "mtime": found.mtime}

    def modified(self, path: str) -> Any:
        return self.info(path)["mtime"]

    def glob(self, path: str, **how: Any) -> list[str]:
        return [path]  # files are named one by one

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        files, below = file_system(path)
        with store_errors(path):
            return files.open_input_file(below)
