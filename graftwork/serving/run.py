"""A server process: its address, its key, its life."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from ..ir import InputError
from ..ir.support.files import read_text

KEY = "GRAFTWORK_API_KEY"
"""The environment variable that holds the key, if no file does."""

LEAST_KEY = 8
"""Characters of a key."""

PATIENCE = 30
"""Seconds that requests have to end when the server is asked to stop."""


def read_key(path: Path | None) -> str | None:
    """The key that clients must give: of a file, or the environment; None: there is none. Errors:
    `InputError` for a file that cannot be read, and for one that is too short."""
    if path is None:
        found, where = os.environ.get(KEY), KEY
    else:
        where = f"--api-key-file {path}"
        try:
            found = read_text(path).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{where}: cannot read the key: {error}") from error
    if found is not None and not (len(found) >= LEAST_KEY and found.isascii()):
        raise InputError(f"{where}: expected a key of {LEAST_KEY} or more ASCII characters")
    return found


def listen(host: str, port: int, key: str | None) -> socket.socket:
    """A socket on that address; others may not have it from now on. Errors: `InputError` for an
    address that others reach without a key, and for one that cannot be had."""
    if key is None and not _is_loopback(host):
        raise InputError(
            f"--host {host}: other machines reach this address, so clients need a key: give "
            f"--api-key-file FILE, or set {KEY}"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "another process listens there; take another --port" if taken else str(error)
        raise InputError(f"cannot listen on {host}, port {port}: {why}") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_of(listening: socket.socket) -> str:
    """As in URLs: host and port."""
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(app: FastAPI, listening: socket.socket) -> None:
    """Answer requests until the process is asked to stop (SIGINT, SIGTERM)."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=PATIENCE
    )
    uvicorn.Server(config).run(sockets=[listening])
