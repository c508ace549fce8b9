"""`dmq spool`: what a producer's spool had accepted and no broker took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import moment, shard_fact, show_rows
from dmq.errors import WrongFormat
from dmq.model import place_queue, place_shard

if TYPE_CHECKING:
    from dmq.client.spool.spool import RefusedBatch, RefusedFolder

__all__ = ["app"]

app = make_app("Look at what a spool's broker refused; send it again or drop it.")

_SECONDS = 30.0
_BYTES_MAX = 1 << 62  # nothing is added here

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The spool's directory.")]
Numbers = Annotated[list[int] | None, typer.Argument(metavar="[NUMBER]...", help="Which batches, as listed.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]


def _folder(directory: Path) -> RefusedFolder:
    from dmq.client.spool.spool import FOLDER, RefusedFolder
    from dmq.storage.files import OsFiles

    if not any((directory / part).is_dir() for part in ("journal", FOLDER)):
        there = "is not a spool" if directory.is_dir() else "does not exist"
        raise WrongFormat(f"{directory} {there}: name the directory that the producer has as spool=")
    return RefusedFolder(OsFiles(directory, create=False), _BYTES_MAX)


def _chosen(folder: RefusedFolder, numbers: list[int] | None, take_all: bool) -> list[int]:
    """The batches that are meant, all of which are there."""
    known = folder.numbers()
    if take_all == bool(numbers):
        raise typer.BadParameter("name the batches by their numbers, or say --all")
    missing = sorted(set(numbers or ()) - set(known))
    if missing:
        raise typer.BadParameter(f"there is no batch {missing[0]}: `dmq spool list` shows those that exist")
    return known if take_all else sorted(set(numbers or ()))


@app.command("list")
def list_refused(directory: Directory, form: Formatted = Format.TABLE) -> None:
    """List the batches that were refused for good. The spool may be in use."""
    rows = [
        {
            "number": batch.number,
            "topic": batch.kept.head.topic,
            "queue": batch.kept.head.queue,
            "messages": batch.kept.head.count,
            "bytes": batch.kept.size,
            "refused": moment(batch.refusal.at_ms),
            "code": batch.refusal.code,
            "reason": batch.refusal.message,
        }
        for batch in _folder(directory)
    ]
    show_rows(rows, form, empty="nothing was refused")


@app.command()
def resend(
    directory: Directory,
    numbers: Numbers = None,
    take_all: All = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Send refused batches after all; those that a broker takes leave the spool.

    Mend the cause first. The messages get new ids, and come behind those sent since. A batch of ordered messages whose
    queue takes no more, because its shard has no slot of the topic now, stays in the spool, and the others are sent.
    """
    from dmq.client.connection.route_book import ANY
    from dmq.client.spool.spool import send_refused

    folder = _folder(directory)
    chosen = _chosen(folder, numbers, take_all)
    rows, kept = [], 0
    with connected(url) as client:
        for number in chosen:
            batch = folder.read(number)
            topic, router = batch.kept.head.topic, client._router
            if router.book is not None:
                router.learn(topic, _SECONDS)
            place = batch.kept.head.queue if batch.kept.head.is_pinned and place_shard(batch.kept.head.queue) else ANY
            if router.book is not None and place != ANY and place not in router.book.places(topic):
                kept += 1
                typer.echo(_homeless(number, batch, router.shard_name(place_shard(place))), err=True)
                continue
            reply = send_refused(router.pool_for(topic, place).connection(), batch, _SECONDS)
            folder.drop(number)
            rows.append(
                {
                    "number": number,
                    "topic": batch.kept.head.topic,
                    **shard_fact(client.admin.shard_names, reply.shard),
                    "queue": reply.queue,
                    "first_offset": reply.first_offset,
                    "messages": batch.kept.head.count,
                }
            )
    show_rows(rows, form, empty="nothing was sent" if kept else "nothing was refused")
    if kept:
        raise typer.Exit(1)


def _homeless(number: int, batch: RefusedBatch, shard: str) -> str:
    """The sentence for a batch whose queue is gone."""
    head = batch.kept.head
    return (
        f"batch {number} stays: its order binds it to queue {place_queue(head.queue)} of shard {shard}, which takes no "
        f"messages of {head.topic} now; give it a slot again with `dmq topic place {head.topic} --add {shard}`, or "
        "drop the batch and send its messages anew"
    )


@app.command()
def drop(
    directory: Directory,
    numbers: Numbers = None,
    take_all: All = False,
    yes: Annotated[bool, typer.Option("--yes", help="Yes, delete their messages for good.")] = False,
) -> None:
    """Delete refused batches for good."""
    folder = _folder(directory)
    chosen = _chosen(folder, numbers, take_all)
    if not yes:
        raise typer.BadParameter(f"{len(chosen)} batches would be gone for good: say --yes if that is meant")
    for number in chosen:
        folder.drop(number)
    typer.echo(f"{len(chosen)} batches dropped")
