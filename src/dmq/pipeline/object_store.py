"""The stores that tables can lie in: one mapping of an address to what Arrow, Delta and Spark need to know of it.

A store's settings come from the environment, of the driver and of every executor:

- a path, `file://`: this machine.
- `s3://bucket/path`, `s3a://…`: Amazon S3, and what speaks its protocol. `AWS_ACCESS_KEY_ID`,
  `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`, or `AWS_PROFILE`; `AWS_REGION`; `AWS_ENDPOINT_URL` for a store that
  is not Amazon's.
- `gs://bucket/path`: Google Cloud Storage. `GOOGLE_APPLICATION_CREDENTIALS`.
- `abfss://container@account.dfs.core.windows.net/path`: Azure. `AZURE_STORAGE_ACCOUNT_KEY` or
  `AZURE_STORAGE_SAS_TOKEN`, or the machine's identity.
- `hdfs://host:port/path`: HDFS through libhdfs. `HADOOP_HOME`, `CLASSPATH`.

What always holds: Hadoop's file systems are asked for none of these, so that Spark needs no jar. An address has one
spelling (`normal_uri`); one file system serves all folders of a store in a process. Of two commits at once to one table
one wins: S3 is asked for a conditional put, the other stores have their own.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from dmq.errors import Damaged, InvalidSettings, NoPermission, StorageError
from dmq.storage.files import storage_error

__all__ = ["delta_options", "file_system", "normal_uri", "open_parquet", "scheme_of", "store_error", "store_errors"]

_SCHEMES: Final = {"file": "file", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "abfss": "abfss", "hdfs": "hdfs"}
_REGION: Final = "us-east-1"  # what a store with an endpoint of its own takes, unless told
# A store that does not answer is an error after half a minute, not after three.
_RETRY_SECONDS: Final = 30
_CONNECT_SECONDS: Final = 10
_PATIENCE: Final = {
    "max_retries": "5",
    "retry_timeout": f"{_RETRY_SECONDS}s",
    "connect_timeout": f"{_CONNECT_SECONDS}s",
}
_COLOURED: Final = re.compile("\x1b\\[[0-9;]*m↳?|↳")  # how Delta draws the causes of an error


def normal_uri(uri: str) -> str:
    """The address as this package spells it: an absolute path, or a scheme of the table above.

    Raises:
        InvalidSettings: it is not one, or no store of this kind is known.
    """
    if not uri.strip():
        raise InvalidSettings("where is the archive? give the folder or the address of its tables")
    if "://" not in uri:
        return str(Path(uri).expanduser().absolute())
    parts = urlsplit(uri)
    scheme = _SCHEMES.get(parts.scheme.lower())
    if scheme is None:
        raise InvalidSettings(
            f"no archive can lie at {uri}: {parts.scheme!r} is not a store that is known here; give a folder, or an "
            "address that begins with s3://, gs://, abfss://, hdfs:// or file://"
        )
    if scheme == "file":
        return str(Path(unquote(parts.path)).absolute())
    if not parts.netloc:
        raise InvalidSettings(f"no archive can lie at {uri}: name the bucket, as in {scheme}://bucket/archive")
    return f"{scheme}://{uri.split('://', 1)[1].rstrip('/')}"


def scheme_of(uri: str) -> str:
    """The scheme of an address in its normal spelling."""
    return uri.split("://", 1)[0] if "://" in uri else "file"


def file_system(uri: str) -> tuple[fs.FileSystem, str]:
    """Arrow's file system for an address, and the path in it.

    Raises:
        InvalidSettings: no store of this kind is known, or a setting of it is missing.
    """
    uri = normal_uri(uri)
    scheme = scheme_of(uri)
    if scheme == "file":
        return _local(), uri
    parts = urlsplit(uri)
    with store_errors(uri):
        if scheme == "s3":
            return _s3(parts.netloc, _s3_settings()), f"{parts.netloc}{parts.path}"
        if scheme == "gs":
            return _gcs(), f"{parts.netloc}{parts.path}"
        if scheme == "abfss":
            container, _, host = parts.netloc.partition("@")
            return _azure(host.partition(".")[0]), f"{container}{parts.path}"
        files, path = fs.FileSystem.from_uri(uri)
        return files, path


def open_parquet(uri: str) -> pq.ParquetFile:
    """A file, to read row groups of: mapped into memory where it lies on this machine.

    Raises:
        OSError: it does not exist; `store_errors` has better words.
    """
    files, path = file_system(uri)
    if scheme_of(uri) == "file":
        return pq.ParquetFile(path, memory_map=True)
    return pq.ParquetFile(path, filesystem=files, pre_buffer=True)


def delta_options(uri: str) -> dict[str, str] | None:
    """What Delta is told of the store of an address; credentials it finds in the environment by itself."""
    scheme = scheme_of(uri)
    if scheme == "file":
        return None
    options = dict(_PATIENCE)
    if scheme == "s3":
        endpoint, region = _s3_settings()
        options["aws_conditional_put"] = "etag"
        if endpoint:
            options["aws_endpoint"] = endpoint
            options["aws_virtual_hosted_style_request"] = "false"
            if endpoint.startswith("http://"):
                options["aws_allow_http"] = "true"
        if region:
            options["aws_region"] = region
    return options


def _s3_settings() -> tuple[str, str]:
    """The endpoint, empty for Amazon's own, and the region, empty if it is to be found out."""
    endpoint = (os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "").rstrip("/")
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise InvalidSettings(f"AWS_ENDPOINT_URL is an address such as https://host:9000, not {endpoint!r}")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
    return endpoint, region or (_REGION if endpoint else "")


