"""Ownership of file descriptors: an fd always belongs to somebody."""

from __future__ import annotations

import os
import stat
import warnings
from types import TracebackType

__all__ = ["OwnedFd", "describe_fd"]


class OwnedFd:
    """A file descriptor with one owner, who closes it or hands it on.

    Closing twice does nothing. An instance that is garbage collected while it still owns its fd closes it and emits a
    ``ResourceWarning``, so that a leak shows up in the tests. It is not locked: one thread at a time owns an fd.

    Parameters
    ----------
    fd
        An open file descriptor. From here on nobody else may close it.

    Raises
    ------
    ValueError
        If `fd` is negative.
    """

    __slots__ = ("__weakref__", "_fd")

    _fd: int | None

    def __init__(self, fd: int) -> None:
        self._fd = None  # so that __del__ finds it, also when the next line refuses
        if fd < 0:
            raise ValueError(f"a file descriptor is not negative, but this one is {fd}")
        self._fd = fd

    @property
    def closed(self) -> bool:
        """Whether the fd has been closed or detached."""
        return self._fd is None

    def fileno(self) -> int:
        """The fd's number; this object still owns it.

        Raises
        ------
        ValueError
            If the fd has been closed or detached.
        """
        if self._fd is None:
            raise ValueError("this file descriptor has been closed or detached")
        return self._fd

    def detach(self) -> int:
        """Give up ownership: the caller closes the returned fd.

        Raises
        ------
        ValueError
            If the fd has been closed or detached.
        """
        fd = self.fileno()
        self._fd = None
        return fd

    def close(self) -> None:
        """Close the fd; does nothing when it is closed or detached already."""
        # Forget the number first: after a failed close(2) Linux has freed it all the same, and closing it again could
        # close what another thread has opened meanwhile.
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> OwnedFd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._fd is not None:
            try:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            finally:  # where warnings are errors, too
                self.close()

    def __repr__(self) -> str:
        return "<OwnedFd closed>" if self._fd is None else f"<OwnedFd {self._fd}>"


_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def describe_fd(fd: int) -> str:
    """Say in a few words what an open fd is, for messages to people.

    Raises
    ------
    OSError
        With ``EBADF`` if the fd is not open.
    """
    status = os.fstat(fd)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "an anonymous kernel object")
    return f"{kind} of {status.st_size} bytes" if stat.S_ISREG(status.st_mode) else kind
