"""URLs whose text may be shown and stored, because it lacks what may be secret."""

from __future__ import annotations

import re
from typing import Any

# Scheme, login, host and port, path. What does not fit is not shown at all, such as a password with a slash, of which
# the start may look like a port, or an empty host, after which a login would be a path. A path of `pathlib` has one
# slash after the scheme.
_PARTS = re.compile(
    r"(?!(?!sqlite:|file:)[^:]*:///)([a-z][a-z0-9+.-]*:(?://|/(?!/)))(?:[^/?#]*@)?"
    r"((?:\[[0-9a-f:.%]*\]|[^:@/?#\[\]]*)(?::[0-9]*(?!.*@))?)(?=[/?#]|$)([^?#]*)",
    re.IGNORECASE | re.DOTALL,
)
# A login may have quotes and, with a password, spaces. After a host and a space, other text follows.
_IN_TEXT = re.compile(r"\b[a-z][a-z0-9+.-]+:/+(?:[^/?#\s]*@|[^/?#:]*:[^/?#]*@)?[^\s'\"<>]+", re.IGNORECASE)


class Address(str):
    """The text of a URL without its login, query and fragment: all that messages, files and trackers get. `full`, the
    URL itself, is for what opens it."""

    full: str

    def __new__(cls, url: str) -> Address:
        parts = _PARTS.match(url)
        address = super().__new__(cls, "".join(parts.groups()) if parts else f"{url.partition(':')[0]}://...")
        address.full = url.full if isinstance(url, Address) else url
        return address


def as_address(value: Any) -> Any:
    """Returns an `Address` if ``value`` is the text of a URL, else ``value``."""
    return Address(value) if isinstance(value, str) and "://" in value else value


def full_address(value: Any) -> Any:
    """Returns the URL of an `Address`, and other values as they are."""
    return value.full if isinstance(value, Address) else value


def with_short_addresses(message: str) -> str:
    """Returns ``message`` with each URL in it as the text of its `Address`."""
    return _IN_TEXT.sub(lambda url: Address(url[0]), message)
