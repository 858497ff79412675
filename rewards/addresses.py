"""Where services are, who may reach them, and the secret that opens them."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

__all__ = ["TOKEN_VARIABLE", "checked_urls", "is_loopback", "secret_of"]

TOKEN_VARIABLE = "FLOWRL_REWARD_TOKEN"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost could resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def secret_of(variable: str) -> str | None:
    """The secret in an environment variable, without white space around it; None where there is none.

    ValueError, which does not show it, for one that cannot stand in an HTTP header.
    """
    secret = os.environ.get(variable, "").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise ValueError(f"the environment variable {variable} must hold printable ASCII characters in one line")
    return secret or None


def checked_urls(owner: str, given: str | tuple[str, ...]) -> tuple[str, ...]:
    """The addresses without a slash at their end. ValueError when one is no http address."""
    urls = (given,) if isinstance(given, str) else given
    for url in urls:
        if not _is_http(url):
            raise ValueError(f"{owner} url must be http://host:port, or a list of them, got {url!r}")
    if not urls:
        raise ValueError(f"{owner} url must name a server, http://host:port")
    return tuple(url.rstrip("/") for url in urls)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number up to 65535, half an IPv6 address
        return False
