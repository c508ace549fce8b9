"""`dmq restore`: make a data directory of a backup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dmq.cli.local.backup import backup_facts
from dmq.cli.options import Format, Formatted, make_app
from dmq.cli.output import show_facts

__all__ = ["app"]

app = make_app("Make a data directory of a backup.")


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(metavar="BACKUP", help="The folder of one backup.")],
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="The directory to make; it is empty or does not exist.")
    ],
    form: Formatted = Format.TABLE,
) -> None:
    """Make a data directory of a backup, checked before and after. A broker started on it goes on from the backup."""
    from dmq.storage.offline.backup import Backup
    from dmq.storage.offline.backup import restore as make_directory

    backup = Backup(folder)
    make_directory(backup, data)
    show_facts(backup_facts(backup) | {"restored_to": str(data)}, form)
