"""Contexts: brokers' URLs by name, in a file of the user's own, and which URL a command takes.

What always holds: only its user can read the file, since URLs will hold credentials; it is replaced as a whole, so that
a reader never sees half of it; a command's URL comes from `--url` or `--context`, else from `DMQ_URL`, else from the
context in use, else it is the default.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.main import get_command

from dmq.errors import DMQError, InvalidName, InvalidSettings

__all__ = ["Contexts", "UrlSource", "choose_url", "choose_urls", "context_option", "url_source"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CHOSEN = "dmq.context"
_SOURCE = "dmq.url"


class UrlSource(NamedTuple):
    """The URL of a command, and where it came from."""

    url: str
    source: str


class Contexts:
    """The contexts of this user.

    Parameters:
        file: where they are kept; by default `dmq/contexts.json` in the user's folder for settings.

    Raises:
        InvalidSettings: the file is not what this class wrote.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or _folder() / "dmq" / "contexts.json"
        self.urls: dict[str, str] = {}
        self.current: str | None = None
        try:
            found = json.loads(self.file.read_text())
            self.urls = {str(name): str(entry["url"]) for name, entry in found["contexts"].items()}
            self.current = None if found["current"] is None else str(found["current"])
        except FileNotFoundError:
            return
        except OSError as error:
            raise InvalidSettings(f"the contexts in {self.file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidSettings(f"{self.file} holds no contexts: correct or delete it") from None

    def url(self, name: str) -> str:
        """The URL of a context.

        Raises:
            InvalidName: there is none of that name.
        """
        if name not in self.urls:
            known = f"there are {', '.join(sorted(self.urls))}" if self.urls else "dmq context add makes one"
            raise InvalidName(f"there is no context {name!r}: {known}")
        return self.urls[name]

    def add(self, name: str, url: str, *, replace: bool = False) -> None:
        """Give a URL a name.

        Raises:
            InvalidName: the name cannot be used, or is taken by another URL.
            InvalidSettings: the URL is none.
        """
        from dmq.client.connection.url import check_url

        if not _NAME.fullmatch(name):
            raise InvalidName(f"{name!r} is not a name for a context: use up to 64 letters, digits, '.', '_' and '-'")
        check_url(url)
        if not replace and self.urls.get(name, url) != url:
            raise InvalidName(f"context {name!r} is {self.urls[name]}: say --replace to change it")
        self.urls[name] = url

    def remove(self, name: str) -> bool:
        """Forget a context; tells whether it was in use. Raises as `url` does."""
        self.url(name)
        del self.urls[name]
        was_current = self.current == name
        if was_current:
            self.current = None
        return was_current

    def save(self) -> None:
        """Write them down."""
        found = {"current": self.current, "contexts": {name: {"url": url} for name, url in self.urls.items()}}
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A file of `mkstemp` is the user's alone from the beginning.
            number, name = tempfile.mkstemp(dir=self.file.parent, prefix=".contexts-")
            try:
                with open(number, "w") as stream:
                    json.dump(found, stream, indent=2)
                    stream.write("\n")
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(name, self.file)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise DMQError(f"the contexts cannot be written to {self.file}: {error.strerror}") from None


def _folder() -> Path:
    named = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".config"


def _remember(context: typer.Context, value: str | None) -> str | None:
    context.meta[_CHOSEN] = value
    return value


def _template(
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="CONTEXT",
            callback=_remember,
            is_eager=True,
            expose_value=False,
            help="Its broker instead; see dmq context.",
        ),
    ] = None,
) -> None: ...


def context_option() -> Any:
    """The parameter `--context`, which every command with a `--url` or `--broker` gets."""
    app = typer.Typer(add_completion=False)
    app.command()(_template)
    return next(option for option in get_command(app).params if "--context" in option.opts)


def choose_url(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """The URL that a command takes: the callback of `--url`, and of a `--broker`."""
    chosen = context.meta.get(_CHOSEN)
    kind, flag = _given(context, parameter), parameter.opts[0]
    if chosen is not None:
        if kind == "COMMANDLINE":
            raise typer.BadParameter(f"{flag} and --context exclude each other: give one of them")
        contexts = Contexts()
        found = UrlSource(contexts.url(chosen), f"context {chosen} ({contexts.file})")
    elif kind == "COMMANDLINE":
        found = UrlSource(value, f"flag {flag}")
    elif kind == "ENVIRONMENT":
        found = UrlSource(value, "environment DMQ_URL")
    else:
        contexts = Contexts()
        found = UrlSource(value, "default")
        if contexts.current is not None:
            found = UrlSource(contexts.url(contexts.current), f"context {contexts.current} ({contexts.file})")
    context.meta[_SOURCE] = found
    return found.url


def choose_urls(context: typer.Context, parameter: typer.CallbackParam, value: list[str] | None) -> list[str]:
    """The same for a `--broker` that may be given again, and has no default."""
    if value and context.meta.get(_CHOSEN) is None:
        return value
    found = choose_url(context, parameter, "")
    return [found] if found else []


def _given(context: typer.Context, parameter: typer.CallbackParam) -> str:
    """Where the value of an option comes from."""
    source = context.get_parameter_source(str(parameter.name))
    return source.name if source is not None else "DEFAULT"


def url_source(context: typer.Context) -> UrlSource:
    """What `choose_url` chose for this command."""
    found: UrlSource = context.meta[_SOURCE]
    return found
