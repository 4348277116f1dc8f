"""Where commands write: refused before the work begins, written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from megatron_dcp.errors import ConfigError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_folder(path: Path) -> None:
    """Raises ConfigError where `path` is no folder and none can be made there."""
    found = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not found.is_dir():
        raise ConfigError(f"cannot write into {str(path)!r}: {str(found)!r} is not a folder")
    if not os.access(found, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write into {str(path)!r}: no permission in {str(found)!r}")


def check_file(path: Path) -> None:
    """Raises ConfigError where no file `path` can be written; its folder must exist."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: {str(folder)!r} is not a folder")
    if path.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {str(path)!r}: no permission")


def write_whole(path: Path, data: bytes) -> None:
    """A temporary file beside the target, then a rename. Links are followed; a device or a pipe is
    written to, never replaced. Raises ConfigError; OSError of NO_ROOM where the disk is full."""
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno in NO_ROOM:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from error
