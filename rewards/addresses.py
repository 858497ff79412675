"""Where services are, who may reach them, and the secret that opens them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

__all__ = ["TOKEN_VARIABLE", "checked_urls", "is_loopback"]

TOKEN_VARIABLE = "FLOWRL_REWARD_TOKEN"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost could resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_urls(owner: str, given: str | tuple[str, ...]) -> tuple[str, ...]:
    """The addresses without a slash at their end. ValueError when one is no http address."""
    urls = (given,) if isinstance(given, str) else given
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{owner} url must be http://host:port, or a list of them, got {url!r}")
    if not urls:
        raise ValueError(f"{owner} url must name a server, http://host:port")
    return tuple(url.rstrip("/") for url in urls)
