"""`dmq backup`: back up a data directory, also of a running broker; look at backups and check them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import ConfigFile, Format, Formatted, Settings
from dmq.cli.output import moment, show_facts, show_rows
from dmq.cli.process.server_process import CONFIG_FILE, DataFolder, resolve

if TYPE_CHECKING:
    from dmq.storage.offline.backup import Backup

__all__ = ["app", "backup_facts"]

app = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)

BackupFolder = Annotated[Path, typer.Argument(metavar="BACKUP", help="The folder of one backup.")]


@app.callback()
def backup(
    context: typer.Context,
    target: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where backups go, each in a folder of its own.")
    ] = None,
    data: DataFolder = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Then delete all but the newest this many.")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    form: Formatted = Format.TABLE,
) -> None:
    """Back up a data directory, beside a running broker or without one; or see the commands below.

    Everything acknowledged before it began is in the backup, with positions, delays and transactions as they were.
    Every unit of the journal is checked. Dead letters in a server's database are not in it.
    """
    if context.invoked_subcommand is not None:
        return
    if target is None:
        raise typer.BadParameter("say where the backup goes: --to DIR")
    from dmq.storage.offline.backup import BackupSource, prune, take

    directory = Path(resolve(config, {"broker.data": data}, settings).settings.broker.data)
    file = config or (Path(CONFIG_FILE) if Path(CONFIG_FILE).is_file() else None)
    made = take(BackupSource(directory, file), target)
    gone = prune(target, keep) if keep is not None else []
    show_facts(backup_facts(made) | ({"deleted": gone} if gone else {}), form)


@app.command(name="list")
def list_backups(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Where backups go.")], form: Formatted = Format.TABLE
) -> None:
    """List complete backups, the oldest first."""
    from dmq.storage.offline.backup import backups

    show_rows([backup_facts(found) for found in backups(target)], form, empty="no backups there")


@app.command()
def verify(folder: BackupFolder, form: Formatted = Format.TABLE) -> None:
    """Read all of a backup, and compare it with its checksums. The exit code is 1 if it is not good."""
    from dmq.storage.offline.backup import Backup

    found = Backup(folder)
    found.check()
    show_facts(backup_facts(found) | {"verified": True}, form)


def backup_facts(backup: Backup) -> dict[str, Any]:
    """One backup, for people and programs."""
    return {
        "backup": str(backup.folder),
        "taken": moment(backup.facts["taken_at_ms"]),
        "journal_id": backup.facts["journal_id"],
        "first_offset": backup.facts["journal_start"],
        "next_offset": backup.facts["journal_end"],
        "segments": sum(name.startswith("journal/") for name in backup.files),
        "bytes": backup.bytes,
        "dmq": backup.facts["dmq"],
    }