@functools.cache
def _local() -> fs.FileSystem:
    return fs.LocalFileSystem()


@functools.lru_cache(maxsize=64)
def _s3(bucket: str, settings: tuple[str, str]) -> fs.FileSystem:
    endpoint, region = settings
    how: dict[str, Any] = {"connect_timeout": _CONNECT_SECONDS}
    if endpoint:
        parts = urlsplit(endpoint)
        how |= {"endpoint_override": f"{parts.netloc}{parts.path}", "scheme": parts.scheme}
    return fs.S3FileSystem(region=region or fs.resolve_s3_region(bucket), **how)


@functools.cache
def _gcs() -> fs.FileSystem:
    return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=_RETRY_SECONDS))


@functools.lru_cache(maxsize=64)
def _azure(account: str) -> fs.FileSystem:
    key, token = (os.environ.get(f"AZURE_STORAGE_{name}") for name in ("ACCOUNT_KEY", "SAS_TOKEN"))
    return fs.AzureFileSystem(account, account_key=key, sas_token=None if key else token)


# --- what goes wrong --------------------------------------------------------------------------------------------------

# By scheme, where credentials and the way to the store come from.
_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfss": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hdfs": "the Kerberos ticket",
}
_WAY: Final = {"s3": "AWS_ENDPOINT_URL and AWS_REGION", "hdfs": "the host in the address"}
# The words that Arrow and Delta have for it, and what to do; the first that fits counts.
_CAUSES: Final[tuple[tuple[tuple[str, ...], type[StorageError], str], ...]] = (
    (
        ("nosuchbucket", "no_such_bucket", "bucket does not exist", "containernotfound"),
        StorageError,
        "its bucket does not exist: create the bucket, or correct the address",
    ),
    (
        ("credentialsnotloaded", "no credentials", "credential provider", "access token", "authenticationexception"),
        NoPermission,
        "there are no credentials: set {credentials} for the driver and for every executor",
    ),
    (
        ("invalidaccesskeyid", "invalid_access_key_id", "signaturedoesnotmatch", "signature_does_not_match", "expired"),
        NoPermission,
        "the store does not take the credentials: look at {credentials} for the driver and for every executor",
    ),
    (
        ("accessdenied", "access_denied", "403", "401 unauthorized", "forbidden"),
        NoPermission,
        "the store refuses it: set {credentials} if they are not set; else allow their owner to list the bucket, and "
        "to read, write and delete its objects",
    ),
    (
        ("libhdfs",),
        StorageError,
        "Hadoop's client is not here: install it, and set HADOOP_HOME and CLASSPATH for the driver and every executor",
    ),
    (
        (
            "network_connection",
            "error sending request",
            "connection refused",
            "resolve host",
            "timed out",
            "unavailable",
        ),
        StorageError,
        "the store does not answer: look at {way}, and whether this machine reaches it",
    ),
)


def _text(error: Exception) -> str:
    return " ".join(_COLOURED.sub("", str(error)).split())


def store_error(error: Exception, uri: str) -> StorageError:
    """What a store said, as an error that says what to do."""
    text = _text(error)
    lower, scheme = text.lower(), scheme_of(uri)
    for words, kind, advice in _CAUSES:
        if any(word in lower for word in words):
            said = advice.format(credentials=_CREDENTIALS.get(scheme, ""), way=_WAY.get(scheme, "the address"))
            return kind(f"no archive can be used at {uri}: {said} ({text[:300]})")
    return StorageError(f"the store at {uri} failed: {text[:500]}")


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """What a store says in here, or the disk of this machine, is told in our words.

    Raises:
        Damaged: a file is not what it should be.
        StorageError: the store or the disk refuses something; the message says what to do.
    """
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, pa.ArrowInvalid):
            raise Damaged(f"{uri} is damaged, put it back from a copy: {_text(error)[:300]}") from error
        if scheme_of(uri) != "file":
            raise store_error(error, uri) from error
        # Delta and Arrow tell the number in their text alone.
        number = re.search(r"\b(?:os error|errno) (\d+)\b", str(error))
        if number is not None and error.errno is None:
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        if error.errno is None:
            raise Damaged(f"{uri} cannot be read, put it back from a copy: {_text(error)[:300]}") from error
        raise storage_error(error, "use", uri) from error
