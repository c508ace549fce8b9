"""Addresses of stores, and what is said of a store that refuses."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from dmq.errors import Damaged, DiskFull, InvalidSettings, NoPermission, StorageError
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.object_store import delta_options, file_system, normal_uri, scheme_of, store_error, store_errors
from dmq.pipeline.tables import MESSAGE
from tests.object_store import ObjectStore, StorePort


class Refusal(BaseHTTPRequestHandler):
    """Answers everything with one error of S3."""

    status, code = 403, "AccessDenied"

    def do_GET(self) -> None:
        body = f'<?xml version="1.0"?><Error><Code>{self.code}</Code><Message>no</Message></Error>'.encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Refusal]]:
    """A server that refuses, named by the environment."""
    kind = type("Refusal", (Refusal,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    yield kind
    server.shutdown()
    server.server_close()


def test_an_address_has_one_spelling(tmp_path: Path) -> None:
    assert normal_uri("s3a://bucket/a/b/") == normal_uri("S3://bucket/a/b") == "s3://bucket/a/b"
    assert normal_uri("gcs://bucket/a") == "gs://bucket/a"
    assert normal_uri(f"file://{tmp_path}/x") == normal_uri(f"{tmp_path}/x") == f"{tmp_path}/x"
    assert normal_uri("abfss://box@account.dfs.core.windows.net/a/") == "abfss://box@account.dfs.core.windows.net/a"
    assert [scheme_of(uri) for uri in ("/a", "s3://b", "hdfs://h/x")] == ["file", "s3", "hdfs"]


@pytest.mark.parametrize(
    ("uri", "said"),
    [("", "where is the archive"), ("gopher://a/b", "'gopher' is not a store"), ("s3:///a", "the bucket")],
)
def test_an_address_that_is_none_is_refused(uri: str, said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        normal_uri(uri)


def test_arrow_and_delta_are_told_the_same_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    files, path = file_system("s3a://bucket/a/b")
    assert (path, files.region) == ("bucket/a/b", "eu-west-3")
    options = delta_options("s3://bucket/a/b")
    assert options is not None
    assert (options["aws_endpoint"], options["aws_region"]) == ("http://127.0.0.1:9000", "eu-west-3")
    assert (options["aws_allow_http"], options["aws_conditional_put"]) == ("true", "etag")
    assert file_system("s3://bucket/other")[0] is files
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://store")
    options = delta_options("s3://bucket/a/b")
    assert options is not None
    assert options["aws_endpoint"] == "https://store"
    assert "aws_allow_http" not in options
    assert delta_options("/folder") is None
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "store:9000")
    with pytest.raises(InvalidSettings, match="AWS_ENDPOINT_URL is an address"):
        delta_options("s3://bucket/a")


def test_a_path_in_azure_begins_with_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    files, path = file_system("abfss://box@account.dfs.core.windows.net/a/b")
    assert (type(files), path) == (fs.AzureFileSystem, "box/a/b")


@pytest.mark.parametrize(
    ("status", "code", "kind", "advice"),
    [
        (403, "AccessDenied", NoPermission, "set AWS_ACCESS_KEY_ID .* allow their owner to list the bucket"),
        (403, "InvalidAccessKeyId", NoPermission, "does not take the credentials: look at AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", NoPermission, "does not take the credentials"),
        (404, "NoSuchBucket", StorageError, "create the bucket, or correct the address"),
    ],
)
def test_a_refusal_of_the_store_says_what_to_do(
    refusal: type[Refusal], status: int, code: str, kind: type[StorageError], advice: str
) -> None:
    refusal.status, refusal.code = status, code
    with pytest.raises(kind, match=advice):
        Archive.open("s3://bucket/archive")


def test_a_store_that_is_not_there_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match="look at AWS_ENDPOINT_URL"):
        Archive.create("s3://bucket/archive")


def test_what_other_stores_say_is_told_in_their_words() -> None:
    no_client = store_error(OSError("Unable to load libhdfs: dlopen failed"), "hdfs://host/a")
    assert "set HADOOP_HOME and CLASSPATH" in str(no_client)
    no_token = store_error(OSError("Could not create a OAuth2 access token"), "gs://bucket/a")
    assert isinstance(no_token, NoPermission)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(no_token)
    strange = store_error(pa.ArrowException("\x1b[31m↳\x1b[0m something\n  else"), "abfss://b@a/x")
    assert str(strange) == "the store at abfss://b@a/x failed: something else"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(errno.ENOSPC, "no"), DiskFull, "no space left to use /archive: free some space"),
        (
            OSError("Unable to copy\n ↳ No space left on device (os error 28)"),
            DiskFull,
            "no space left to use /archive",
        ),
        (OSError(errno.EACCES, "no"), NoPermission, "give this user read and write permission"),
        (OSError("ZSTD decompression failed"), Damaged, "/archive cannot be read, put it back from a copy: ZSTD"),
        (pa.ArrowInvalid("magic bytes not found"), Damaged, "/archive is damaged, put it back from a copy: magic"),
    ],
)
def test_what_the_disk_says_is_told_with_what_to_do(error: Exception, kind: type[StorageError], said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)), store_errors("/archive"):
        raise error


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"could not use .*/file"):
        Folder.at(str(tmp_path / "file")).make("below")


def test_credentials_that_the_store_does_not_take_are_told_by_whatever_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "2")  # those that make the bucket
    port = StorePort()
    for name, value in port.environment.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore(port)
    try:
        uri = f"{store.bucket()}/archive"
        asked: list[Callable[[], object]] = [
            lambda: Archive.open(uri),
            lambda: Archive(uri).table(MESSAGE).rows(),  # through Delta
            lambda: Archive(uri).table(MESSAGE).make(),
        ]
        for ask in asked:
            with pytest.raises(
                NoPermission, match="the store does not take the credentials: look at AWS_ACCESS_KEY_ID"
            ):
                ask()
    finally:
        store.close()
        port.socket.close()


def test_all_who_claim_a_name_at_once_hear_who_was_first(object_store: ObjectStore) -> None:
    folder = Folder.at(f"{object_store.bucket()}/claims")
    for name in ("a", "b", "c", "d", "e"):
        together = threading.Barrier(4)

        def claim(number: int, name: str = name, together: threading.Barrier = together) -> str:
            together.wait()
            return folder.claim(name, f"{number}")

        with ThreadPoolExecutor(4) as threads:
            heard = {*threads.map(claim, range(4))}
        assert heard == {folder.claimed(name)}
    assert folder.claim("a", "later") == folder.claimed("a") != "later"
    assert folder.claimed("nobody's") is None
